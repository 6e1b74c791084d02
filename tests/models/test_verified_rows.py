"""Rows of a captured step that verifies drafts equal those of a plan, whether the host or the device knows them."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.cuda.step_inputs import StepInputs
from moeyard_kernels.cuda.verified_rows import Tails, VerifiedRows
from moeyard_kernels.types.step import slot_behind
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.scheduling.request import accept
from moeyard_worker.scheduling.step import Chunk, Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, WIDTH, QUERIES = 16, 8, 4
WINDOWS = (None, 40)
VOCAB = 5


def chunk(chance: random.Random, rows: int) -> Chunk:
    start = chance.randrange(100)
    return Chunk(
        key=(b"", ""),
        start=start,
        token_ids=tuple(chance.randrange(VOCAB) for _ in range(rows)),
        pages=tuple(chance.sample(range(50), -(-(start + rows) // PAGE))),
        prompt=False,
        num_sampled=rows,
    )


def inputs_of(sequences: int, *, slots: bool = False) -> tuple[StepInputs, VerifiedRows, Tails]:
    size = StepSize(sequences=sequences, queries=QUERIES, width=WIDTH)
    tails = Tails(max_sequences=sequences, num_drafts=3, limit=WIDTH * PAGE, device=DEVICE)
    last = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    found = StepInputs(size, page_size=PAGE, windows=WINDOWS, last_ids=last, slots=slots, tails=tails)
    assert found.verified is not None
    return found, found.verified, tails


def rows_of(chunks: list[Chunk]) -> list[int]:
    return [b * QUERIES + row for b, each in enumerate(chunks) for row in range(each.num_tokens)]


def same_as_a_plan(inputs: StepInputs, chunks: list[Chunk]) -> None:
    """Compare row by row. Padding copies an existing row and is not stored."""
    plan = CudaPlan(Step(decode=tuple(chunks)), page_size=PAGE, windows=WINDOWS, flat=False, device=DEVICE)
    rows = rows_of(chunks)
    for name in ("token_ids", "positions", "entries"):
        assert torch.equal(getattr(inputs, name)[rows], getattr(plan, name)), name
    padding = [row for row in range(inputs.num_rows) if row not in rows]
    assert (inputs.entries[padding] == -1).all()
    for row in padding:
        b, own = divmod(row, QUERIES)
        count = chunks[b].num_tokens if b < len(chunks) else chunks[0].num_tokens
        copied = (b if b < len(chunks) else 0) * QUERIES + min(own, count - 1)
        assert inputs.token_ids[row] == inputs.token_ids[copied]
        assert inputs.positions[row] == inputs.positions[copied]
    for window in WINDOWS:
        ours, theirs = inputs.decode[window], plan.decode[window]
        assert torch.equal(ours.kv_lens.flatten()[rows], theirs.kv_lens)
        for row, table in zip(rows, theirs.page_table, strict=True):
            used = -(-int(ours.kv_lens.flatten()[row]) // PAGE)
            assert torch.equal(ours.page_table[row // QUERIES, :used], table[:used])


@pytest.mark.parametrize("count", [1, 3, 4])
def test_rows_known_to_the_host(count: int) -> None:
    chance = random.Random(count)
    inputs, rows, _ = inputs_of(4)
    for _ in range(20):
        chunks = [chunk(chance, chance.randint(1, QUERIES)) for _ in range(count)]
        inputs.fill(Step(decode=tuple(chunks)))
        inputs.begin()
        same_as_a_plan(inputs, chunks)
        read = rows.read.tolist()
        assert [row[0] for row in read[:count]] == [each.start for each in chunks]
        assert [tuple(row[1 : 1 + c.num_tokens]) for row, c in zip(read[:count], chunks, strict=True)] == [
            c.token_ids for c in chunks
        ]


def test_rows_fed_by_the_step_before() -> None:
    """Fed chunks in another order, and one known chunk: tokens and positions follow the accepted tokens."""
    chance = random.Random(7)
    inputs, _, tails = inputs_of(4)
    for _ in range(20):
        known = [chunk(chance, chance.randint(1, QUERIES)) for _ in range(4)]
        state = [[chance.randint(1, 4), *(chance.randrange(VOCAB) for _ in range(4))] for _ in range(4)]
        tails.state.copy_(torch.tensor(state))
        order = chance.sample(range(4), 4)
        fed = []
        for which in order:
            tokens = state[which][1:]
            here = known[which]
            fed.append(replace(here, token_ids=tuple(tokens[: here.num_tokens])))
        planned = [
            # The least start assumes one accepted token.
            replace(each, start=each.start - (state[which][0] - 1), token_ids=(0,) * each.num_tokens, fed=which)
            for each, which in zip(fed, order, strict=True)
        ]
        planned[0] = fed[0]
        inputs.fill(Step(decode=tuple(planned)))
        inputs.begin()
        same_as_a_plan(inputs, fed)


def test_state_slots_before_and_after_each_row() -> None:
    """Slots follow the rows' positions, which the device may know alone. Padding writes none."""
    chance = random.Random(4)
    inputs, _, tails = inputs_of(4, slots=True)
    for _ in range(20):
        own = [replace(chunk(chance, chance.randint(1, QUERIES)), state_slot=slot, state_ring=4) for slot in (8, 0, 12)]
        own = [replace(each, start=each.start + 1, pages=(*each.pages, 49)) for each in own]
        taken = [chance.randint(1, 4) for _ in own]
        tails.state[:3, 0] = torch.tensor(taken)
        chunks = [
            replace(each, start=each.start - n + 1, fed=i) for i, (each, n) in enumerate(zip(own, taken, strict=True))
        ]
        inputs.fill(Step(decode=tuple(chunks)))
        inputs.begin()
        assert inputs.state is not None
        slots, stand_in = inputs.state.slots, inputs.state.stand_in
        assert slots is not None
        assert stand_in is not None
        left = [slot_behind(each, each.start - 1) for each in own]
        assert slots.read.tolist() == [*left, -1]
        for b, each in enumerate(own):
            places = [slot_behind(each, each.start + row) for row in range(each.num_tokens)]
            assert slots.write[b].tolist() == [*places, *(-1,) * (QUERIES - each.num_tokens)]
            assert len({left[b], *places}) == min(4, 1 + each.num_tokens)
        assert (slots.write[3] == -1).all()
        rows = [b * QUERIES + min(row, own[b].num_tokens - 1) for b in (0, 1, 2) for row in range(QUERIES)]
        assert stand_in.tolist() == [*rows, *rows[:QUERIES]]


