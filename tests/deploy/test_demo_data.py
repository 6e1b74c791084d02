"""The demo model's training data: cleaning and splitting, and committed files that match data.json."""

import gzip
import hashlib
import io
import json
import struct
import sys
import tarfile
import unicodedata
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from examples.demo_model import prepare_data, text_cleaning, text_readers, text_split
from examples.demo_model.text_split import Document

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo"


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((DEMO / "data.json").read_text())


@pytest.fixture(scope="module")
def heldout() -> list[dict]:
    return [json.loads(line) for line in (DEMO / "heldout.jsonl").read_text().splitlines()]


def test_heldout_matches_data_json(record: dict, heldout: list[dict]) -> None:
    written = (DEMO / "heldout.jsonl").read_bytes()
    assert hashlib.sha256(written).hexdigest() == record["files"]["heldout.jsonl"]["sha256"]
    assert len(written) == record["files"]["heldout.jsonl"]["bytes"]
    counts = Counter(document["source"] for document in heldout)
    assert counts == {source["source"]: source["heldout"]["documents"] for source in record["sources"]}
    sizes: Counter[str] = Counter()
    for document in heldout:
        sizes[document["source"]] += len(document["text"].encode())
    assert sizes == {source["source"]: source["heldout"]["bytes"] for source in record["sources"]}


def test_heldout_documents_are_clean(heldout: list[dict]) -> None:
    assert len({(document["source"], document["title"]) for document in heldout}) == len(heldout)
    for document in heldout:
        assert set(document) == {"source", "title", "ask", "text"}
        assert all(document.values()), document["title"]
        text = document["text"]
        assert not [c for c in text if c != "\n" and unicodedata.category(c).startswith("C")], document["title"]
        assert text == text_cleaning.normalise(text)
        assert "Gutenberg" not in text
        assert len(document["ask"]) < 150, document["ask"]
        assert "\n" not in document["ask"]


def test_the_split_rule_holds_out_each_heldout_document(record: dict, heldout: list[dict]) -> None:
    limits = {source["source"]: source["split_limit"] for source in record["sources"]}
    for document in heldout:
        place = text_split.split_number(document["source"], document["title"])
        assert place <= limits[document["source"]], document["title"]
    assert text_split.split_number("sotu", "no such speech") > limits["sotu"]


def test_data_json_lists_the_scripts_sources(record: dict) -> None:
    for source, entry in zip(prepare_data.SOURCES, record["sources"], strict=True):
        package = source.package
        assert (entry["source"], entry["package"], entry["version"]) == (source.name, package.name, package.version)
        assert (entry["sha256"], entry["package_licence"]) == (package.sha256, package.licence)
        assert entry["why_public_domain"] == source.why_free
        assert entry["train"]["documents"] > entry["heldout"]["documents"] > 0


@pytest.mark.parametrize(
    ("written", "clean"),
    [
        ("\u201cIt\u2019s\u201d\u2014he", '"It\'s"--he'),
        ("a\u00a0b\x02c \r\nd\u2026", "a bc\nd..."),
        ("cafe\u0301", "caf\u00e9"),
    ],
    ids=["quotes", "spaces", "nfc"],
)
def test_normalise(written: str, clean: str) -> None:
    assert text_cleaning.normalise(written) == clean


def test_prose_joins_lines_and_drops_marks() -> None:
    wrapped = "The _white_ whale[1] was well-\nknown to all--\nor so.\n\n* * * *\n\n[Illustration: a\nwhale]\n\nNext."
    assert text_cleaning.prose(wrapped) == "The white whale was well-known to all--or so.\n\nNext."


def test_prose_keeps_quoted_verse_and_drops_tables() -> None:
    poem = "He sang:\n\n    Over the hill,\n    Under the mill.\n\nYear      Tons     Ships\n1900        12        3"
    assert text_cleaning.prose(poem) == "He sang:\n\nOver the hill,\nUnder the mill."


def test_verse_keeps_lines_without_their_numbers() -> None:
    assert (
        text_cleaning.verse("Of Man's first\n  disobedience        10\n\n\n\nSing")
        == "Of Man's first\ndisobedience\n\nSing"
    )
    assert text_cleaning.unwrap_verse("Worthy the Muse, I say\n    the Form complete\nThe Female") == (
        "Worthy the Muse, I say the Form complete\nThe Female"
    )


def test_sections_start_at_whole_lines_and_drop_what_comes_before() -> None:
    text = "Contents\nCHAPTER I\nIn CHAPTER I\nmore\nCHAPTER II\nend"
    found = list(text_cleaning.sections(text, "CHAPTER [IVX]+"))
    assert found == [("CHAPTER I", "\nIn CHAPTER I\nmore\n"), ("CHAPTER II", "\nend")]
    assert list(text_cleaning.sections(text, "BOOK")) == []


def test_title_case() -> None:
    assert text_cleaning.title_case("THE MAN WITH THE TWISTED LIP.") == "The Man with the Twisted Lip"
    assert text_cleaning.title_case("HENRY VIII'S  LAST") == "Henry Viii's Last"
    assert text_cleaning.title_case("LOUIS XVI") == "Louis XVI"


def r_entry(*strings: str) -> bytes:
    head = b"X\n" + struct.pack(">iiii", 3, 0x040200, 0x030500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(strings))
    data = head + b"".join(struct.pack(">ii", 0x40009, len(s.encode())) + s.encode() for s in strings)
    packed = zlib.compress(data)
    return struct.pack(">I", len(data)) + packed


