"""Runs steps on a GPU: most as CUDA graphs, others launch by launch; results are taken when they are there.

A step is launched and not waited for. Its tokens stay on the device, where the next step finds those that the host does
not know yet (`Chunk.fed`), and are copied to the host behind it.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.cuda.graph_inputs import Bucket, GraphInputs
from moeyard_kernels.types.sampled_tokens import SampledTokens
from moeyard_kernels.types.sending import to_device
from moeyard_worker.engine.sampling.constrained import choose_again, without_grammars
from moeyard_worker.engine.sampling.device_sampler import DeviceSampler, nothing_collected
from moeyard_worker.engine.sampling.sampling import (
    accepted,
    ask,
    chosen_logits,
    edits_logits,
    errors_of,
    sampled_rows,
    tell,
    unsound,
)  # fmt: skip
from moeyard_worker.engine.sampling.scoring import Scores, score, told, unsound_scores, warm_scoring
from moeyard_worker.engine.steps.captured_sizes import (
    CHUNKS,
    MAX_PROMPT,
    ROWS,
    below,
    decode_buckets,
    listed,
    prompt_buckets,
)
from moeyard_worker.engine.steps.compile_ahead import compile_ahead, rehearsal
from moeyard_worker.engine.steps.in_flight import InFlight
from moeyard_worker.engine.steps.peer_buckets import with_peers, with_rooms
from moeyard_worker.engine.steps.runner import Runner
from moeyard_worker.engine.steps.step_graphs import StepGraphs
from moeyard_worker.exchange.base import Exchange, PeerRows
from moeyard_worker.scheduling.request import Accepted, Request
from moeyard_worker.scheduling.step import Step

log = logging.getLogger(__name__)

# Prompt rows by which kernels are chosen where prompts are launched one by one.
_WARM = (64, 256, 1024, 2048)


class GraphLaunched(InFlight):
    """A step that runs. `results` waits for it."""

    def __init__(
        self,
        step: Step,
        tokens: SampledTokens,
        requests: Sequence[Request],
        chosen: torch.Tensor,
        begun: torch.cuda.Event,
        errors: Mapping[int, str],
        exchange: Exchange,
        scores: Sequence[SampledTokens] = (),
    ) -> None:
        self._errors = errors
        self._blocks = [block.each(to_host) for block in scores]
        self._chosen = to_host(chosen)
        self._requests = requests
        self._tokens = tokens.each(to_host)
        self._results: list[Accepted] | None = None
        self._scores: Scores | None = None
        super().__init__(step, begun=begun, exchange=exchange)

    @property
    def results(self) -> list[Accepted]:
        """`results[i]` of `step.sampled[i]`."""
        if self._results is None:
            self._wait()
            asked = [r.sampling.logprobs for c, r in zip(self.step.sampled, self._requests, strict=True)]
            self._results = accepted(self.step, tell(self._tokens, asked), self._errors)
        return self._results

    @property
    def scores(self) -> Scores:
        """`scores[i]` of `step.scored[i]`."""
        if self._scores is None:
            self._done.synchronize()
            self._scores = told(self.step, self._blocks) if self._blocks else []
        return self._scores

    @property
    def unsound(self) -> tuple[str, ...]:
        """See `LaunchedStep.unsound`."""
        self._done.synchronize()
        bad = unsound(self.step, self._requests, self._chosen) + unsound_scores(self.step, self.scores)
        return tuple(dict.fromkeys(bad))


class GraphRunner:
    """A runner on a GPU.

    `max_rows` bounds the rows of a decode step, `max_pages` the pages of a sequence, `max_prompt` the prompt rows of a
    step. `captures_prompts`: whether a step with prompts asks nothing of the host. Of the steps so far `num_replayed`
    and `num_eager` count how they ran; `num_rows` are the rows of those that were replayed, `num_padded_rows` theirs
    with padding. What a step with peers runs in: `peer_buckets.py`.

    Where captured steps are one epoch's (`Exchange.of_epoch`), each is captured when it is first met, and of steps
    without prompts only, as what those bring is for the host to ask.
    """

    def __init__(
        self, runner: Runner, backend: CudaBackend, *, max_rows: int, max_pages: int, max_prompt: int,
        captures_prompts: bool = True,
    ) -> None:  # fmt: skip
        self._runner, self._backend = runner, backend
        self._max_rows, self._max_pages, self._max_prompt = max_rows, max_pages, min(max_prompt, MAX_PROMPT)
        self._max_eager = max_prompt
        self._of_epoch = runner.exchange.of_epoch
        self._captures_prompts = captures_prompts and self._of_epoch is None
        self._sampler = DeviceSampler(
            max_rows=max_rows + CHUNKS, vocab=runner.config.vocab_size, eos_token_ids=runner.config.eos_token_ids,
            device=backend.device,
        )  # fmt: skip
        self._exchange = runner.exchange
        self._has_peers = runner.exchange.places_rows
        self._steps = StepGraphs(self._inputs, self._forward, runner.exchange, backend.device)
        self.num_replayed = self.num_eager = self.num_rows = self.num_padded_rows = 0
        # While this is set every step is launched kernel by kernel.
        self.eager = False
        # What the last step replayed, in order; nothing where it, or the choice of its tokens, was launched.
        self.replayed: tuple[torch.cuda.CUDAGraph, ...] = ()

    def buckets(self) -> Iterator[Bucket]:
        """The size of every step that is captured."""
        own = self._own_buckets()
        if self._of_epoch is not None:
            return with_rooms([*own], self._of_epoch.rooms)
        return with_peers([*own]) if self._has_peers else own

    def _own_buckets(self) -> Iterator[Bucket]:
        """The same of a rank by itself."""
        sizes: dict[str, int] = {"max_rows": self._max_rows, "max_pages": self._max_pages}
        yield from decode_buckets(**sizes)
        if self._captures_prompts:
            yield from prompt_buckets(**sizes, max_prompt=self._max_prompt, flat=self._backend.flat)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all buckets, or run steps of their sizes where they are one epoch's; logs which are captured."""
        begun, sampled = time.perf_counter(), below(ROWS, self._max_rows)
        if self._of_epoch is None:
            # But for prompts that ask the host about experts without a slot.
            prompts = self._warm_runs() if self._captures_prompts else ()
            steps = chain(prompts, self._steps.runs(self.buckets()))
            compile_ahead(rehearsal(self._runner, steps, self._sampler.runs(sampled)), self._backend.device)
        self._warm_prompts()
        pool = self._steps.prepare(self.buckets())
        if self._of_epoch is not None:
            # More rows than there is room for are launched.
            self._warm_decode(above=max(self._of_epoch.rooms, default=0))
        with nothing_collected():
            self._sampler.capture(sampled, pool)
        num_graphs, seconds = len(self._steps.captured) + self._sampler.num_graphs, time.perf_counter() - begun
        log.info("%s", listed(self._steps.captured, num_graphs=num_graphs, seconds=seconds))
        if self._of_epoch is not None:
            rooms = ", ".join(map(str, self._of_epoch.rooms)) or "no"
            log.info("others are captured when they are first met: without prompts, for %s rows of a rank", rooms)

    @torch.inference_mode()
    def warm(self) -> None:
        """Where nothing is captured: run steps of all sizes once, so that kernels are compiled before there is one."""
        self._warm_prompts()
        self._warm_decode()

    def _warm_decode(self, above: int = 0) -> None:
        for rows in below(ROWS, self._max_rows):
            if rows > above:
                self._steps.run(Bucket(decode=rows, width=self._max_pages, peers=rows))

    def _warm_prompts(self) -> None:
        """Run prompts of the sizes that stay launches."""
        for run in self._warm_runs():
            run()

    def _warm_runs(self) -> Iterator[Callable[[], object]]:
        sizes = {size for size in (*_WARM, self._max_eager) if size <= self._max_eager}
        if self._captures_prompts and self._exchange.captures:
            # What is captured runs once before it is.
            sizes = {size for size in sizes if size > self._max_prompt}
        for size in sorted(sizes, reverse=True):
            keys = size if self._backend.flat else 0
            bucket = Bucket(prompt=size, keys=keys, width=self._max_pages, chunks=CHUNKS)
            self._exchange.expect(PeerRows(size))
            yield partial(self._forward, self._inputs(bucket))
        row = torch.zeros(1, self._runner.config.hidden_size, dtype=self._runner.dtype, device=self._backend.device)
        yield partial(warm_scoring, self._runner.model.head, row)

    def _inputs(self, bucket: Bucket) -> GraphInputs:
        return self._backend.graph_inputs(bucket, self._sampler.last_ids)

    def _forward(self, inputs: GraphInputs) -> None:
        if not inputs.num_rows:
            self._runner.model.forward(inputs)
            return
        inputs.begin()
        logits = self._sampler.logits[: inputs.num_sampled]
        self._runner.model.forward(inputs, out=logits)
        self._sampler.last_ids[: inputs.num_sampled] = ops.sample(logits).ids

    @torch.inference_mode()
    def launch(
        self, step: Step, requests: Sequence[Request], *, before: GraphLaunched | None, num_drafts: int = 0,
        peers: PeerRows | None = None,
    ) -> GraphLaunched:  # fmt: skip
        """See `Runner.launch`; returns before the step has run."""
        assert num_drafts == 0, "a SpeculativeRunner makes drafts"
        begun = torch.cuda.Event(enable_timing=True)
        begun.record()
        sampler, count = self._sampler, len(step.sample_rows)
        peers = peers or PeerRows(self.rows_of(step), (step.num_prefill_tokens,))
        bucket, scores = self._find(step, peers), list[SampledTokens]()
        found = None if bucket is None else self._steps.graph(bucket)
        self.replayed = () if found is None else (found.graph,)
        if found is None or self._of_epoch is not None:
            self._exchange.expect(peers)
        if found is None:
            scores = self._eager(step)
        else:
            if step.chunks:
                found.inputs.fill(step, [-1 if c.fed is None else c.fed for c in step.decode])
            found.graph.replay()
            if self._of_epoch is not None:
                self._of_epoch.replayed()
                self._drain()
            self.num_replayed += 1
            self.num_rows += step.num_tokens
            self.num_padded_rows += found.inputs.num_rows
        tokens, eos, errors = SampledTokens(ids=sampler.last_ids[:count]), self._runner.config.eos_token_ids, {}
        free = without_grammars(requests)
        if all(_plain(request) for request in free):
            if found is None and count:
                sampler.last_ids[:count] = ops.sample(sampler.logits[:count]).ids
        elif sampler.takes(free):
            tokens = sampler.sample(step, free, before)
            self.replayed = (*self.replayed, *sampler.replayed) if self.replayed and sampler.replayed else ()
        else:
            rows = sampled_rows(step, requests, before)
            tokens, errors, free = ask(sampler.logits, rows, eos), errors_of(rows), requests
            sampler.last_ids[:count] = tokens.ids
        if free is not requests:
            errors = choose_again(sampler, tokens, step, requests, before=before, eos_token_ids=eos)
        chosen = chosen_logits(sampler.logits, tokens.ids)
        return GraphLaunched(step, tokens, requests, chosen, begun, errors, self._exchange, scores)

    def rows_of(self, step: Step) -> int:
        """See `StepRunner.rows_of`. No graph is looked for where nobody puts rows by their padding."""
        if not self._has_peers:
            return step.num_tokens
        found = self._find(step, PeerRows(0, (step.num_prefill_tokens,)))
        return step.num_tokens if found is None else found.rows

    def _find(self, step: Step, peers: PeerRows) -> Bucket | None:
        """The smallest captured step that this one fits; None for what is launched kernel by kernel."""
        # A graph keeps the logits of sampled rows only. Experts without a slot ask the host about anybody's prompts.
        if self.eager or step.scored or (not self._captures_prompts and any(peers.prompts)):
            return None
        size = Bucket.of(step) if step.chunks or not self._has_peers else Bucket(width=0)
        if size is None:
            return None
        return self._steps.find(size, peers.most if self._has_peers else 0)

    def _eager(self, step: Step) -> list[SampledTokens]:
        """Logits of the sampled rows, and what `score` finds; tokens unknown to the host come from the step before."""
        if not step.chunks:
            self._runner.forward(step)
            self._drain()
            return []
        self.num_eager += 1
        plan = self._backend.plan(step)
        row, rows, feed = step.num_prefill_tokens, [], []
        for chunk in step.decode:
            if chunk.fed is not None:
                assert chunk.num_tokens == 1, "drafts are fed by nobody yet"
                rows.append(row)
                feed.append(chunk.fed)
            row += chunk.num_tokens
        if rows:
            index = to_device(torch.tensor([rows, feed]), self._backend.device)
            plan.token_ids[index[0]] = self._sampler.last_ids[index[1]]
        model = self._runner.model
        hidden = model.hidden(plan)
        self._drain()
        model.sampled(hidden, plan, out=self._sampler.logits[: plan.num_sampled])
        return score(model.head, hidden, step, whole=True) if step.scored else []

    def _drain(self) -> None:
        """Where only the host can end what a device waits for, that is over before the step's last launches."""
        # Also of a graph: whatever the host does behind it may wait for the device, where nobody watches peers.
        if not self._exchange.captures or self._of_epoch is not None:
            self._exchange.drain()


def _plain(request: Request) -> bool:
    """Whether the largest logit is all it wants."""
    p = request.sampling
    edits = edits_logits(p) or len(request.output) < p.min_tokens
    return p.temperature == 0 and p.logprobs is None and not edits


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory that is on its way."""
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
