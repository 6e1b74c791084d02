"""A fake device: a model whose state is a hash, over real page tables and slots.

The fake state of a position is a hash of all earlier states (read through the chunk's page table), its own token and
its formula (prompt or decode). Newly allocated pages are blank. So a lost, shared, stale or skipped position, or one
computed with the wrong formula, changes everything after it. Each chunk's inputs are compared with the states of its
request alone, which `states_alone` computes without pages. A slot or a snapshot holds the states of all positions.

A compressed prompt leaves the states that a hash of them prefers, and its window, in separate pages.

The device supplies tokens that the host does not know, and proposes drafts: right, wrong, or too few.
"""

from dataclasses import replace
from functools import lru_cache

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.protocol import SamplingParams, TokenLogprob
from moeyard_worker.scheduling.request import Accepted, accept
from moeyard_worker.scheduling.step import Chunk, Step

Cell = int | None
# How many states of a prompt are kept, and how many of its last positions always are; None keeps all.
Kept = tuple[int, int] | None


def kept_of(params: SamplingParams, prompt: tuple[int, ...]) -> Kept:
    """Return the kept part that a request for tokens asks for, or None for all."""
    asked = params.kv_compression
    if asked is None or not params.max_tokens or asked.budget >= len(prompt):
        return None
    return asked.budget, asked.window


def compacted(states: list[Cell], kept: tuple[int, int]) -> list[Cell]:
    """Return the kept states of a prompt, in order."""
    count, window = kept
    before = range(len(states) - window)
    best = sorted(before, key=lambda i: (hash((states[i], 3)), i))[: count - window]
    return [*(states[i] for i in sorted(best)), *states[len(states) - window :]]


def state_of(earlier: list[Cell], token_id: int, *, prompt: bool) -> int:
    """Return the fake state of the position after `earlier`."""
    assert None not in earlier, "a position reads a state that was never computed"
    return hash((*earlier, token_id, prompt))


@lru_cache(maxsize=256)
def states_alone(prompt: tuple[int, ...], vocab_size: int, length: int, kept: Kept = None) -> list[Cell]:
    """Return the fake states of the first `length` positions of a request that runs alone without a stop."""
    states: list[Cell] = []
    seen = states
    for position in range(length):
        if position == len(prompt) and kept is not None:
            seen = compacted(states, kept)
        token_id = prompt[position] if position < len(prompt) else (states[-1] or 0) % vocab_size
        states.append(state_of(seen, token_id, prompt=position < len(prompt)))
        if seen is not states:
            seen.append(states[-1])
    return states


def places_alone(states: list[Cell], num_prompt: int, kept: Kept) -> list[Cell]:
    """Return the contents of a request's places once it has these states."""
    if kept is None or len(states) < num_prompt:
        return states
    return compacted(states[:num_prompt], kept) + states[num_prompt:]


def tokens_alone(config: SchedulerConfig, prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], str]:
    """Return output tokens and finish reason of a request that runs alone."""
    states = states_alone(prompt, config.vocab_size, config.max_model_len, kept_of(params, prompt))
    output: list[int] = []
    for state in states[len(prompt) - 1 :] if params.max_tokens else ():
        assert state is not None
        token_id = state % config.vocab_size
        output.append(token_id)
        stops = token_id in params.stop_token_ids or (not params.ignore_eos and token_id in config.eos_token_ids)
        if stops and len(output) >= params.min_tokens and len(output) > len(params.trace_decode_token_ids):
            return output, "stop"
        if len(output) == params.max_tokens:
            break
    return output, "length"


def with_trace(config: SchedulerConfig, prompt: tuple[int, ...], params: SamplingParams) -> SamplingParams:
    """Return `params` with the tokens that the fake model samples in place of those of its trace."""
    count = len(params.trace_decode_token_ids)
    if not count or not prompt:
        return params
    states = states_alone(prompt, config.vocab_size, len(prompt) + count, kept_of(params, prompt))
    tokens = tuple(state % config.vocab_size for state in states[len(prompt) - 1 : -1] if state is not None)
    return replace(params, trace_decode_token_ids=tokens)


def score_alone(
    config: SchedulerConfig, prompt: tuple[int, ...], params: SamplingParams, position: int, num_top: int
) -> TokenLogprob:
    """Return the fake score of the token at `position` of prompt or forced output, from the state before it."""
    state = states_alone(prompt, config.vocab_size, config.max_model_len, kept_of(params, prompt))[position - 1]
    assert state is not None
    token_id = (prompt + params.trace_decode_token_ids)[position]
    return TokenLogprob(logprob=-float(state % 997), rank=1 + token_id, top=((state % 7, -0.5),) * num_top)


