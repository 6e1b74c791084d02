"""Runs steps on a GPU: most as CUDA graphs, the others kernel by kernel. Results are read when they arrive.

A step has Q rows per sequence: one row decodes, several verify drafts. Prompts run as chunks in the same step; in a
model that drafts they run alone. A launch does not wait for the step. Its tokens and drafts stay on the device, where
the next step reads the ones that the host does not know yet (`Chunk.fed`); copies go to the host. In a model that
drafts, the host waits for steps with prompts or with recomputed positions (`Runner.settle`).
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from moeyard_kernels.backend import StepBackend, StepPlan
from moeyard_kernels.types.sampling import SampledTokens
from moeyard_kernels.types.sending import to_device
from moeyard_kernels.types.step_size import StepSize
from moeyard_worker.engine.sampling.sampling import Yielded, chosen_logits, feed
from moeyard_worker.engine.sampling.scoring import score, warm_scoring
from moeyard_worker.engine.sampling.step_sampler import StepSampler
from moeyard_worker.engine.steps.graphs import CapturedStep, StepGraphs, smallest
from moeyard_worker.engine.steps.in_flight import InFlight, LaunchedStep, Routed, Verified
from moeyard_worker.engine.steps.programs import ACCEPT, IDLE_DRAFT, MODEL, StepPrograms, draft_part
from moeyard_worker.engine.steps.runner import Launched, Runner
from moeyard_worker.engine.steps.sizes import (
    CHUNKS,
    DECODING,
    DRAFTING,
    MAX_PROMPT,
    below,
    decode_sizes,
    listed,
    prompt_sizes,
    with_agreed_rows,
    with_peers,
)
from moeyard_worker.exchange.base import PeerRows
from moeyard_worker.layers.routing import StepRouting
from moeyard_worker.models.decoder import Load
from moeyard_worker.models.spec import ModelSpec
from moeyard_worker.scheduling.request import Request
from moeyard_worker.scheduling.step import Chunk, Step

log = logging.getLogger(__name__)

# Row counts at which kernels of eager prompts are warmed up.
_WARM = (64, 256, 1024, 2048)


class GpuRunner:
    """A runner on a GPU.

    `max_sequences` bounds the sequences of a step, `max_pages` the pages of each, `max_prompt` the prompt rows of a
    step. Each sequence has up to `num_drafts` drafts; if `adaptive`, each step chooses how many. `captures_prompts`:
    steps with prompts need nothing from the host. They run eagerly if the backend cannot capture them. `num_replayed`
    and `num_eager` count steps; `num_rows` counts the rows of replayed steps, `num_padded_rows` the same with padding.

    With `ExchangeTraits.graphs_per_epoch`, each size is captured at its first use in an epoch, and only without
    prompts, because the host must read the counts of prompt rows.
    """

    def __init__(
        self,
        runner: Runner,
        backend: StepBackend,
        *,
        max_sequences: int,
        max_pages: int,
        max_prompt: int,
        num_drafts: int = 0,
        adaptive: bool = False,
        captures_prompts: bool = True,
    ) -> None:
        exchange, config = runner.exchange, runner.config
        self._runner, self._backend, self._exchange = runner, backend, exchange
        self._max_sequences, self._max_pages, self._max_prompt = max_sequences, max_pages, max_prompt
        self._per_epoch, self._has_peers = exchange.traits.graphs_per_epoch, exchange.traits.pads_peers
        # Whether a rank captures steps in which a peer has prompts, and the most prompt rows that it captures itself.
        self._captures_prompts = captures_prompts and not self._per_epoch
        replays_prompts = self._captures_prompts and (not num_drafts or exchange.traits.local)
        replays_prompts = replays_prompts and backend.captures_prompts
        self._max_captured_prompt = min(max_prompt, MAX_PROMPT) if replays_prompts else 0
        # A step has one row per sequence, or as many as the step before drafted.
        self._queries = range(1, 2 + num_drafts) if adaptive else sorted({1, 1 + num_drafts})
        self._drafts = num_drafts > 0
        self._sampler = StepSampler(
            backend,
            max_rows=max_sequences * (1 + num_drafts) + CHUNKS,
            max_requests=max_sequences + (0 if num_drafts else CHUNKS),
            vocab=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            verifies=self._drafts,
        )
        self._programs = StepPrograms(
            runner,
            backend,
            self._sampler,
            max_sequences=max_sequences,
            num_drafts=num_drafts,
            max_prompt=self._max_captured_prompt,
        )
        self._graphs = StepGraphs(self._programs, exchange, backend)
        self.num_replayed = self.num_eager = self.num_rows = self.num_padded_rows = 0
        # If set, every step is launched kernel by kernel.
        self.eager = False
        # Graphs of the last step without drafts, in order; empty if a part of it was launched eagerly.
        self.replayed: tuple[torch.cuda.CUDAGraph, ...] = ()

    def release(self) -> None:
        """Free all captured steps. This runner launches no more."""
        self._graphs.release()
        self._sampler.release()
        self._exchange.steps.release_graphs = lambda: None

    def overwrite(self, spec: ModelSpec, load: Load) -> None:
        """Load other dense weights to the addresses that captured steps read. No step may be in flight."""
        self._runner.overwrite(spec, load)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the dense weights in memory, by names of their places."""
        return self._runner.weights()

    def sizes(self) -> Iterator[StepSize]:
        """Yield the size of every step that is captured."""
        sequences, pages = self._max_sequences, self._max_pages
        ladder = DRAFTING if self._drafts else DECODING
        own = [*decode_sizes(ladder, max_sequences=sequences, max_pages=pages, queries=self._queries)]
        if limit := self._max_captured_prompt:
            beside = 0 if self._drafts else sequences
            own += prompt_sizes(max_sequences=beside, max_pages=pages, max_prompt=limit, flat=self._backend.flat)
        if self._per_epoch:
            return with_agreed_rows(own, self._exchange.traits.row_sizes)
        return with_peers(own) if self._has_peers else iter(own)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture steps of all sizes, or run each size once if graphs last one epoch; log the sizes."""
        begun, sizes = time.perf_counter(), [*self.sizes()]
        if self._drafts:
            sampled = sorted({size.rows for size in sizes if size.decode})
        else:
            sampled = below(DECODING.sequences, self._max_sequences)
        if not self._per_epoch:
            # Prompts that ask the host about missing experts, or that it plans, cannot be compiled ahead.
            ahead = self._captures_prompts and self._backend.captures_prompts
            prompts = self._warm_runs() if ahead else ()
            self._backend.compile_ahead(self._rehearsal(chain(prompts, self._graphs.runs(sizes)), sampled))
        for run in self._warm_runs():
            run()
        pool = self._graphs.prepare(sizes)
        if self._per_epoch:
            # Steps with more rows than peers agree on run eagerly.
            agreed = max(self._exchange.traits.row_sizes, default=0)
            for rows in below(DECODING.sequences, self._max_sequences):
                if rows > agreed:
                    self._graphs.run(StepSize(sequences=rows, width=self._max_pages, peers=rows))
        with self._backend.without_collection():
            self._sampler.capture(sampled, pool)
        num_graphs = sum(len(step.graphs) for step in self._graphs.captured.values()) + self._sampler.num_graphs
        seconds = time.perf_counter() - begun
        log.info("%s", listed(self._graphs.captured, num_graphs=num_graphs, seconds=seconds))
        if self._per_epoch:
            agreed_rows = ", ".join(map(str, self._exchange.traits.row_sizes)) or "no"
            log.info("other graphs are captured at first use: without prompts, for %s rows of a rank", agreed_rows)

    def _rehearsal(
        self, steps: Iterator[Callable[[], object]], sampled: Sequence[int]
    ) -> Iterator[Callable[[], object]]:
        """Yield the runs for `compile_ahead`: steps through one layer of each kind, then choices of tokens."""
        with self._runner.model.one_layer_of_each_kind():
            yield from steps
        yield from self._sampler.runs(sampled)
        # Release what the last rehearsed step holds.
        self._exchange.steps.set_rows(PeerRows(0))

    def _warm_runs(self) -> Iterator[Callable[[], object]]:
        """Yield the launches of eager steps."""
        model, sizes = self._runner.model, {size for size in (*_WARM, self._max_prompt) if size <= self._max_prompt}
        if not self._drafts and self._max_captured_prompt and self._exchange.traits.capturable:
            # Captured sizes are compiled by their own warm-up run.
            sizes = {size for size in sizes if size > MAX_PROMPT}
        for size in sorted(sizes, reverse=True):
            speculation = self._runner.speculation if self._drafts else None
            if not self._backend.captures_prompts:
                plan = self._backend.plan(self._prompt_of(size))
                # Gates do not count rows without an entry.
                plan.entries.fill_(-1)
                self._exchange.steps.set_rows(PeerRows(plan.num_rows))
                yield partial(self._run if speculation is None else speculation.warm, plan)
                continue
            keys = size if self._backend.flat else 0
            self._exchange.steps.set_rows(PeerRows(size))
            step = self._programs(StepSize(prompt=size, chunks=CHUNKS, keys=keys, width=self._max_pages))
            yield step.parts[MODEL] if speculation is None else partial(speculation.warm, step.state.inputs)
        row = torch.zeros(1, self._runner.config.hidden_width, dtype=self._runner.dtype, device=self._backend.device)
        yield partial(warm_scoring, self._backend, model.head, row)
        if self._drafts:
            yield self._sampler.warm

    def _prompt_of(self, num_rows: int) -> Step:
        """Return a prompt of at most `num_rows` rows in the first pages and the first slot, which hold nothing yet."""
        page_size = self._backend.page_size
        rows = min(num_rows, self._max_pages * page_size)
        pages, slot = range(-(-rows // page_size)), 0 if self._runner.config.has_slots else -1
        chunk = Chunk(
            key=(b"", ""),
            start=0,
            token_ids=(0,) * rows,
            pages=tuple(pages),
            state_slot=slot,
            prompt=True,
            num_sampled=1,
        )
        return Step(prefill=(chunk,))

    def _run(self, plan: StepPlan) -> None:
        """Launch the model over a plan with one sampled row, and the choice of its token."""
        model = self._runner.model
        logits = self._sampler.logits[:1]
        model.sampled(model.hidden(plan), plan, out=logits)
        self._backend.sample(logits)

    def rows_of(self, step: Step) -> int:
        """Return the most rows, with padding, that a step brings to its exchanges. Padding only matters to exchanges
        that place rows by it."""
        if not self._has_peers:
            return step.num_tokens
        found = self._find(step, PeerRows(0, (step.num_prefill_tokens,)))
        return step.num_tokens if found is None else found.rows

    def _find(self, step: Step, peers: PeerRows) -> StepSize | None:
        """Return the smallest captured size that holds this step, or None if the step runs eagerly."""
        # A graph computes the logits of sampled rows only. Streamed experts need the host in every rank's prompt step.
        if self.eager or step.scored or (not self._captures_prompts and any(peers.prompts)):
            return None
        if any(chunk.num_sampled != chunk.num_tokens for chunk in step.decode):
            return None
        size = StepSize.of(step) if step.chunks or not self._has_peers else StepSize(width=0)
        return None if size is None else smallest(self._graphs.sizes, size, peers.most if self._has_peers else 0)

    @torch.inference_mode()
    def launch(
        self,
        step: Step,
        requests: Sequence[Request],
        *,
        before: LaunchedStep | None,
        num_drafts: int = 0,
        peers: PeerRows | None = None,
    ) -> LaunchedStep:
        """See `Runner.launch`. Returns before the step has run, except for prompts of a model that drafts."""
        assert self._drafts or not num_drafts, "drafts need a layer that makes them"
        peers = peers or PeerRows(self.rows_of(step), (step.num_prefill_tokens,))
        size = self._find(step, peers)
        found = None if size is None else self._graphs.step(size)
        if self._drafts and (found is None or step.prefill):
            return self._settled(step, requests, found, before=before, num_drafts=num_drafts, peers=peers)
        if found is None or self._per_epoch:
            self._exchange.steps.set_rows(peers)
        begun = torch.cuda.Event(enable_timing=True)
        begun.record()
        scores, verified = list[SampledTokens](), None
        if found is None:
            scores = self._eager(step)
        else:
            self._replay(found, step, before)
            verified = found.inputs.verified
        tokens, errors = self._sampler.choose(
            step, requests, before=before, verified=verified, greedy=found is not None
        )
        graphs = () if found is None or self._drafts else (found.graphs[MODEL],)
        self.replayed = (*graphs, *self._sampler.replayed) if graphs and self._sampler.replayed is not None else ()
        each = 1 if verified is None else verified.size.queries
        chosen = _to_host(chosen_logits(self._sampler.logits, self._sampler.last_ids[: len(step.sampled) * each]))
        # Copy before another replay: the sampler's graphs share memory with intermediate results of other graphs.
        tokens, blocks = tokens.each(_to_host), [block.each(_to_host) for block in scores]
        # Before the next step overwrites them.
        routed = None if self._runner.routing is None else self._routed(self._runner.routing, step, found)
        left = None
        if self._drafts and found is not None:
            left = self._draft(found, step, requests, num_drafts)
        launched = InFlight(
            step,
            requests,
            tokens=tokens,
            chosen=chosen,
            places=_places(step, each) if self._drafts else None,
            errors=errors,
            scores=blocks,
            verified=left,
            routed=routed,
            begun=begun,
            exchange=self._exchange,
        )
        if verified is not None:
            self._sampler.count_accepted(launched, self._programs.accepted, each)
        return launched

    def _routed(self, routing: StepRouting, step: Step, found: CapturedStep | None) -> Routed:
        """Copy the experts of a launched step to the host, with the rows of a graph that belong to the step."""
        if found is None:
            return Routed(ids=_to_host(routing.rows(step.num_tokens)), rows=range(step.num_tokens))
        inputs = found.inputs
        each = 1 if inputs.verified is None else inputs.verified.size.queries
        decode = (inputs.num_prompt + place for place in _places(step, each))
        return Routed(ids=_to_host(routing.rows(inputs.num_rows)), rows=[*range(step.num_prefill_tokens), *decode])

    def _replay(self, found: CapturedStep, step: Step, before: Yielded | None) -> None:
        if step.chunks:
            # After a settled step the device holds no tokens, so the host supplies them.
            found.inputs.fill(_known(step, before) if isinstance(before, Launched) else step)
        found.graphs[MODEL].replay()
        if self._per_epoch:
            self._exchange.steps.replayed()
            self._drain()
        self.num_replayed += 1
        self.num_rows += step.num_tokens
        self.num_padded_rows += found.inputs.num_rows

    def _draft(self, found: CapturedStep, step: Step, requests: Sequence[Request], num_drafts: int) -> Verified:
        """Count the accepted tokens and draft behind them. A rank without rows only takes part in the passes."""
        drawn = any(request.sampling.temperature for request in requests)
        num_passes = min(num_drafts, self._programs.num_passes)
        if not step.chunks:
            parts = [IDLE_DRAFT] * num_passes
        else:
            parts = [draft_part(drawn, number) for number in range(1, num_passes + 1)] or [ACCEPT]
        for part in parts:
            found.graphs[part].replay()
        state = self._programs.tails.state[: len(step.decode)]
        verified = found.inputs.verified
        read = state if verified is None else verified.read[: len(step.decode)]
        return Verified(read=_to_host(read), state=_to_host(state), num_drafts=num_drafts)

    def _settled(
        self,
        step: Step,
        requests: Sequence[Request],
        found: CapturedStep | None,
        *,
        before: LaunchedStep | None,
        num_drafts: int,
        peers: PeerRows,
    ) -> Launched:
        """Run a step of a model that drafts whose tokens and drafts the host chooses."""
        if found is None:
            self.num_eager += bool(step.chunks)
            return self._runner.launch(step, requests, before=before, num_drafts=num_drafts, peers=peers)
        self._replay(found, step, None)
        inputs, hidden = found.inputs, found.program.state.hidden
        assert hidden is not None, "the model's part leaves its states"
        return self._runner.settle(
            step,
            step,
            requests,
            plan=inputs,
            hidden=hidden,
            logits=self._sampler.logits[: inputs.num_sampled],
            before=before,
            num_drafts=num_drafts,
            most_rows=peers.most,
        )

    def _eager(self, step: Step) -> list[SampledTokens]:
        """Compute the logits of the sampled rows, and scores. The device feeds tokens that the host does not know."""
        if not step.chunks:
            self._runner.forward(step)
            self._drain()
            return []
        self.num_eager += 1
        plan = self._backend.plan(step)
        row, rows, fed = step.num_prefill_tokens, [], []
        for chunk in step.decode:
            if chunk.fed is not None:
                assert chunk.num_tokens == 1, "a model without drafts feeds one token"
                rows.append(row)
                fed.append(chunk.fed)
            row += chunk.num_tokens
        if rows:
            index = to_device(torch.tensor([rows, fed]), self._backend.device)
            plan.token_ids[index[0]] = self._sampler.last_ids[index[1]]
        model = self._runner.model
        hidden = model.hidden(plan)
        self._drain()
        model.sampled(hidden, plan, out=self._sampler.logits[: plan.num_sampled])
        return score(self._backend, model.head, hidden, step, whole=True) if step.scored else []

    def _drain(self) -> None:
        """Wait for the exchange where only the host can end the device's wait, before the step's last launches."""
        # Graphs too: the host may later wait for the device while no one watches for lost peers.
        if not self._exchange.traits.capturable or self._per_epoch:
            self._exchange.steps.drain()


def _places(step: Step, each: int) -> list[int]:
    """Return the rows of a step within a graph that has `each` rows per sequence."""
    return [b * each + row for b, chunk in enumerate(step.decode) for row in range(chunk.num_tokens)]


def _known(step: Step, before: Yielded) -> Step:
    return replace(step, decode=tuple(replace(chunk, fed=None) for chunk in feed(step, before).decode))


def _to_host(x: torch.Tensor) -> torch.Tensor:
    """Return a pinned copy of x; the transfer is asynchronous."""
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
