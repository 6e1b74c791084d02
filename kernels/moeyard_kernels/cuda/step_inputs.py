"""Inputs of a captured step: rows, positions and tables of a fixed size, filled before each replay."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from moeyard_kernels.cuda.output_rows import OutputWave
from moeyard_kernels.cuda.plan import PromptCompaction
from moeyard_kernels.cuda.state_rows import Fields, StateInputs, StateRows
from moeyard_kernels.cuda.verified_rows import Tails, VerifiedRows
from moeyard_kernels.types.compressed_rows import CompressedRows
from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.expert_layout import max_blocks
from moeyard_kernels.types.plan_parts import Rotations, entries_at, row_indices
from moeyard_kernels.types.prefill_plan import TILE, PrefillPlan, tiles_of
from moeyard_kernels.types.step import ChunkRows, StepRows
from moeyard_kernels.types.step_size import StepSize

# The fields with an entry per row, besides "feed".
_PER_ROW = ("token_ids", "positions", "entries")
# Alignment in bytes that compiled kernels assume.
_ALIGNED = 16


class StepStaging:
    """Named tensors in one block of device memory, and pinned copies of it on the host: one copy sends them all.

    fields: dtype and shape by name. stages: the number of host blocks; one is filled while earlier ones are still being
    copied. With several stages, entries that a step does not write in `begin`'s arrays hold values of an earlier step.
    """

    def __init__(
        self, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device, *, stages: int = 2
    ) -> None:
        places, size = {}, 0
        for name, (dtype, shape) in fields.items():
            places[name] = size
            size += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNED) * _ALIGNED

        def views(block: torch.Tensor) -> dict[str, torch.Tensor]:
            found = {}
            for name, (dtype, shape) in fields.items():
                end = places[name] + torch.Size(shape).numel() * dtype.itemsize
                found[name] = block[places[name] : end].view(dtype).view(shape)
            return found

        pinned = device.type == "cuda"
        self._block = torch.zeros(size, dtype=torch.uint8, device=device)
        self._stages = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(stages)]
        self._host = [{name: view.numpy() for name, view in views(stage).items()} for stage in self._stages]
        self._copied = [torch.cuda.Event() for _ in range(stages)] if pinned else None
        self._turn = 0
        self.on_device = views(self._block)

    def begin(self) -> dict[str, np.ndarray]:
        """Return the host's next arrays, once nothing reads them."""
        self._turn = (self._turn + 1) % len(self._stages)
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        return self._host[self._turn]

    def send(self) -> None:
        """Copy them to the device, after earlier launches."""
        self._block.copy_(self._stages[self._turn], non_blocking=True)
        if self._copied is not None:
            self._copied[self._turn].record()


