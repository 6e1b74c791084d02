"""The sizes of steps that are captured, and the size that a step runs in. Pure.

Each size costs time at start and memory, so there are few; a step runs in the next larger one. With peers a size has a
second part: how many rows each rank may bring to this rank's experts. Ranks then replay different graphs in one step,
each by its own rows and by the most that one rank brings, which all know from the plan frames. Room for a row that no
peer brings costs an id that says so.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from moeyard_kernels.types.step_size import StepSize


@dataclass(frozen=True, slots=True)
class Ladder:
    """Numbers of sequences, and the factor between widths of tables, in pages from `FIRST_WIDTH` on."""

    sequences: tuple[int, ...]
    wider: int


# Pages of a table that are one split of the keys, so that nothing is merged.
FIRST_WIDTH = 8
# A step with few rows costs little more than a step with one row, so steps are wide.
DECODING = Ladder((1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256), 4)
# A size has several graphs where drafts are made, so there are fewer sizes.
DRAFTING = Ladder((1, 2, 4, 8, 16, 32, 64, 128), 16)
# Prompt rows, alone and beside decode rows. A layer that is launched kernel by kernel takes 1.3 to 3 ms of a host, as
# much as a GPU takes for 4000 to 8000 rows; more rows keep the GPU busy.
_PROMPTS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_MIXED_PROMPTS = (128, 512, 1024, 2048)
_MIXED_ROWS = (16, 64)
MAX_PROMPT = _PROMPTS[-1]
# Prompts of a captured step.
CHUNKS = 16
# Where prompts decompress their keys: how many keys the largest prompts beside output have, in multiples of their rows;
# and the most that longer prompts have, since decompressed keys take memory.
_KEYS = (1, 2, 4, 8)
_MOST_KEYS = 16384
# Rows of a peer that a step without prompts has room for, beside as many as its own.
_PEERS_DECODING = (16, 64)
# The same where a peer has prompts, beside the most that a captured step with and without output brings.
_PEERS_PROMPTS = (512,)


def decode_sizes(
    ladder: Ladder, *, max_sequences: int, max_pages: int, queries: Sequence[int] = (1,)
) -> Iterator[StepSize]:
    """Steps of up to `max_sequences` sequences of up to `max_pages` pages, each with one of `queries` rows."""
    widths, width = [], FIRST_WIDTH
    while width < max_pages:
        widths.append(width)
        width *= ladder.wider
    for sequences, rows, width in product(below(ladder.sequences, max_sequences), queries, (*widths, max_pages)):
        yield StepSize(sequences=sequences, queries=rows, width=width)


def prompt_sizes(*, max_sequences: int, max_pages: int, max_prompt: int, flat: bool) -> Iterator[StepSize]:
    """Steps of up to `max_prompt` prompt rows, alone and beside up to `max_sequences` decode rows (0: alone only).

    `flat`: prompts decompress their keys.
    """
    alone = [(prompt, 0) for prompt in below(_PROMPTS, max_prompt)]
    rows = below(_MIXED_ROWS, max_sequences) if max_sequences else ()
    mixed = product(below(_MIXED_PROMPTS, min(max_prompt, _MIXED_PROMPTS[-1])), rows)
    for prompt, sequences in (*alone, *mixed):
        for keys in _keys(prompt, max_prompt) if flat else (0,):
            yield StepSize(prompt=prompt, chunks=CHUNKS, keys=keys, sequences=sequences, width=max_pages)


def _keys(prompt: int, max_prompt: int) -> list[int]:
    """How many keys steps with this many prompt rows may have."""
    if prompt > _MIXED_PROMPTS[-1]:
        return sorted({prompt, max(prompt, _MOST_KEYS)})
    return [prompt * times for times in (_KEYS if prompt in (_MIXED_PROMPTS[-1], max_prompt) else _KEYS[:1])]


def below(sizes: Sequence[int], most: int) -> list[int]:
    """The sizes below `most`, and `most` itself."""
    return [*(size for size in sizes if size < most), most]


def with_peers(sizes: Sequence[StepSize]) -> Iterator[StepSize]:
    """These sizes of a rank by itself, with room for peers' rows; and those of a rank without rows.

    A decode step beside more rows than its own has the wider tables only: a narrow table fits into them, and such a
    step waits anyway.
    """
    decoding = [size for size in sizes if not size.prompt]
    widths = sorted({size.width for size in decoding})
    wide = {*widths[1::2], widths[-1]}
    most_decoding, most = (max(size.rows for size in some) for some in (decoding, sizes))
    above = below(_PEERS_DECODING, most_decoding)
    mixed = max((size.rows for size in sizes if size.prompt and size.decode), default=0)
    prompts = sorted({rows for rows in (*_PEERS_PROMPTS, mixed, most) if most_decoding < rows <= most})
    for size in sizes:
        yield replace(size, peers=size.rows)
        if size.prompt:
            more = [most] if size.rows < most else []
        else:
            more = [rows for rows in above if rows > size.rows and size.width in wide]
            more += [rows for rows in prompts if size.width == widths[-1]]
        for rows in more:
            yield replace(size, peers=rows)
    for rows in sorted({1, *above, *prompts}):
        yield StepSize(width=widths[0], peers=rows)


def with_agreed_rows(sizes: Sequence[StepSize], agreed: Sequence[int]) -> Iterator[StepSize]:
    """These sizes with each number of peers' rows that ranks agree on; and those of a rank without rows."""
    for rows in agreed:
        yield StepSize(width=min(size.width for size in sizes), peers=rows)
    for size in sizes:
        for rows in agreed:
            if rows >= size.rows:
                yield replace(size, peers=rows)


def listed(sizes: Iterable[StepSize], *, num_graphs: int, seconds: float) -> str:
    """One line for the log: the number of graphs, of which rows, table widths (pages) and prompts, in what time."""
    found = [*sizes]
    decode = [size for size in found if size.decode and not size.prompt]
    verifying = decode if any(size.queries > 1 for size in decode) else []
    alone = [size for size in found if size.prompt and not size.decode]
    mixed = [size for size in found if size.prompt and size.decode]
    parts = [
        ("decode rows", {size.decode for size in decode} if not verifying else set()),
        ("sequences", {size.sequences for size in verifying}),
        ("rows of each", {size.queries for size in verifying}),
        ("tables of pages", {size.width for size in decode}),
        ("prompt rows", {size.prompt for size in alone}),
        ("prompt rows beside decode rows", {size.prompt for size in mixed}),
        ("decode rows beside prompts", {size.decode for size in mixed}),
        ("rows of a peer", {size.peers for size in found} - {0}),
    ]
    words = "; ".join(f"{name} {', '.join(map(str, sorted(values)))}" for name, values in parts if values)
    return f"captured {num_graphs} CUDA graphs in {seconds:.1f} s: {words}"
