"""The slots of a step's rows in the state of linear attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeyard_kernels.types.decode_tables import MAX_QUERIES
from moeyard_kernels.types.expert_layout import max_blocks
from moeyard_kernels.types.sending import to_device
from moeyard_kernels.types.state_slots import CHUNK, PADDING, WIDTH, PromptChunks, SlotMoves, StateSlots, chunks_of
from moeyard_kernels.types.step import ChunkRows, slot_behind, slot_left, slot_restored

# Sizes of a wave, in rows per sequence.
WAVES = (1, 4, MAX_QUERIES)
Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Up to 16 consecutive decode rows of each of B sequences, Q rows each; missing rows are copies.

    rows: [B Q] int64, decode rows counted from the first. taken, at: [n] int64, the real ones of the B Q rows, and
    their decode rows.
    """

    rows: torch.Tensor
    slots: StateSlots
    taken: torch.Tensor
    at: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """The state slots of a step's rows.

    Prompt rows use `chunks` (None without any). The copies of `restored` (None: nothing) come first, so that snapshots
    may overwrite their source. Decode rows use `slots` if each is a sequence of its own, else `waves`, in order: a row
    needs the state of the row before. stand_in: [num_rows] int64, the row whose result each row takes, which differs
    for padding rows; None without padding.
    """

    chunks: PromptChunks | None
    slots: StateSlots | None
    restored: SlotMoves | None = None
    waves: tuple[Wave, ...] = ()
    stand_in: torch.Tensor | None = None


def plan_state(prefill: Sequence[ChunkRows], decode: Sequence[ChunkRows], device: torch.device) -> StateRows:
    """Return the state rows of a step without padding."""
    chunks = slots = restored = None
    if prefill:
        chunks = PromptChunks.plan(*_prompts(prefill), device=device)
        moves = [(source, slot_left(c)) for c in prefill if (source := slot_restored(c)) >= 0]
        restored = SlotMoves.plan(moves, device=device) if moves else None
    if all(len(c.token_ids) == 1 for c in decode):
        if decode:
            places = [[slot_behind(c, c.start - 1) for c in decode], [slot_left(c) for c in decode]]
            read, write = to_device(torch.tensor(places), device)
            slots = StateSlots(read=read, write=write.unsqueeze(1))
        return StateRows(chunks=chunks, slots=slots, restored=restored)
    return StateRows(chunks=chunks, slots=None, restored=restored, waves=tuple(_waves(decode, device)))


def _prompts(prefill: Sequence[ChunkRows]) -> tuple[list[int], list[int], list[int], list[Sequence[tuple[int, int]]]]:
    """Lengths, starts, slots, snapshots."""
    return (
        [len(c.token_ids) for c in prefill],
        [c.start for c in prefill],
        [slot_left(c) for c in prefill],
        [c.snapshots for c in prefill],
    )


def _waves(decode: Sequence[ChunkRows], device: torch.device) -> list[Wave]:
    # Unfinished chunks: the first row, the number of rows done, the chunk.
    begins = np.cumsum([0, *(len(c.token_ids) for c in decode)])
    left = [(int(begin), 0, chunk) for begin, chunk in zip(begins, decode, strict=False)]
    waves = []
    while left:
        counts = [min(len(chunk.token_ids) - had, MAX_QUERIES) for _, had, chunk in left]
        # The compiled sizes: a step, drafts beside a prompt, and recomputed output.
        queries = next(size for size in WAVES if size >= max(counts))
        rows = np.array([first + had for first, had, _ in left]).repeat(queries).reshape(-1, queries)
        write = np.full_like(rows, -1)
        counted = np.arange(queries) < np.array(counts)[:, None]
        rows = np.where(counted, rows + np.arange(queries), rows)
        read = np.empty(len(left), dtype=np.int64)
        for row, (count, (_, had, chunk)) in enumerate(zip(counts, left, strict=True)):
            position = chunk.start + had
            read[row] = slot_behind(chunk, position - 1)
            # Only the last row of a slot may write it.
            for query in range(max(0, count - chunk.state_ring), count):
                write[row, query] = slot_behind(chunk, position + query)
        taken = np.flatnonzero(counted)
        parts = (rows.ravel(), taken, rows.ravel()[taken], read, write.ravel())
        moved = to_device(torch.from_numpy(np.concatenate(parts)), device).split([part.size for part in parts])
        slots = StateSlots(read=moved[3], write=moved[4].view(-1, queries))
        waves.append(Wave(rows=moved[0], slots=slots, taken=moved[1], at=moved[2]))
        left = [(first, had + count, chunk) for count, (first, had, chunk) in zip(counts, left, strict=True)]
        left = [(first, had, chunk) for first, had, chunk in left if had < len(chunk.token_ids)]
    return waves


class StateInputs:
    """The state rows of a captured step: up to `prompt` rows in `chunks` prompts, and up to `decode` decode rows."""

    def __init__(self, *, prompt: int, chunks: int, decode: int) -> None:
        self._prompt, self._decode = prompt, decode
        # One more block than needed, as padding.
        self._room, self._heads = (max_blocks(prompt, chunks, CHUNK) + 1, chunks) if prompt else (0, 0)

    def fields(self) -> Fields:
        """Return the fields of the step's staging."""
        found: Fields = {"stand_in": (torch.int64, (self._prompt + self._decode,))}
        if self._prompt:
            found |= {"state_chunks": (torch.int64, (self._room, WIDTH)), "state_fresh": (torch.bool, (self._room,))}
            found |= dict.fromkeys(("state_heads", "state_from", "state_to"), (torch.int64, (self._heads,)))
        if self._decode:
            found["state_slots"] = (torch.int64, (self._decode,))
        return found

    def rows(self, on: Mapping[str, torch.Tensor]) -> StateRows:
        """Return the rows over the device's tensors of these fields."""
        chunks = slots = restored = None
        if self._prompt:
            restored = SlotMoves(source=on["state_from"], target=on["state_to"])
            chunks = PromptChunks(
                table=on["state_chunks"],
                fresh=on["state_fresh"],
                heads=on["state_heads"],
                planned=None,
                num_rows=self._prompt,
            )
        if self._decode:
            slots = StateSlots.in_place(on["state_slots"])
        return StateRows(chunks=chunks, slots=slots, restored=restored, stand_in=on["stand_in"])

    def fill(self, host: Mapping[str, np.ndarray], prefill: Sequence[ChunkRows], decode: Sequence[ChunkRows]) -> None:
        """Take a step that fits. A missing decode row uses no slot and takes the first row's result. So it chooses the
        same experts, and reads no weights of its own."""
        host["stand_in"][:] = np.arange(self._prompt + self._decode)
        if self._prompt:
            _, rows, fresh, heads = chunks_of(*_prompts(prefill))
            host["state_chunks"][len(rows) :], host["state_fresh"][len(rows) :] = PADDING, True
            host["state_heads"][:] = self._room - 1
            if rows:
                host["state_chunks"][: len(rows)], host["state_fresh"][: len(rows)] = rows, fresh
                host["state_heads"][: len(heads)] = heads
            host["state_from"][:], host["state_to"][:] = -1, 0
            for n, chunk in enumerate(prefill):
                host["state_from"][n], host["state_to"][n] = slot_restored(chunk), slot_left(chunk)
        if self._decode:
            host["state_slots"][:] = -1
            assert all(c.state_ring == 1 for c in decode), "steps with drafts use VerifiedRows"
            host["state_slots"][: len(decode)] = [c.state_slot for c in decode]
            if decode:
                host["stand_in"][self._prompt + len(decode) :] = self._prompt
