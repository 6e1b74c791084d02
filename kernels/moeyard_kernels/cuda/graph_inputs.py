"""What a captured step reads anew in every replay: rows, places and tables of a fixed size, filled by each step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from moeyard_kernels.cuda.plan import Kept
from moeyard_kernels.cuda.staging import Staging
from moeyard_kernels.cuda.state_rows import StateInputs
from moeyard_kernels.types.decode_tables import DecodeTables
from moeyard_kernels.types.expert_layout import max_blocks
from moeyard_kernels.types.plan_parts import Rotations, entries_at
from moeyard_kernels.types.prefill_plan import TILE, PrefillPlan, tiles_of
from moeyard_kernels.types.step import ChunkRows, StepRows

# The fields that have an entry per row, beside "feed".
_PER_ROW = ("token_ids", "positions", "entries")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The size of a captured step, by which smaller ones are padded.

    Up to `prompt` rows of prompts in up to `chunks` chunks, and up to `decode` decode rows, over sequences of up to
    `width` pages. `keys`: where prompts decompress their keys, how many all of them together may have. `peers`: with
    peers, how many rows each rank may bring to this rank's experts, itself too.
    """

    prompt: int = 0
    decode: int = 0
    keys: int = 0
    width: int
    chunks: int = 0
    peers: int = 0

    @property
    def rows(self) -> int:
        """Rows of every activation."""
        return self.prompt + self.decode

    @property
    def samples(self) -> int:
        """Rows of logits."""
        return self.chunks + self.decode

    @staticmethod
    def of(step: StepRows) -> "Bucket | None":
        """The exact size of a step; None for one with a decode chunk of several rows, or without any row, or that ends
        a prompt of which a part is kept."""
        if any(len(c.token_ids) > 1 for c in step.decode) or not (step.prefill or step.decode):
            return None
        if any(c.compaction is not None for c in step.prefill):
            return None
        return Bucket(
            prompt=sum(len(c.token_ids) for c in step.prefill),
            decode=len(step.decode),
            keys=sum(c.start + len(c.token_ids) for c in step.prefill),
            width=max(len(c.pages) for c in (*step.prefill, *step.decode)),
            chunks=len(step.prefill),
        )

    def holds(self, size: "Bucket") -> bool:
        """Whether a step of that size runs in this one. Steps without prompts run in those without."""
        rows = size.prompt <= self.prompt and size.decode <= self.decode and bool(size.prompt) == bool(self.prompt)
        return (
            rows and size.width <= self.width and size.chunks <= self.chunks and size.keys <= (self.keys or size.keys)
        )


