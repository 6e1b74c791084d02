"""How a step's rows reach the state of their sequences, which lies in slots: for linear attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeyard_kernels.types.decode_tables import MAX_QUERIES
from moeyard_kernels.types.prompt_chunks import CHUNK, PADDING, WIDTH, PromptChunks, chunks_of
from moeyard_kernels.types.state_slots import SlotMoves, StateSlots
from moeyard_kernels.types.step import ChunkRows

Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Up to 16 consecutive decode rows of each of some sequences, B times Q: of fewer rows the others are copies.

    rows: [B Q] int64, decode rows counted from the first. taken, at: [n] int64, which of the B Q count, and the decode
    rows that they are.
    """

    rows: torch.Tensor
    slots: StateSlots
    taken: torch.Tensor
    at: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """Of prompt rows `chunks` (None without any), before which what `restored` says is to be copied (None: nothing), so
    that their snapshots may take its place. Of decode rows `slots`, where each is a sequence of its own, or else
    `waves`, which are to be taken in order: a row needs the state that the row before left.

    stand_in: [num_rows] int64, the row whose result each row takes, where rows are padding; None where none is.
    """

    chunks: PromptChunks | None
    slots: StateSlots | None
    restored: SlotMoves | None = None
    waves: tuple[Wave, ...] = ()
    stand_in: torch.Tensor | None = None


def plan_state(prefill: Sequence[ChunkRows], decode: Sequence[ChunkRows], device: torch.device) -> StateRows:
    """Of a step without padding."""
    chunks = slots = restored = None
    if prefill:
        chunks = PromptChunks.plan(*_prompts(prefill), device=device)
        moves = [(source, c.state_slot) for c in prefill if (source := _restored(c)) >= 0]
        restored = SlotMoves.plan(moves, device=device) if moves else None
    if all(len(c.token_ids) == 1 for c in decode):
        if decode:
            slots = StateSlots.in_place(torch.tensor([c.state_slot for c in decode]).to(device))
        return StateRows(chunks=chunks, slots=slots, restored=restored)
    return StateRows(chunks=chunks, slots=None, restored=restored, waves=tuple(_waves(decode, device)))


def _prompts(prefill: Sequence[ChunkRows]) -> tuple[list[int], list[int], list[int], list[Sequence[tuple[int, int]]]]:
    """Lengths, starts, slots, snapshots."""
    return (
        [len(c.token_ids) for c in prefill], [c.start for c in prefill], [c.state_slot for c in prefill],
        [c.snapshots for c in prefill],
    )  # fmt: skip


def _restored(chunk: ChunkRows) -> int:
    """The slot that it goes on from instead of its own; -1 for none."""
    return chunk.restored if chunk.start else -1


def _waves(decode: Sequence[ChunkRows], device: torch.device) -> list[Wave]:
    begins = np.concatenate(([0], np.cumsum([len(c.token_ids) for c in decode])))
    left = [(int(begin), int(end), c.state_slot) for begin, end, c in zip(begins[:-1], begins[1:], decode, strict=True)]
    waves = []
    while left:
        counts = [min(end - begin, MAX_QUERIES) for begin, end, _ in left]
        # One and 16 are the sizes that kernels are compiled for.
        queries = 1 if max(counts) == 1 else MAX_QUERIES
        rows = np.array([begin for begin, _, _ in left]).repeat(queries).reshape(-1, queries)
        write = np.full_like(rows, -1)
        counted = np.arange(queries) < np.array(counts)[:, None]
        rows = np.where(counted, rows + np.arange(queries), rows)
        for row, (count, (_, _, slot)) in enumerate(zip(counts, left, strict=True)):
            write[row, count - 1] = slot
        taken = np.flatnonzero(counted)
        read = np.array([slot for _, _, slot in left])
        parts = (rows.ravel(), taken, rows.ravel()[taken], read, write.ravel())
        moved = torch.from_numpy(np.concatenate(parts)).to(device).split([part.size for part in parts])
        slots = StateSlots(read=moved[3], write=moved[4].view(-1, queries))
        waves.append(Wave(rows=moved[0], slots=slots, taken=moved[1], at=moved[2]))
        left = [(begin + n, end, slot) for n, (begin, end, slot) in zip(counts, left, strict=True) if begin + n < end]
    return waves


class StateInputs:
    """The same of a captured step, of up to `prompt` rows in `chunks` prompts and up to `decode` decode rows."""

    def __init__(self, *, prompt: int, chunks: int, decode: int) -> None:
        self._prompt, self._decode = prompt, decode
        # A prompt has one chunk at most that is not full; and one that is none.
        self._room, self._heads = (prompt // CHUNK + chunks + 1, chunks) if prompt else (0, 0)

    def fields(self) -> Fields:
        """What a step's staging is to hold for it."""
        found: Fields = {"stand_in": (torch.int64, (self._prompt + self._decode,))}
        if self._prompt:
            found |= {"state_chunks": (torch.int64, (self._room, WIDTH)), "state_fresh": (torch.bool, (self._room,))}
            found |= dict.fromkeys(("state_heads", "state_from", "state_to"), (torch.int64, (self._heads,)))
        if self._decode:
            found["state_slots"] = (torch.int64, (self._decode,))
        return found

    def rows(self, on: Mapping[str, torch.Tensor]) -> StateRows:
        """Over the device's tensors of these fields."""
        chunks = slots = restored = None
        if self._prompt:
            restored = SlotMoves(source=on["state_from"], target=on["state_to"])
            chunks = PromptChunks(
                table=on["state_chunks"], fresh=on["state_fresh"], heads=on["state_heads"], planned=None,
                num_rows=self._prompt,
            )  # fmt: skip
        if self._decode:
            slots = StateSlots.in_place(on["state_slots"])
        return StateRows(chunks=chunks, slots=slots, restored=restored, stand_in=on["stand_in"])

    def fill(
        self, host: Mapping[str, np.ndarray], prefill: Sequence[ChunkRows], decode: Sequence[ChunkRows]
    ) -> None:  # fmt: skip
        """Take a step that fits. A decode row that it has not reads and writes no slot, and takes the first's result:
        it chooses the same experts, and so reads no weights of its own."""
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
                host["state_from"][n], host["state_to"][n] = _restored(chunk), chunk.state_slot
        if self._decode:
            host["state_slots"][:] = -1
            host["state_slots"][: len(decode)] = [c.state_slot for c in decode]
            if decode:
                host["stand_in"][self._prompt + len(decode) :] = self._prompt
