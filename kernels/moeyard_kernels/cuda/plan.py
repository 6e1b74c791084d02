"""A step as the kernels behind the door want it: index tensors on the device, made once and copied at once."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch

from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.prefill_plan import PrefillPlan, plan_prefill
from moeyard_kernels.types.rotations import Rotations
from moeyard_kernels.types.step import ChunkRows, StepRows


class CudaPlan:
    """The rows of one step without padding, prompt rows first. A `StepPlan`.

    entries: [T] int64, page * page_size + offset of each row's place in the pages.
    decode: per sliding window, pages and lengths of the decode rows, each a sequence of its own.
    paged: per sliding window, the prompt chunks over pages; None without any.
    flat, prefix_entries: the same chunks over the rows of their prefixes, one chunk's behind the other's, and where
    in the pages those rows are, [L] int64. Only where `flat` was asked for.
    """

    def __init__(
        self, step: StepRows, *, page_size: int, windows: Iterable[int | None], flat: bool, device: torch.device
    ) -> None:
        prefill, decode = tuple(step.prefill), tuple(step.decode)
        self.num_prompt = sum(len(c.token_ids) for c in prefill)
        self.num_tokens = self.num_rows = self.num_prompt + sum(len(c.token_ids) for c in decode)
        self.num_sampled = len(step.sample_rows)
        chunks = (*prefill, *decode)
        token_ids = np.fromiter(chain.from_iterable(c.token_ids for c in chunks), np.int64, self.num_tokens)
        starts = [np.arange(c.start, c.start + len(c.token_ids)) for c in chunks]
        positions = np.concatenate(starts) if starts else np.zeros(0, np.int64)
        entries = [_entries(c, position, page_size) for c, position in zip(chunks, starts, strict=True)]
        prefixes = [_entries(c, np.arange(c.start + len(c.token_ids)), page_size) for c in prefill] if flat else []
        parts = (
            token_ids,
            positions,
            np.concatenate(entries) if entries else positions,
            np.asarray(step.sample_rows, dtype=np.int64),
            np.concatenate(prefixes) if prefixes else np.zeros(0, np.int64),
        )
        moved = torch.from_numpy(np.concatenate(parts)).to(device).split([part.size for part in parts])
        self.token_ids, self.positions, self.entries, self.sample_rows, self.prefix_entries = moved
        self.decode: dict[int | None, DecodeTables] = {}
        self.paged: dict[int | None, PrefillPlan] = {}
        self.flat: PrefillPlan | None = None
        if decode:
            table, lens = _decode_table(decode, page_size)
            on_device = torch.from_numpy(table).to(device), torch.from_numpy(lens).to(device)
            for window in windows:
                self.decode[window] = DecodeTables(
                    page_table=on_device[0], kv_lens=on_device[1], page_size=page_size, window=window
                )
        if prefill:
            q_lens, begins = [len(c.token_ids) for c in prefill], [c.start for c in prefill]
            pages = torch.from_numpy(_page_table(prefill, page_size))
            for window in windows:
                self.paged[window] = plan_prefill(
                    q_lens, begins, page_table=pages, page_size=page_size, window=window, device=device
                )
            if flat:
                self.flat = plan_prefill(q_lens, begins, device=device)
        self.rotation = Rotations(self.positions)


def _entries(chunk: ChunkRows, positions: np.ndarray, page_size: int) -> np.ndarray:
    """Where in the pages a chunk's sequence keeps these positions."""
    return np.asarray(chunk.pages)[positions // page_size] * page_size + positions % page_size


def _page_table(chunks: Sequence[ChunkRows], page_size: int) -> np.ndarray:
    """[chunks, most pages] int32 of the pages that hold known positions, zeros behind."""
    used = [-(-(chunk.start + len(chunk.token_ids)) // page_size) for chunk in chunks]
    table = np.zeros((len(chunks), max(used)), dtype=np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, used, strict=True)):
        table[row, :count] = chunk.pages[:count]
    return table


def _decode_table(decode: Sequence[ChunkRows], page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """One row of pages and one length per decode row; each row of a chunk sees one position more than that before."""
    counts = [len(chunk.token_ids) for chunk in decode]
    ends = chain.from_iterable(range(c.start + 1, c.start + 1 + n) for c, n in zip(decode, counts, strict=True))
    table = np.repeat(_page_table(decode, page_size), counts, axis=0)
    return table, np.fromiter(ends, np.int32, len(table))
