"""A fake device: a model whose state is a hash, over real page tables and slots.

The fake state of a position is a hash of all earlier states, read through the page table of the chunk, of its own token
and of its formula (prompt or decode). Pages are blank when they are handed out. So a lost, shared, stale or skipped
position, or one computed with the wrong formula, changes all that follows; what each chunk reads is compared with the
states of its request alone, which `states_alone` computes without pages. A slot holds the states of all positions, and
so does that of a snapshot.

A prompt of which a part is kept leaves the states that a hash of them prefers, and its window, in pages of their own.

It feeds the rows whose tokens the host does not know, and proposes drafts: true ones, wrong ones, fewer than asked for.
"""

from functools import lru_cache

from moeyard_worker.config.engine_config import SchedulerConfig
from moeyard_worker.protocol import SamplingParams, TokenLogprob
from moeyard_worker.scheduling.request import Accepted, accept
from moeyard_worker.scheduling.step import Chunk, Step

Cell = int | None
# Of a prompt's states how many are kept, and how many of its last positions always are; None: all are.
Kept = tuple[int, int] | None


def kept_of(params: SamplingParams, prompt: tuple[int, ...]) -> Kept:
    """What a request for tokens wants kept of its prompt, if that is not all."""
    asked = params.kv_compression
    if asked is None or not params.max_tokens or asked.budget >= len(prompt):
        return None
    return asked.budget, asked.window


def compacted(states: list[Cell], kept: tuple[int, int]) -> list[Cell]:
    """What is kept of a prompt's states, in order."""
    count, window = kept
    before = range(len(states) - window)
    best = sorted(before, key=lambda i: (hash((states[i], 3)), i))[: count - window]
    return [*(states[i] for i in sorted(best)), *states[len(states) - window :]]


def state_of(earlier: list[Cell], token_id: int, *, prompt: bool) -> int:
    """The fake state of the position after `earlier`."""
    assert None not in earlier, "a position reads a state that nobody computed"
    return hash((*earlier, token_id, prompt))


@lru_cache(maxsize=256)
def states_alone(prompt: tuple[int, ...], vocab_size: int, length: int, kept: Kept = None) -> list[Cell]:
    """The fake states of the first `length` positions of a request that nothing else touches, and nothing stops."""
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
    """What is in a request's places once it has these states."""
    if kept is None or len(states) < num_prompt:
        return states
    return compacted(states[:num_prompt], kept) + states[num_prompt:]


def tokens_alone(config: SchedulerConfig, prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], str]:
    """Output tokens and finish reason of a request that nothing else touches."""
    states = states_alone(prompt, config.vocab_size, config.max_model_len, kept_of(params, prompt))
    output: list[int] = []
    for state in states[len(prompt) - 1 :] if params.max_tokens else ():
        assert state is not None
        token_id = state % config.vocab_size
        output.append(token_id)
        stops = token_id in params.stop_token_ids or (not params.ignore_eos and token_id in config.eos_token_ids)
        if stops and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens:
            break
    return output, "length"


def score_alone(config: SchedulerConfig, prompt: tuple[int, ...], position: int, num_top: int) -> TokenLogprob:
    """The fake score of the prompt token at `position`, from the state before it."""
    state = states_alone(prompt, config.vocab_size, config.max_model_len)[position - 1]
    assert state is not None
    return TokenLogprob(logprob=-float(state % 997), rank=1 + prompt[position], top=((state % 7, -0.5),) * num_top)


class Device:
    """Runs steps on fake states. `cells[page][offset]` is one, `slots[slot]` all of a sequence up to some position."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cells: list[list[Cell]] = [[None] * config.page_size for _ in range(config.num_pages)]
        self.slots: list[list[Cell]] = [
            [] for _ in range(config.num_state_slots * config.state_ring + config.num_snapshots)
        ]
        # Of each sampled chunk of the latest step: where its last accepted token sits, the token, drafts behind it.
        self.latest: list[tuple[int, int, tuple[int, ...]]] = []

    def run(self, step: Step, prompts: list[tuple[tuple[int, ...], Kept]], fresh: list[list[int]]) -> list[Accepted]:
        """Compute a step: `prompts[i]` is that of chunk i's request, `fresh[i]` the pages it is the first to name."""
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
                # A row without a draft gets any token: what is accepted is right whoever guessed it.
                token_ids = (token_id, *drafts, *(0,) * self.config.num_drafts)[: chunk.num_tokens]
            states = self._compute(chunk, start, token_ids, prompt)
            if chunk.num_sampled:
                results.append(self._sample(chunk, token_ids, states))
        return results

    def _compute(
        self, chunk: Chunk, start: int, token_ids: tuple[int, ...], asked: tuple[tuple[int, ...], Kept]
    ) -> list[Cell]:
        """States in all places of the chunk's request up to its last row, and behind it."""
        config, size, (prompt, kept) = self.config, self.config.page_size, asked
        assert start + chunk.num_tokens <= config.max_model_len, "a position that the model does not have"
        states = [self.cells[chunk.pages[i // size]][i % size] for i in range(start - chunk.dropped)]
        alone = states_alone(prompt, config.vocab_size, config.max_model_len, kept)[:start]
        assert states == places_alone(alone, len(prompt), kept), "others' states are read"
        if chunk.state_slot >= 0:
            assert chunk.state_ring == config.state_ring
            read = chunk.state_slot + (start - 1) % config.state_ring if chunk.restored < 0 else chunk.restored
            # A slot is of all positions, also where places are of some.
            assert start == 0 or self.slots[read] == alone, "the slot is another's, or stale, or of another position"
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
        assert chunk.num_tokens >= chunk.compaction.window, "what chooses is not in the chunk"
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
        """Drafts behind `token_id` at position len(states): two of three are right, and the last may be missing."""
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
