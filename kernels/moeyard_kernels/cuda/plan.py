"""The index tensors of a step on the device, made once per step and copied together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeyard_kernels.cuda.compressed_prompts import plan_prompts
from moeyard_kernels.cuda.state_rows import plan_state
from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.footprint import LAUNCHED
from moeyard_kernels.types.plan_parts import Rotations, decode_table, entries_at, entries_of, page_table, row_indices
from moeyard_kernels.types.prefill_plan import PrefillPlan, plan_prefill
from moeyard_kernels.types.sending import to_device
from moeyard_kernels.types.step import ChunkRows, StepRows


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCompaction:
    """The kept part of a prompt of `length` positions: `count` of them, chosen by the rows `choosing` of the step.

    places: [length] int64, where the prompt lies in the pages, page * page_size + offset. entries: [count] int64, the
    target places. keys: its rows among the concatenated prefixes, if there are any.
    """

    length: int
    count: int
    choosing: slice
    keys: slice
    places: torch.Tensor
    entries: torch.Tensor


class CudaPlan:
    """The rows of one step without padding, prompt rows first. A `StepPlan`.

    entries: [T] int64, page * page_size + offset of each row's place in the pages.
    decode: per sliding window, pages and lengths of the decode rows, each treated as a sequence.
    paged: per sliding window, the prompt chunks over pages. None without any.
    flat: the same chunks over the concatenated rows of their prefixes, if asked for.
    prefix_entries: the places of those rows in the pages, [L] int64.
    lone_rows: whether no sequence has two decode rows.
    state: how rows reach state in slots, if asked for.
    kept: for each prompt that ends in this step and is kept in part.
    compressed_prompts: tables of the prompt chunks for compressed attention, if asked for.
    """

    def __init__(
        self,
        step: StepRows,
        *,
        page_size: int,
        windows: Iterable[int | None],
        flat: bool,
        device: torch.device,
        slots: bool = False,
        compressed: bool = False,
    ) -> None:
        prefill, decode = tuple(step.prefill), tuple(step.decode)
        self.num_prompt = sum(len(c.token_ids) for c in prefill)
        self.num_tokens = self.num_rows = self.num_prompt + sum(len(c.token_ids) for c in decode)
        self.num_sampled = len(step.sample_rows)
        chunks = (*prefill, *decode)
        self.lone_rows = all(len(c.token_ids) == 1 for c in decode)
        prefixes = [entries_at(c, np.arange(c.start + len(c.token_ids)), page_size) for c in prefill] if flat else []
        sample_rows = np.asarray(step.sample_rows, dtype=np.int64)
        parts = [*row_indices(chunks, page_size), sample_rows, np.concatenate(prefixes or [sample_rows[:0]])]
        moved = to_device(torch.from_numpy(np.concatenate(parts)), device).split([part.size for part in parts])
        self.token_ids, self.positions, self.entries, self.sample_rows, self.prefix_entries = moved
        self.decode: dict[int | None, DecodeTables] = {}
        self.paged: dict[int | None, PrefillPlan] = {}
        self.flat: PrefillPlan | None = None
        self.kept = kept_of(prefill, page_size=page_size, device=device)
        if decode:
            table, lens = decode_table(decode, page_size)
            rows_of_pages = to_device(torch.from_numpy(table.astype(np.int32)), device)
            kv_lens = to_device(torch.tensor(lens, dtype=torch.int32), device)
            for window in windows:
                self.decode[window] = DecodeTables(
                    page_table=rows_of_pages, kv_lens=kv_lens, page_size=page_size, window=window, most=LAUNCHED
                )
        if prefill:
            q_lens, begins = [len(c.token_ids) for c in prefill], [c.start for c in prefill]
            pages = torch.from_numpy(page_table(prefill, page_size))
            for window in windows:
                self.paged[window] = plan_prefill(
                    q_lens, begins, page_table=pages, page_size=page_size, window=window, device=device
                )
            if flat:
                self.flat = plan_prefill(q_lens, begins, device=device)
        self.rotation = Rotations(self.positions)
        self.state = plan_state(prefill, decode, device) if slots else None
        self.compressed_prompts = plan_prompts(prefill, page_size, device) if compressed and prefill else None


def kept_of(prefill: Sequence[ChunkRows], *, page_size: int, device: torch.device) -> tuple[PromptCompaction, ...]:
    """Return the kept parts of prompts that end with one of these chunks; the first chunk begins at the step's first
    row."""
    found, row, key = [], 0, 0
    for chunk in prefill:
        length, compaction = chunk.start + len(chunk.token_ids), chunk.compaction
        row, key = row + len(chunk.token_ids), key + length
        if compaction is None:
            continue
        places = entries_at(chunk, np.arange(length), page_size)
        entries = entries_of(compaction.pages, np.arange(compaction.kept), page_size)
        found.append(
            PromptCompaction(
                length=length,
                count=compaction.kept,
                choosing=slice(row - compaction.window, row),
                keys=slice(key - length, key),
                places=to_device(torch.from_numpy(places), device),
                entries=to_device(torch.from_numpy(entries), device),
            )
        )
    return tuple(found)