class GraphInputs:
    """The rows of a step of at most a bucket's size. A `StepPlan`.

    Decode rows that a step has not are copies of its first one that store nothing: they compute the same bits, choose
    the same experts and so read no weights of their own. Prompt rows that it has not are token 0, store nothing and
    attend to nothing: their activations hold anything. Neither have slots of state; prompts that restore none, or leave
    no snapshot of theirs, copy nothing. token_ids: those of the host, or of `last_ids` (what the step before chose, by
    sampled row) where the host does not know them yet.
    """

    # No sequence has two decode rows but for such copies.
    lone_rows = True
    # No prompt ends here of which a part is kept (`Bucket.of`).
    kept: tuple[Kept, ...] = ()

    def __init__(
        self, bucket: Bucket, *, page_size: int, windows: Iterable[int | None], last_ids: torch.Tensor,
        slots: bool = False,
    ) -> None:  # fmt: skip
        self.bucket = bucket
        self.num_prompt, self.num_tokens, self.num_rows = bucket.prompt, bucket.rows, bucket.rows
        self.num_sampled = bucket.samples
        self._page_size, self._last_ids = page_size, last_ids
        rows, pad = bucket.rows, bucket.chunks + 1
        num_tiles = max_blocks(bucket.prompt, bucket.chunks, TILE)
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]]
        fields = dict.fromkeys((*_PER_ROW, "feed"), (torch.int64, (rows,)))
        if bucket.prompt:
            # Behind the chunks of a step there is one without rows: what pads the tiles belongs to it.
            fields |= {
                "sample_rows": (torch.int64, (bucket.samples,)),
                "cu_q": (torch.int32, (pad + 1,)),
                "starts": (torch.int32, (pad,)),
                "tiles": (torch.int32, (num_tiles, 2)),
                "pages": (torch.int32, (pad, bucket.width)),
            }
        if bucket.keys:
            fields |= {"prefix_entries": (torch.int64, (bucket.keys,)), "cu_kv": (torch.int32, (pad + 1,))}
        if bucket.decode:
            fields |= {"lens": (torch.int32, (bucket.decode,)), "table": (torch.int32, (bucket.decode, bucket.width))}
        self._state: StateInputs | None = None
        if slots:
            self._state = StateInputs(prompt=bucket.prompt, chunks=bucket.chunks, decode=bucket.decode)
            fields |= self._state.fields()
        self._staging = Staging(fields, last_ids.device)
        on = self._staging.on_device
        self.state = None if self._state is None else self._state.rows(on)
        self.positions, self.entries, self._feed = on["positions"], on["entries"], on["feed"]
        self.sample_rows = on.get("sample_rows")
        self.prefix_entries = on.get("prefix_entries")
        self.decode: dict[int | None, DecodeTables] = {}
        self.paged: dict[int | None, PrefillPlan] = {}
        self.flat: PrefillPlan | None = None
        for window in windows:
            if bucket.decode:
                self.decode[window] = DecodeTables(
                    page_table=on["table"], kv_lens=on["lens"], page_size=page_size, window=window
                )
            if bucket.prompt:
                self.paged[window] = PrefillPlan(
                    num_rows=bucket.prompt, num_keys=bucket.width * page_size, page_size=page_size, window=window,
                    cu_q=on["cu_q"], starts=on["starts"], tiles=on["tiles"], page_table=on["pages"], cu_kv=None,
                )  # fmt: skip
        if bucket.keys:
            self.flat = PrefillPlan(
                num_rows=bucket.prompt, num_keys=bucket.keys, page_size=0, window=None, cu_q=on["cu_q"],
                starts=on["starts"], tiles=on["tiles"], page_table=None, cu_kv=on["cu_kv"],
            )  # fmt: skip
        self.token_ids = on["token_ids"]
        self.rotation = Rotations(self.positions)
        # A step of nothing, until there is one: what is captured runs once for its kernels to be compiled.
        host = self._staging.begin()
        host["entries"][:] = host["feed"][:] = -1
        if bucket.decode:
            host["lens"][:] = 1
        if bucket.prompt:
            self._fill_prompts(host, ())
        if self._state is not None:
            self._state.fill(host, (), ())
        self._staging.send()

    def begin(self) -> None:
        """The first launches of a step, to be captured with it: its tokens, and nothing looked up yet."""
        before = self._last_ids.index_select(0, self._feed.clamp(min=0))
        self.token_ids = torch.where(self._feed < 0, self._staging.on_device["token_ids"], before)
        self.rotation = Rotations(self.positions)

    def fill(self, step: StepRows, feed: Sequence[int]) -> None:
        """Take a step that fits; feed[i] is a row of `last_ids` for its i-th decode row, or -1 where it is known."""
        host, first = self._staging.begin(), self.num_prompt
        if self.num_prompt:
            count = self._fill_prompts(host, step.prefill)
            rows = np.asarray(step.sample_rows, dtype=np.int64)
            host["sample_rows"][: rows.size] = np.where(rows < count, rows, rows + (first - count))
            host["sample_rows"][rows.size :] = 0
        if step.decode:
            self._fill_decode(host, step.decode, feed)
        elif self.bucket.decode:
            host["entries"][first:], host["feed"][first:] = -1, -1
            host["positions"][first:], host["lens"][:] = 0, 1
        if self._state is not None:
            self._state.fill(host, step.prefill, step.decode)
        self._staging.send()

    def _fill_prompts(self, host: dict[str, np.ndarray], prefill: Sequence[ChunkRows]) -> int:
        """The prompts' rows; how many there are."""
        lens = np.fromiter((len(c.token_ids) for c in prefill), np.int64, len(prefill))
        starts = np.fromiter((c.start for c in prefill), np.int64, len(prefill))
        count, last = int(lens.sum()), self.bucket.chunks
        positions = [np.arange(c.start, c.start + len(c.token_ids)) for c in prefill]
        for name in _PER_ROW:
            host[name][count : self.num_prompt] = 0
        host["entries"][count : self.num_prompt] = -1
        host["feed"][: self.num_prompt] = -1
        if prefill:
            host["token_ids"][:count] = np.fromiter(chain.from_iterable(c.token_ids for c in prefill), np.int64, count)
            host["positions"][:count] = np.concatenate(positions)
            host["entries"][:count] = np.concatenate(
                [entries_at(c, position, self._page_size) for c, position in zip(prefill, positions, strict=True)]
            )
        host["cu_q"][:] = count
        host["cu_q"][: lens.size + 1] = np.concatenate(([0], np.cumsum(lens)))
        host["starts"][:] = 0
        host["starts"][: lens.size] = starts
        tiles = tiles_of(lens, starts)
        host["tiles"][: len(tiles)] = tiles
        host["tiles"][len(tiles) :] = last, 0
        for row, chunk in enumerate(prefill):
            host["pages"][row, : len(chunk.pages)] = chunk.pages
        if self.bucket.keys:
            ends = starts + lens
            host["cu_kv"][:] = 0
            host["cu_kv"][: lens.size] = np.cumsum(ends) - ends
            prefixes = [entries_at(c, np.arange(end), self._page_size) for c, end in zip(prefill, ends, strict=True)]
            total = int(ends.sum())
            host["prefix_entries"][total:] = 0
            if prefixes:
                host["prefix_entries"][:total] = np.concatenate(prefixes)
        return count

    def _fill_decode(self, host: dict[str, np.ndarray], chunks: Sequence[ChunkRows], feed: Sequence[int]) -> None:
        ids, positions, entries, fed = (host[name][self.num_prompt :] for name in (*_PER_ROW, "feed"))
        count, table, lens = len(chunks), host["table"], host["lens"]
        for row, chunk in enumerate(chunks):
            table[row, : len(chunk.pages)] = chunk.pages
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, count)
        ids[:count] = [chunk.token_ids[0] for chunk in chunks]
        places = starts - np.fromiter((chunk.dropped for chunk in chunks), np.int64, count)
        positions[:count], lens[:count], fed[:count] = starts, places + 1, feed
        pages = table[np.arange(count), places // self._page_size].astype(np.int64)
        entries[:count] = pages * self._page_size + places % self._page_size
        for field in (ids, positions, lens, fed, table):
            field[count:] = field[0]
        entries[count:] = -1
