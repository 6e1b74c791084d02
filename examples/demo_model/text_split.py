"""Choose the held-out documents of the demo model's data, and drop documents that repeat others.

The first 8 bytes of sha256(source + newline + title) are a big-endian number. A document is held out if that number is
at most the limit of its source, which data.json records. The limit takes documents in the order of their numbers until
they are HELDOUT_SHARE of the source's bytes. It never takes more than twice that share, and it takes at least one from
a source with MIN_DOCUMENTS or more. A held-out document that shares more than MAX_SHARED of its shingles (SHINGLE
letters or digits in a row) with the training text is left out of both.
"""

import hashlib
import json
from dataclasses import dataclass

import numpy as np

HELDOUT_SHARE = 0.01
MIN_DOCUMENTS = 10
MAX_SHARED = 0.03
MAX_REPEATED = 0.5
MIN_CHARACTERS = 150
SHINGLE = 50


@dataclass(frozen=True, slots=True)
class Document:
    source: str
    title: str
    ask: str
    text: str

    def line(self) -> str:
        fields = {"source": self.source, "title": self.title, "ask": self.ask, "text": self.text}
        return json.dumps(fields, ensure_ascii=False) + "\n"


def split_number(source: str, title: str) -> int:
    """Return the place of a document in the order of the split: 64 bits of a hash, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{source}\n{title}".encode()).digest()[:8], "big")


def heldout_limit(documents: list[Document]) -> int:
    """Return the highest split number of held-out documents of one source, -1 for none."""
    total = sum(len(document.text.encode()) for document in documents)
    limit, taken = -1, 0
    for document in sorted(documents, key=lambda document: split_number(document.source, document.title)):
        size = len(document.text.encode())
        first = limit < 0 and len(documents) >= MIN_DOCUMENTS
        if taken >= HELDOUT_SHARE * total or (not first and taken + size > 2 * HELDOUT_SHARE * total):
            break
        limit, taken = split_number(document.source, document.title), taken + size
    return limit


def shingles(text: str) -> np.ndarray:
    """Return a 64-bit polynomial hash of every SHINGLE characters in a row, letters and digits only, in lower case."""
    kept = "".join(filter(str.isalnum, text.lower())).encode("utf-32-le")
    codes = np.frombuffer(kept, dtype=np.uint32).astype(np.uint64)
    count = max(len(codes) - SHINGLE + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(SHINGLE):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + codes[offset : offset + count]
    return hashes ^ (hashes >> np.uint64(29))


def without_repeats(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Return (kept, left out). A document is left out if most of its sampled shingles came before, or if it is tiny."""
    seen: set[int] = set()
    kept, out = [], []
    for document in documents:
        hashes = shingles(document.text)
        sample = {int(value) for value in hashes[hashes % np.uint64(16) == 0]}
        if len(document.text) < MIN_CHARACTERS or (sample and len(sample & seen) > MAX_REPEATED * len(sample)):
            out.append(document)
        else:
            kept.append(document)
            seen |= sample
    return kept, out


def shared_fractions(heldout: list[Document], train: list[Document]) -> list[float]:
    """Return, for each held-out document, the share of its shingles that the training text contains."""
    if not heldout:
        return []
    own = [shingles(document.text) for document in heldout]
    wanted = np.unique(np.concatenate(own))
    found = np.zeros(len(wanted), dtype=bool)
    for document in train:
        hashes = shingles(document.text)
        places = np.searchsorted(wanted, hashes).clip(max=len(wanted) - 1)
        found[places[wanted[places] == hashes]] = True
    return [float(found[np.searchsorted(wanted, hashes)].mean()) if len(hashes) else 0.0 for hashes in own]


@dataclass(frozen=True, slots=True)
class Split:
    """Both parts. `dropped` names held-out documents that are in neither; `limits` by source, -1 for none held out."""

    train: list[Document]
    heldout: list[Document]
    dropped: list[str]
    limits: dict[str, int]


def split(documents: list[Document]) -> Split:
    """Apply the rule in the head of this file."""
    by_source: dict[str, list[Document]] = {}
    for document in documents:
        by_source.setdefault(document.source, []).append(document)
    limits = {name: heldout_limit(inside) for name, inside in by_source.items()}
    held: list[Document] = []
    train: list[Document] = []
    for document in documents:
        is_held = split_number(document.source, document.title) <= limits[document.source]
        (held if is_held else train).append(document)
    shared = shared_fractions(held, train)
    dropped = [f"{d.source}: {d.title}" for d, part in zip(held, shared, strict=True) if part > MAX_SHARED]
    kept = [document for document, part in zip(held, shared, strict=True) if part <= MAX_SHARED]
    return Split(train, kept, dropped, limits)