class Device:
    """Runs steps on fake states. `cells[page][offset]` is one, `slots[slot]` all of a sequence up to some position."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cells: list[list[Cell]] = [[None] * config.page_size for _ in range(config.num_pages)]
        self.slots: list[list[Cell]] = [
            [] for _ in range(config.num_state_slots * config.state_ring + config.num_snapshots)
        ]
        # For each sampled chunk of the latest step: position and id of its last accepted token, next drafts.
        self.latest: list[tuple[int, int, tuple[int, ...]]] = []

    def run(self, step: Step, prompts: list[tuple[tuple[int, ...], Kept]], fresh: list[list[int]]) -> list[Accepted]:
        """Compute a step: `prompts[i]` belongs to chunk i's request, `fresh[i]` are the pages that it names first."""
        fed, self.latest = self.latest, []
        results = []
        for chunk, prompt, pages in zip(step.chunks, prompts, fresh, strict=True):
            for page in pages:
                self.cells[page] = [None] * self.config.page_size
            start, token_ids = chunk.start, chunk.token_ids
            if chunk.fed is not None:
                start, token_id, drafts = fed[chunk.fed]
                assert chunk.start <= start <= chunk.max_start
                assert set(token_ids) == {0}
                # A row without a draft gets any token, because the accepted tokens do not depend on it.
                token_ids = (token_id, *drafts, *(0,) * self.config.num_drafts)[: chunk.num_tokens]
            states = self._compute(chunk, start, token_ids, prompt)
            if chunk.num_sampled:
                results.append(self._sample(chunk, token_ids, states))
        return results

    def _compute(
        self, chunk: Chunk, start: int, token_ids: tuple[int, ...], asked: tuple[tuple[int, ...], Kept]
    ) -> list[Cell]:
        """Return the states in all places of the chunk's request up to and including its rows."""
        config, size, (prompt, kept) = self.config, self.config.page_size, asked
        assert start + chunk.num_tokens <= config.max_model_len, "the position exceeds the model's length"
        states = [self.cells[chunk.pages[i // size]][i % size] for i in range(start - chunk.dropped)]
        alone = states_alone(prompt, config.vocab_size, config.max_model_len, kept)[:start]
        assert states == places_alone(alone, len(prompt), kept), "the chunk reads other states"
        if chunk.state_slot >= 0:
            assert chunk.state_ring == config.state_ring
            read = chunk.state_slot + (start - 1) % config.state_ring if chunk.restored < 0 else chunk.restored
            # A slot covers all positions, even where places cover a part.
            assert start == 0 or self.slots[read] == alone, "the slot has the wrong owner, age or position"
        for place, token_id in enumerate(token_ids, start=len(states)):
            states.append(state_of(states, token_id, prompt=chunk.prompt))
            self.cells[chunk.pages[place // size]][place % size] = states[-1]
        if chunk.state_slot >= 0:
            whole = alone + states[len(states) - chunk.num_tokens :]
            for end in range(max(start, len(whole) - config.state_ring), len(whole)):
                self.slots[chunk.state_slot + end % config.state_ring] = whole[: end + 1]
            for position, slot in chunk.snapshots:
                self.slots[slot] = whole[:position]
        if chunk.compaction is None:
            return states
        assert kept is not None
        assert chunk.num_tokens >= chunk.compaction.window, "the window must be in the chunk"
        states = compacted(states, kept)
        for place, state in enumerate(states):
            self.cells[chunk.compaction.pages[place // size]][place % size] = state
        return states

    def _sample(self, chunk: Chunk, token_ids: tuple[int, ...], states: list[Cell]) -> Accepted:
        first = len(states) - chunk.num_sampled
        sampled = [state % self.config.vocab_size for state in states[first:] if state is not None]
        count = accept(token_ids[len(token_ids) - chunk.num_sampled + 1 :], sampled)
        end = first + count
        drafts = self._propose(states[:end], sampled[count - 1])
        self.latest.append((end + chunk.behind[1], sampled[count - 1], drafts))
        return Accepted(tuple(sampled[:count]), drafts=drafts)

    def _propose(self, states: list[Cell], token_id: int) -> tuple[int, ...]:
        """Return drafts after `token_id` at position len(states): two of three are right, the last may be missing."""
        drafts: list[int] = []
        for j in range(self.config.num_drafts):
            states.append(state_of(states, token_id, prompt=False))
            assert states[-1] is not None
            luck = hash((states[-1], 7))
            if j and luck % 7 == 0:
                break
            token_id = (states[-1] + (luck % 3 == 0)) % self.config.vocab_size
            drafts.append(token_id)
        return tuple(drafts)
