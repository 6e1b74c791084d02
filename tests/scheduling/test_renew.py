"""Other weights: nothing of the old ones is reused, and running requests are computed again with their output."""

from dataclasses import replace

from tests.scheduling.test_snapshots import CONFIG

from moeyard_worker.protocol import PromptLogprobs, SamplingParams, Submit, TokenLogprob, Tokens
from moeyard_worker.scheduling.request import Accepted, Reply
from moeyard_worker.scheduling.scheduler import Scheduler
from moeyard_worker.scheduling.step import Step

PROMPT = tuple(range(14))


class Played:
    """A scheduler whose steps a test completes, with token 30 for every sampled row."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(replace(CONFIG, max_in_flight=2))
        self.scheduler.renew("one")

    def add(self, name: str, **sampling: object) -> None:
        params = SamplingParams(**{"max_tokens": 4, **sampling})  # type: ignore[arg-type]
        assert self.scheduler.add(Submit(request_id=name, prompt_token_ids=PROMPT, sampling=params), b"c", 0.0) is None

    def complete(self, step: Step) -> list[Reply]:
        score = TokenLogprob(logprob=-1.0, rank=1)
        scores = [(score,) * len(c.scoring.targets) for c in step.scored if c.scoring is not None]
        found = self.scheduler.complete(step, [Accepted((30,)) for _ in step.sampled], 1.0, scores)
        self.scheduler.validate()
        return found

    def run(self) -> list[Reply]:
        """Run all requests to their ends."""
        found: list[Reply] = []
        while self.scheduler.has_work():
            found += self.complete(self.scheduler.schedule(1.0))
        return found


def test_prefixes_and_snapshots_are_dropped() -> None:
    played = Played()
    played.add("a")
    played.run()
    scheduler = played.scheduler
    assert scheduler.pool.known
    assert scheduler.snapshots.num_held
    scheduler.renew("two")
    scheduler.validate()
    assert (len(scheduler.pool.known), scheduler.snapshots.num_held) == (0, 0)
    assert scheduler.pool.num_free == CONFIG.num_pages
    played.add("b")
    played.run()
    assert scheduler.stats.prefix_hit_tokens == 0, "the second prompt may not use what the old weights computed"


def test_running_requests_are_computed_again() -> None:
    played = Played()
    scheduler = played.scheduler
    played.add("a")
    for _ in range(2):
        played.complete(scheduler.schedule(0.0))
    replies = played.complete(scheduler.schedule(0.0))
    # A step in flight is rolled back, as at the end of an epoch.
    scheduler.schedule(0.0)
    scheduler.roll_back(1.0)
    scheduler.renew("two")
    scheduler.validate()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)
    first = scheduler.schedule(1.0)
    assert first.prefill[0].start == 0, "the prompt is computed again"
    replies += [*played.complete(first), *played.run()]
    tokens = [reply.message for reply in replies if isinstance(reply.message, Tokens)]
    assert [token for each in tokens for token in each.token_ids] == [30] * (4 - tokens[0].start)
    versions = {each.start: each.weight_version for each in tokens if each.weight_version is not None}
    assert list(versions.values())[-1] == "two"
    assert scheduler.pool.num_free == CONFIG.num_pages


def test_scores_of_a_prompt_without_output_begin_again() -> None:
    """Scores of the old weights must not stand beside tokens of the new ones."""
    played = Played()
    scheduler = played.scheduler
    played.add("a", prompt_logprobs=0)
    before = played.complete(scheduler.schedule(0.0))
    assert [reply.message.start for reply in before if isinstance(reply.message, PromptLogprobs)] == [1]
    scheduler.renew("two")
    scored = [reply.message for reply in played.run() if isinstance(reply.message, PromptLogprobs)]
    assert scored[0].start == 1
    assert sum(len(each.logprobs) for each in scored) == len(PROMPT) - 1