def test_r_database() -> None:
    assert text_cleaning.r_strings(r_entry("Emma", "", "caf\u00e9") + r_entry("x")) == [
        ["Emma", "", "caf\u00e9"],
        ["x"],
    ]
    with pytest.raises(ValueError, match="not XDR version 3"):
        text_cleaning.r_strings(struct.pack(">I", 9) + zlib.compress(b"A\n" + bytes(40)))


def test_bible_drops_translators_notes() -> None:
    verses = ["In <FI>the<Fi> beginning<RF>beginning: or, start<Rf>.<CM>", "<FR>Next.<Fr>"]
    files = {
        "package/dist/content/books.json": json.dumps([{"name": "Genesis", "chapters": 1}]).encode(),
        "package/dist/resources/1/1.json": json.dumps(verses).encode(),
    }
    [(title, ask, text)] = text_readers.read_bible(files)
    assert (title, text) == ("Genesis 1", "In the beginning.\n\nNext.")
    assert "Genesis" in ask


def test_scenes_are_counted_whatever_their_numbers() -> None:
    speech = "KING.\n" + "So shaken as we are, so wan with care,\n" * 4
    text = f"ACT FIRST\n\nSCENE I. A court.\n{speech}\nScene 2\n{speech}\nACT II. SCENE I. A field.\n{speech}"
    titles = [title for title, _, _ in text_readers.scenes("King John", text)]
    assert titles == [f"King John, act {act}, scene {scene}" for act, scene in ((1, 1), (1, 2), (2, 1))]


def words(seed: int, count: int = 400) -> str:
    letters = np.random.default_rng(seed).integers(97, 123, size=(count, 5), dtype=np.uint8)
    return " ".join(bytes(row).decode() for row in letters)


def test_shingles_find_shared_passages_whatever_their_case_and_breaks() -> None:
    passage = words(1)
    train = [Document("a", "x", "?", words(2) + " " + passage.upper().replace(" ", "\n"))]
    half, none = Document("a", "y", "?", passage + words(3)), Document("a", "z", "?", words(4))
    shared = text_split.shared_fractions([half, none], train)
    assert 0.45 < shared[0] < 0.5
    assert shared[1] == 0.0


def test_duplicates_are_removed() -> None:
    first, again, other = (Document("a", str(at), "?", words(seed)) for at, seed in enumerate((5, 5, 6)))
    assert text_split.without_repeats([first, again, other]) == ([first, other], [again])


def test_split_holds_out_about_its_share_and_at_least_one_of_ten() -> None:
    many = [Document("many", str(at), "?", words(at + 10, 40)) for at in range(500)]
    ten = [Document("ten", str(at), "?", words(at + 1000, 40)) for at in range(10)]
    few = [Document("few", str(at), "?", words(at + 2000, 40)) for at in range(9)]
    parts = text_split.split([*many, *ten, *few])
    assert Counter(document.source for document in parts.heldout) == {"many": 5, "ten": 1}
    assert len(parts.train) == 513
    assert parts.limits["few"] == -1
    for document in parts.train:
        assert text_split.split_number(document.source, document.title) > parts.limits[document.source]


def tar_of(name: str, content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def test_unpack_reads_tars_and_debian_packages() -> None:
    tar = tar_of("./usr/share/text", b"words")
    assert prepare_data.unpack(tar) == {"usr/share/text": b"words"}
    members = [("debian-binary", b"2.0\n"), ("control.tar.gz", b"odd"), ("data.tar.gz", tar)]
    heads = (f"{name:<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(data):<10}`\n".encode() for name, data in members)
    package = b"!<arch>\n" + b"".join(h + d + b"\n" * (len(d) % 2) for h, (_, d) in zip(heads, members, strict=True))
    assert prepare_data.unpack(package) == {"usr/share/text": b"words"}


def test_devils_dictionary_is_cut_into_runs() -> None:
    entry = "{}, n.  A thing that is not what it is said to be, and so on and on to the end of a long line.\n\n"
    text = "PREFACE\n\n" + "".join(entry.format(f"WORD{chr(65 + at)}") for at in range(26)) * 3
    packed = {"usr/share/dictd/devil.dict.dz": gzip.compress(text.replace("WORD", "WORD-").encode())}
    runs = list(text_readers.read_devil(packed))
    assert len(runs) == 3
    assert runs[0][0].startswith("The Devil's Dictionary, WORD-A to ")
    assert "PREFACE" not in runs[0][2]


def test_missing_client_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = prepare_data.Package("x", "1", "npm", "0" * 64, "MIT")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^x: this machine has no npm$"):
        prepare_data.fetch(package, tmp_path)


def test_unpinned_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = prepare_data.Package("x", "1", "npm", "0" * 64, "MIT")
    write = (sys.executable, "-c", "open('x.tgz', 'wb').write(b'other')")
    monkeypatch.setattr(prepare_data, "FETCH", {"npm": write})
    with pytest.raises(
        ValueError, match=f"x 1: the archive has sha256 {hashlib.sha256(b'other').hexdigest()}, not 0+$"
    ):
        prepare_data.fetch(package, tmp_path)
    assert list(tmp_path.iterdir()) == []