def test_device_accepts_like_the_scheduler() -> None:
    chance = random.Random(9)
    inputs, rows, tails = inputs_of(5)
    seen = set()
    for _ in range(60):
        chunks = [chunk(chance, chance.randint(1, QUERIES)) for _ in range(4)]
        inputs.fill(Step(decode=tuple(chunks)))
        inputs.begin()
        ids = torch.randint(2, (5, QUERIES), generator=torch.Generator().manual_seed(chance.randrange(1 << 30)))
        # Drafts are usually right.
        for b, each in enumerate(chunks):
            for row in range(each.num_tokens - 1):
                if chance.random() < 0.7:
                    ids[b, row] = each.token_ids[row + 1]
        count = rows.accept(ids.flatten().to(DEVICE)).tolist()
        for b, each in enumerate(chunks):
            right = accept(each.token_ids[1:], ids[b, : each.num_tokens].tolist())
            assert count[b] == right == tails.state[b, 0]
            assert tails.state[b, 1] == ids[b, right - 1]
            seen.add((each.num_tokens, right))
    assert seen == {(rows, right) for rows in range(1, QUERIES + 1) for right in range(1, rows + 1)}


@pytest.mark.parametrize(("positions", "stored"), [((17, 30), (True, True)), ((17, 32), (True, False))])
def test_draft_without_a_page_is_not_written(positions: tuple[int, int], stored: tuple[bool, bool]) -> None:
    inputs, rows, _ = inputs_of(3)
    base: dict[str, Any] = {"key": (b"", ""), "start": 16, "token_ids": (1,), "prompt": False, "num_sampled": 1}
    inputs.fill(Step(decode=(Chunk(**base, pages=(3, 9)), Chunk(**base, pages=(4, 7)))))
    inputs.begin()
    drafts = rows.draft_rows(torch.tensor([*positions, positions[0]], device=DEVICE))
    pages = (9, 7)
    wanted = [
        page * PAGE + position % PAGE if there else -1
        for page, position, there in zip(pages, positions, stored, strict=True)
    ]
    assert drafts.entries.tolist() == [*wanted, -1], "the third sequence is a copy of the first"
    assert drafts.decode[None].kv_lens.tolist() == [18, min(positions[1], 31) + 1, 18]
