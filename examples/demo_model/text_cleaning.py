"""Extract plain text from old electronic books: one spelling of every quote and dash, whole paragraphs, chapters.

All functions are pure and use only the standard library. prepare_data.py decides which text passes through which.
"""

import re
import struct
import unicodedata
import zlib
from collections.abc import Iterator

# One spelling for characters that the texts spell differently. 4096 tokens have no room for six kinds of quote.
SPELLINGS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u2032\u00b4`", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"),
        **dict.fromkeys("\u2014\u2015", "--"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\t", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u2022"),
        "\u2026": "...",
        "\u0152": "OE",
        "\u0153": "oe",
    }
)
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
ILLUSTRATION = re.compile(r"\[(?:Illustration|Footnote|Transcriber)\b[^\]]*\]")
FOOTNOTE_MARK = re.compile(r"\[(?:\d{1,3}|[*+])\]")
EMPHASIS = re.compile(r"(?<!\w)_([^_\n]+(?:\n[^_\n]+)*)_(?!\w)")
LEFTOVER = re.compile(r" ?\*(?: \*)*|@+|~|_{2,}")
ROMAN = re.compile(r"(?=[IVXLC])(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")


def normalise(text: str) -> str:
    """Return NFC with ASCII quotes and dashes, no control character but the newline, no space before a newline."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n")).translate(SPELLINGS)
    return re.sub(r" +(?=\n|$)", "", CONTROL.sub("", text))


def without_marks(text: str) -> str:
    """Remove footnotes and pictures with their marks, marks of emphasis, rows of asterisks and blanks to fill."""
    text = FOOTNOTE_MARK.sub("", ILLUSTRATION.sub("", text))
    return LEFTOVER.sub("", EMPHASIS.sub(r"\1", text))


def is_table(lines: list[str]) -> bool:
    """Return whether the lines are columns: most have a rule, or a wide gap in the middle."""
    return sum(bool(re.search(r"\||-{8,}|={4,}|\S {4,}\S", line)) for line in lines) * 2 > len(lines)


def is_verse(lines: list[str]) -> bool:
    """Return whether the lines are indented and not filled: quoted verse, a letter's address, a signature."""
    return all(line.startswith("  ") for line in lines) or (
        len(lines) > 2 and max(map(len, lines)) < 52 and sum(line[:1].isupper() for line in map(str.lstrip, lines)) > 2
    )


def join_lines(lines: list[str]) -> str:
    """Join lines to one. A hyphen or dash at the end of a line belongs to the next word."""
    joined = " ".join(line.strip() for line in lines)
    joined = re.sub(r"(?<=\w)- (?=\w)", "-", re.sub(r"-- | --", "--", joined))
    return re.sub(r" {2,}", " ", joined)


def prose(text: str) -> str:
    """Join hard-wrapped lines into paragraphs, one blank line between two. Keep the lines of verse, drop tables."""
    parts = []
    for block in re.split(r"\n{2,}", without_marks(text)):
        lines = [line for line in block.split("\n") if line.strip()]
        if not lines or is_table(lines):
            continue
        parts.append(
            "\n".join(re.sub(r" {2,}", " ", line.strip()) for line in lines) if is_verse(lines) else join_lines(lines)
        )
    return "\n\n".join(parts)


def verse(text: str) -> str:
    """Keep lines, without line numbers in the margin and indentation. Runs of blank lines become one."""
    lines = (re.sub(r"(?<=\S) {3,}\d{1,4}$", "", line).strip() for line in without_marks(text).split("\n"))
    lines = (re.sub(r" {2,}", " ", line) for line in lines if not re.fullmatch(r"\d{1,4}", line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def unwrap_verse(text: str) -> str:
    """Join long verse lines that continue in an indented line."""
    return verse(re.sub(r"(?<=\S)\n {4,}(?=\S)", " ", text))


def sections(text: str, heading: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, body) for every line that matches `heading` as a whole. Text before the first is left out."""
    marks = list(re.finditer(rf"^(?:{heading})$", text, flags=re.M))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    for mark, end in zip(marks, ends, strict=False):
        yield mark.group().strip(), text[mark.end() : end]


def between(text: str, start: str, end: str) -> str:
    """Return the text after the first `start` and before the next `end`. Raises ValueError if one is missing."""
    if start not in text:
        raise ValueError(f"no line {start!r}")
    rest = text.split(start, 1)[1]
    if end not in rest:
        raise ValueError(f"no line {end!r} after {start!r}")
    return rest.split(end, 1)[0]


def title_case(text: str) -> str:
    """Return a heading in capitals as a title: The Red-Headed League."""
    small = {"a", "an", "and", "at", "by", "for", "from", "in", "of", "on", "or", "s", "the", "to", "with"}
    words = re.sub(r"\s+", " ", text).strip(" .").lower().split(" ")
    cased = [
        word if word in small and at else re.sub(r"(?<![\w'])\w", lambda m: m.group().upper(), word)
        for at, word in enumerate(words)
    ]
    return " ".join(word.upper() if ROMAN.fullmatch(word.upper().rstrip(".,:")) else word for word in cased)


def r_strings(database: bytes) -> list[list[str]]:
    """Return the character vectors of an R lazy-load database (data/Rdata.rdb).

    Each entry is a big-endian length and a zlib stream of R's XDR serialization, version 3. The stream has a header,
    the native encoding, type 16 (STRSXP) and its length, and per string flags and a byte count (-1 is NA). See R
    Internals, 1.8. Raises ValueError for anything but a plain character vector.
    """
    vectors, at = [], 0
    while at < len(database):
        stream = zlib.decompressobj()
        data = stream.decompress(database[at + 4 :])
        at = len(database) - len(stream.unused_data)
        kind, version = data[:2], struct.unpack_from(">i", data, 2)[0]
        if kind != b"X\n" or version != 3:
            raise ValueError(f"R data in format {kind!r} version {version}, not XDR version 3")
        offset = 14 + 4 + struct.unpack_from(">i", data, 14)[0]
        flags, count = struct.unpack_from(">ii", data, offset)
        if flags & 0xFF != 16:
            raise ValueError(f"R object of type {flags & 0xFF}, not a character vector")
        offset += 8
        strings = []
        for _ in range(count):
            size = struct.unpack_from(">i", data, offset + 4)[0]
            strings.append(data[offset + 8 : offset + 8 + max(size, 0)].decode())
            offset += 8 + max(size, 0)
        vectors.append(strings)
    return vectors
