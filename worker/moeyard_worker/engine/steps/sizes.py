"""The sizes of captured steps, and the size in which a step runs. Pure.

Each size costs start time and memory, so there are few; a step runs in the next larger one. With peers a size also has
a number of rows that each rank may bring to this rank's experts. Ranks may replay different graphs in one step. Each
picks its size by its own rows and by the most rows of any rank, which all know from the plan frames. An unused row of a
peer costs one id that marks it as empty.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from moeyard_kernels.types.step_size import StepSize


@dataclass(frozen=True, slots=True)
class Ladder:
    """Numbers of sequences, and the factor between table widths, in pages from `FIRST_WIDTH` on."""

    sequences: tuple[int, ...]
    wider: int


# Pages that one split of the keys covers, so that nothing is merged.
FIRST_WIDTH = 8
# A step with few rows costs little more than one with a single row, so the numbers are far apart.
DECODING = Ladder((1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256), 4)
# A size has several graphs in a model that drafts, so there are fewer sizes.
DRAFTING = Ladder((1, 2, 4, 8, 16, 32, 64, 128), 16)
# Prompt rows, alone and together with decode rows. Eager launches of a layer take the host 1.3 to 3 ms. A GPU computes
# 4000 to 8000 rows in that time, so larger prompts need no graph.
_PROMPTS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_MIXED_PROMPTS = (128, 512, 1024, 2048)
_MIXED_ROWS = (16, 64)
MAX_PROMPT = _PROMPTS[-1]
# Prompt chunks of a captured step.
CHUNKS = 16
# For models whose prompts decompress their keys. _KEYS: how many keys the largest mixed prompts have, as multiples of
# their rows. _MOST_KEYS limits longer prompts, because decompressed keys take memory.
_KEYS = (1, 2, 4, 8)
_MOST_KEYS = 16384
# Rows of a peer for which a step without prompts has room, besides its own number of rows.
_PEERS_DECODING = (16, 64)
# The same while a peer has prompts, besides the most rows of captured steps with and without output.
_PEERS_PROMPTS = (512,)


def decode_sizes(
    ladder: Ladder, *, max_sequences: int, max_pages: int, queries: Sequence[int] = (1,)
) -> Iterator[StepSize]:
    """Yield steps of up to `max_sequences` sequences of up to `max_pages` pages, each with one of `queries` rows."""
    widths, width = [], FIRST_WIDTH
    while width < max_pages:
        widths.append(width)
        width *= ladder.wider
    for sequences, rows, width in product(below(ladder.sequences, max_sequences), queries, (*widths, max_pages)):
        yield StepSize(sequences=sequences, queries=rows, width=width)


def prompt_sizes(*, max_sequences: int, max_pages: int, max_prompt: int, flat: bool) -> Iterator[StepSize]:
    """Yield steps of up to `max_prompt` prompt rows, alone and with up to `max_sequences` decode rows (0: alone only).
    `flat`: prompts decompress their keys."""
    alone = [(prompt, 0) for prompt in below(_PROMPTS, max_prompt)]
    rows = below(_MIXED_ROWS, max_sequences) if max_sequences else ()
    mixed = product(below(_MIXED_PROMPTS, min(max_prompt, _MIXED_PROMPTS[-1])), rows)
    for prompt, sequences in (*alone, *mixed):
        for keys in _keys(prompt, max_prompt) if flat else (0,):
            yield StepSize(prompt=prompt, chunks=CHUNKS, keys=keys, sequences=sequences, width=max_pages)


def _keys(prompt: int, max_prompt: int) -> list[int]:
    """Return the numbers of keys of steps with this many prompt rows."""
    if prompt > _MIXED_PROMPTS[-1]:
        return sorted({prompt, max(prompt, _MOST_KEYS)})
    return [prompt * times for times in (_KEYS if prompt in (_MIXED_PROMPTS[-1], max_prompt) else _KEYS[:1])]


def below(sizes: Sequence[int], most: int) -> list[int]:
    """Return the sizes below `most`, and `most` itself."""
    return [*(size for size in sizes if size < most), most]


def with_peers(sizes: Sequence[StepSize]) -> Iterator[StepSize]:
    """Yield these sizes of one rank with room for peers' rows, and the sizes of a rank without rows.

    A decode step next to a peer with more rows has only the wider tables: a narrow table fits into them, and such a
    step waits for the peer anyway.
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
    """Yield these sizes with each number of peers' rows that ranks agree on, and the sizes of a rank without rows."""
    for rows in agreed:
        yield StepSize(width=min(size.width for size in sizes), peers=rows)
    for size in sizes:
        for rows in agreed:
            if rows >= size.rows:
                yield replace(size, peers=rows)


def listed(sizes: Iterable[StepSize], *, num_graphs: int, seconds: float) -> str:
    """Return one log line: the number of graphs, their rows, table widths (pages) and prompts, and the time taken."""
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
    text = "; ".join(f"{name} {', '.join(map(str, sorted(values)))}" for name, values in parts if values)
    return f"captured {num_graphs} CUDA graphs in {seconds:.1f} s: {text}"