class StepInputs:
    """The rows of a step of at most `size`. A `StepPlan`.

    Missing decode rows are copies of the first one that store nothing. They compute the same bits and choose the same
    experts, so they read no further weights. Missing prompt rows are token 0; they store nothing and attend to nothing,
    and their activations are undefined. Neither have state slots. Prompts without a restored snapshot, or without new
    ones, copy nothing. With `compressed` attention there are no prompts, and missing rows read the slot of the first.

    Without `tails` each sequence has one decode row at a position that the host knows. Its token comes from the host,
    or from row `fed` of `last_ids`, where the step before chose it. With `tails` there are no prompts, and decode rows
    are `VerifiedRows`.
    """

    # Captured steps keep prompts whole (`StepSize.of`).
    kept: tuple[PromptCompaction, ...] = ()
    compressed_prompts = None

    def __init__(
        self,
        size: StepSize,
        *,
        page_size: int,
        windows: Collection[int | None],
        last_ids: torch.Tensor,
        slots: bool = False,
        compressed: bool = False,
        tails: Tails | None = None,
    ) -> None:
        assert not (compressed and size.prompt), "prompts of compressed attention are launched"
        self.size = size
        self.num_prompt, self.num_tokens, self.num_rows = size.prompt, size.rows, size.rows
        self.num_sampled = size.samples
        self._page_size, self._last_ids = page_size, last_ids
        # Rows of one sequence read each other's keys. Without `tails` only copies belong to one sequence.
        self.lone_rows = tails is None
        self._compressed, self.outputs = compressed, tuple[OutputWave, ...]()
        self.decode: dict[int | None, DecodeTables] = {}
        self.paged: dict[int | None, PrefillPlan] = {}
        self.flat: PrefillPlan | None = None
        self.verified: VerifiedRows | None = None
        self._state: StateInputs | None = None
        if tails is not None:
            assert not size.prompt, "steps that verify drafts have no prompts"
            self.verified = VerifiedRows(
                size, tails, page_size=page_size, windows=windows, slots=slots, compressed=compressed
            )
            self._staging = StepStaging(self.verified.fields(), last_ids.device)
            self.verified.bind(self._staging.on_device)
            self.state: StateRows | None = None
            self.sample_rows: torch.Tensor | None = None
            self.prefix_entries: torch.Tensor | None = None
        else:
            if slots:
                self._state = StateInputs(prompt=size.prompt, chunks=size.chunks, decode=size.decode)
            self._staging = StepStaging(self._fields(), last_ids.device)
            self._bind(self._staging.on_device, windows)
        # Captured steps run once before the first step.
        self._fill((), (), ())

    def _fields(self) -> Fields:
        size, pad = self.size, self.size.chunks + 1
        fields: Fields = dict.fromkeys((*_PER_ROW, "feed"), (torch.int64, (size.rows,)))
        if size.prompt:
            # Padding tiles belong to an extra chunk without rows.
            fields |= {
                "sample_rows": (torch.int64, (size.samples,)),
                "cu_q": (torch.int32, (pad + 1,)),
                "starts": (torch.int32, (pad,)),
                "tiles": (torch.int32, (max_blocks(size.prompt, size.chunks, TILE), 2)),
                "pages": (torch.int32, (pad, size.width)),
            }
        if size.keys:
            fields |= {"prefix_entries": (torch.int64, (size.keys,)), "cu_kv": (torch.int32, (pad + 1,))}
        if size.decode:
            fields |= {"lens": (torch.int32, (size.decode,)), "table": (torch.int32, (size.decode, size.width))}
            if self._compressed:
                fields["slots"] = torch.int64, (size.decode,)
        return fields if self._state is None else fields | self._state.fields()

    def _bind(self, on: Mapping[str, torch.Tensor], windows: Collection[int | None]) -> None:
        size, page_size = self.size, self._page_size
        self.state = None if self._state is None else self._state.rows(on)
        self.token_ids, self.positions, self.entries, self._feed = (on[name] for name in (*_PER_ROW, "feed"))
        self.sample_rows, self.prefix_entries = on.get("sample_rows"), on.get("prefix_entries")
        if self._compressed and size.decode:
            rows = CompressedRows(
                positions=self.positions,
                places=self.entries,
                slots=on["slots"],
                page_table=on["table"],
                page_size=page_size,
            )
            self.outputs = (OutputWave(at=None, rows=rows),)
        for window in windows if size.decode else ():
            self.decode[window] = DecodeTables(
                page_table=on["table"], kv_lens=on["lens"], page_size=page_size, window=window
            )
        if size.prompt:
            plan = partial(PrefillPlan, num_rows=size.prompt, cu_q=on["cu_q"], starts=on["starts"], tiles=on["tiles"])
            for window in windows:
                self.paged[window] = plan(
                    num_keys=size.width * page_size,
                    page_size=page_size,
                    window=window,
                    page_table=on["pages"],
                    cu_kv=None,
                )
            if size.keys:
                self.flat = plan(num_keys=size.keys, page_size=0, window=None, page_table=None, cu_kv=on["cu_kv"])
        self.rotation = Rotations(self.positions)

    def begin(self) -> None:
        """Launch the preparation of a step, to be captured with it: read its tokens, forget earlier lookups."""
        if self.verified is not None:
            self.state = self.verified.begin()
            self.positions, self.token_ids = self.verified.positions.flatten(), self.verified.tokens.flatten()
            self.entries = self.verified.entries
            self.decode = self.verified.tables(self.verified.positions + 1)
            self.outputs = self.verified.outputs(self.positions, self.entries)
        else:
            before = self._last_ids.index_select(0, self._feed.clamp(min=0))
            self.token_ids = torch.where(self._feed < 0, self._staging.on_device["token_ids"], before)
        self.rotation = Rotations(self.positions)

    def fill(self, step: StepRows) -> None:
        """Take a step that fits and has at least one row."""
        self._fill(step.prefill, step.decode, step.sample_rows if self.num_prompt else ())

    def _fill(self, prefill: Sequence[ChunkRows], decode: Sequence[ChunkRows], sample_rows: Sequence[int]) -> None:
        host, first = self._staging.begin(), self.num_prompt
        if self.verified is not None:
            self.verified.fill(host, decode)
            self._staging.send()
            return
        if self.num_prompt:
            count = self._fill_prompts(host, prefill)
            rows = np.asarray(sample_rows, dtype=np.int64)
            host["sample_rows"][: rows.size] = np.where(rows < count, rows, rows + (first - count))
            host["sample_rows"][rows.size :] = 0
        if decode:
            self._fill_decode(host, decode)
        elif self.size.decode:
            host["entries"][first:], host["feed"][first:] = -1, -1
            host["positions"][first:], host["lens"][:] = 0, 1
        if self._state is not None:
            self._state.fill(host, prefill, decode)
        self._staging.send()

    def _fill_prompts(self, host: dict[str, np.ndarray], prefill: Sequence[ChunkRows]) -> int:
        lens = np.fromiter((len(c.token_ids) for c in prefill), np.int64, len(prefill))
        starts = np.fromiter((c.start for c in prefill), np.int64, len(prefill))
        count, last = int(lens.sum()), self.size.chunks
        for name, values in zip(_PER_ROW, row_indices(prefill, self._page_size), strict=True):
            host[name][:count], host[name][count : self.num_prompt] = values, 0
        host["entries"][count : self.num_prompt] = -1
        host["feed"][: self.num_prompt] = -1
        host["cu_q"][:] = count
        host["cu_q"][: lens.size + 1] = np.concatenate(([0], np.cumsum(lens)))
        host["starts"][:] = 0
        host["starts"][: lens.size] = starts
        tiles = tiles_of(lens, starts)
        host["tiles"][: len(tiles)] = tiles
        host["tiles"][len(tiles) :] = last, 0
        for row, chunk in enumerate(prefill):
            host["pages"][row, : len(chunk.pages)] = chunk.pages
        if self.size.keys:
            ends = starts + lens
            host["cu_kv"][:] = 0
            host["cu_kv"][: lens.size] = np.cumsum(ends) - ends
            prefixes = [entries_at(c, np.arange(end), self._page_size) for c, end in zip(prefill, ends, strict=True)]
            total = int(ends.sum())
            host["prefix_entries"][total:] = 0
            if prefixes:
                host["prefix_entries"][:total] = np.concatenate(prefixes)
        return count

    def _fill_decode(self, host: dict[str, np.ndarray], chunks: Sequence[ChunkRows]) -> None:
        ids, positions, entries, fed = (host[name][self.num_prompt :] for name in (*_PER_ROW, "feed"))
        count, table, lens = len(chunks), host["table"], host["lens"]
        for row, chunk in enumerate(chunks):
            table[row, : len(chunk.pages)] = chunk.pages
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, count)
        ids[:count] = [chunk.token_ids[0] for chunk in chunks]
        places = starts - np.fromiter((chunk.dropped for chunk in chunks), np.int64, count)
        positions[:count], lens[:count] = starts, places + 1
        fed[:count] = [-1 if chunk.fed is None else chunk.fed for chunk in chunks]
        pages = table[np.arange(count), places // self._page_size].astype(np.int64)
        entries[:count] = pages * self._page_size + places % self._page_size
        more: tuple[np.ndarray, ...] = ()
        if self._compressed:
            host["slots"][:count] = [chunk.state_slot for chunk in chunks]
            more = (host["slots"],)
        for field in (ids, positions, lens, fed, table, *more):
            field[count:] = field[0]
        entries[count:] = -1
