"""Which steps of a rank by itself are captured at start, and the line of the log that lists all that were."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from moeyard_kernels.cuda.graph_inputs import Bucket
from moeyard_kernels.cuda.verify_inputs import VerifySize

# Rows of a captured step; a step runs in the next larger one. Where few rows cost little more than one, steps are wide.
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Prompt rows of a captured step, alone and beside decode rows. Launched one by one a layer takes 1.3 to 3 ms of a host,
# as much as a GPU takes for 4000 to 8000 rows; more keep it busy.
_PROMPTS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_MIXED_PROMPTS = (128, 512, 1024, 2048)
_MIXED_ROWS = (16, 64)
MAX_PROMPT = _PROMPTS[-1]
# Prompts of a captured step.
CHUNKS = 16
# Where prompts decompress their keys: so many of them in the largest prompts beside output, in multiples of their rows;
# and the most that longer ones have, as what is decompressed takes memory.
_KEYS = (1, 2, 4, 8)
_MOST_KEYS = 16384
# Pages of a captured step's table: one split of the keys without a merge, then up to the longest sequence by fours.
_FIRST_WIDTH = 8


def decode_buckets(*, max_rows: int, max_pages: int) -> Iterator[Bucket]:
    """Steps of up to `max_rows` decode rows over sequences of up to `max_pages` pages."""
    widths, width = [], _FIRST_WIDTH
    while width < max_pages:
        widths.append(width)
        width *= 4
    for rows, width in product(below(ROWS, max_rows), (*widths, max_pages)):
        yield Bucket(decode=rows, width=width)


def prompt_buckets(*, max_rows: int, max_pages: int, max_prompt: int, flat: bool) -> Iterator[Bucket]:
    """Steps of up to `max_prompt` prompt rows, alone and beside decode rows. `flat`: they decompress their keys."""
    alone = ((prompt, 0) for prompt in below(_PROMPTS, max_prompt))
    mixed = product(below(_MIXED_PROMPTS, min(max_prompt, _MIXED_PROMPTS[-1])), below(_MIXED_ROWS, max_rows))
    for prompt, rows in (*alone, *mixed):
        for keys in _keys(prompt, max_prompt) if flat else (0,):
            yield Bucket(prompt=prompt, decode=rows, keys=keys, width=max_pages, chunks=CHUNKS)


def _keys(prompt: int, max_prompt: int) -> list[int]:
    """How many keys steps of so many prompt rows may have."""
    if prompt > _MIXED_PROMPTS[-1]:
        return sorted({prompt, max(prompt, _MOST_KEYS)})
    return [prompt * times for times in (_KEYS if prompt in (_MIXED_PROMPTS[-1], max_prompt) else _KEYS[:1])]


def below(sizes: Sequence[int], most: int) -> list[int]:
    """The sizes below `most`, and itself."""
    return [*(size for size in sizes if size < most), most]


def listed(sizes: Iterable[Bucket | VerifySize], *, num_graphs: int, seconds: float) -> str:
    """One line for the log: how many graphs, of which rows, table widths (pages) and prompts, in how many seconds."""
    found = [*sizes]
    verifying = [size for size in found if isinstance(size, VerifySize)]
    plain = [size for size in found if isinstance(size, Bucket)]
    decode = [size for size in plain if size.decode and not size.prompt]
    alone = [size for size in plain if size.prompt and not size.decode]
    mixed = [size for size in plain if size.prompt and size.decode]
    parts = [
        ("decode rows", {size.decode for size in decode}),
        ("sequences", {size.sequences for size in verifying}),
        ("rows of each", {size.queries for size in verifying}),
        ("tables of pages", {size.width for size in decode} | {size.width for size in verifying}),
        ("prompt rows", {size.prompt for size in alone}),
        ("prompt rows beside decode rows", {size.prompt for size in mixed}),
        ("decode rows beside prompts", {size.decode for size in mixed}),
        ("rows of a peer", {size.peers for size in found} - {0}),
    ]
    words = "; ".join(f"{name} {', '.join(map(str, sorted(values)))}" for name, values in parts if values)
    return f"captured {num_graphs} CUDA graphs in {seconds:.1f} s: {words}"
