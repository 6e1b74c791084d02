"""Runs steps on a GPU that verify drafts and make others: those of output rows as graphs, prompts alone as graphs up to
their logits where no peers take part, others launch by launch.

Beside a `GraphRunner` it differs in what a step leaves behind: not one token per sequence but some, of which the device
counts the right ones, and drafts behind them. With two steps in flight the next step finds both there. For steps with
prompts, or with positions that are computed anew, the host waits (`Runner.launch`, `draft_prompts.py`). Where peers
take part each rank runs what its own rows ask for: their exchanges are the same (`draft_graphs.py`).
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from moeyard_kernels.cuda.backend import CudaBackend
from moeyard_kernels.cuda.graph_inputs import Bucket
from moeyard_kernels.cuda.verify_inputs import VerifySize
from moeyard_kernels.types.sampled_tokens import SampledTokens
from moeyard_worker.engine.sampling.constrained import least, put, put_again
from moeyard_worker.engine.sampling.device_sampler import DeviceSampler, nothing_collected
from moeyard_worker.engine.sampling.row_edits import RowEdits
from moeyard_worker.engine.sampling.sampling import (
    Yielded,
    accepted,
    chosen_logits,
    edits_logits,
    errors_of,
    feed,
    sampled_rows,
    tell,
    unsound,
)  # fmt: skip
from moeyard_worker.engine.sampling.scoring import Scores, warm_scoring
from moeyard_worker.engine.steps.captured_sizes import CHUNKS, listed
from moeyard_worker.engine.steps.compile_ahead import compile_ahead, rehearsal
from moeyard_worker.engine.steps.draft_graphs import DraftGraphs, IdleGraphs, SizedGraphs
from moeyard_worker.engine.steps.draft_prompts import PromptGraphs
from moeyard_worker.engine.steps.graph_runner import to_host
from moeyard_worker.engine.steps.in_flight import InFlight
from moeyard_worker.engine.steps.runner import Launched, Runner
from moeyard_worker.exchange.base import Exchange, PeerRows
from moeyard_worker.scheduling.request import Accepted, Request
from moeyard_worker.scheduling.step import Chunk, Step

log = logging.getLogger(__name__)

# Prompt rows by which kernels are chosen.
_WARM = (64, 256, 1024, 2048)


class SpeculatedLaunch(InFlight):
    """A step of output rows that runs. `results` waits for it.

    `places` are the rows of the step among those of its graph, of which `tokens` and `chosen` are, on their way to the
    host; `read` [B, 1 + Q] and `state` are `VerifyInputs.read` and `Tails.state`, still on the device. All drafts that
    were made are told, as the next step reads them: how many are verified is for the scheduler to say.
    """

    def __init__(
        self, step: Step, requests: Sequence[Request], *, tokens: SampledTokens,
        places: Sequence[int], chosen: torch.Tensor, read: torch.Tensor, state: torch.Tensor, num_drafts: int,
        errors: Mapping[int, str], begun: torch.cuda.Event, exchange: Exchange,
    ) -> None:  # fmt: skip
        self.scores: Scores = []
        self._requests, self._errors = requests, errors
        self._places, self._num_drafts = list(places), num_drafts
        self._tokens, self._chosen = tokens, chosen
        self._read, self._state = to_host(read), to_host(state)
        self._results: list[Accepted] | None = None
        super().__init__(step, begun=begun, exchange=exchange)

    @property
    def results(self) -> list[Accepted]:
        """`results[i]` of `step.sampled[i]`."""
        if self._results is None:
            self._wait()
            chunks = [
                self._as_read(chunk, row) for chunk, row in zip(self.step.decode, self._read.tolist(), strict=True)
            ]
            tokens = self._tokens.each(lambda x: x[self._places])
            asked = [r.sampling.logprobs for c, r in zip(chunks, self._requests, strict=True) for _ in c.token_ids]
            found = accepted(replace(self.step, decode=tuple(chunks)), tell(tokens, asked), self._errors)
            self._results = [
                replace(result, drafts=tuple(state[2 : 2 + self._num_drafts]))
                for result, state in zip(found, self._state.tolist(), strict=True)
            ]
        return self._results

    @staticmethod
    def _as_read(chunk: Chunk, row: Sequence[int]) -> Chunk:
        """A chunk with the start and the tokens that the device took."""
        return replace(chunk, start=row[0], token_ids=tuple(row[1 : 1 + chunk.num_tokens]), slack=0)

    @property
    def unsound(self) -> tuple[str, ...]:
        """See `LaunchedStep.unsound`."""
        self._done.synchronize()
        return unsound(self.step, self._requests, self._chosen[self._places])


class SpeculativeRunner:
    """A runner on a GPU whose model drafts.

    Up to `max_sequences` sequences of up to `max_pages` pages, with up to `num_drafts` drafts each, if `adaptive` as
    many as each step likes; `max_prompt` bounds the prompt rows of a step. `captures_prompts` and counts as of a
    `GraphRunner`.
    """

    def __init__(
        self, runner: Runner, backend: CudaBackend, *, max_sequences: int, max_pages: int, max_prompt: int,
        num_drafts: int, adaptive: bool, captures_prompts: bool = True,
    ) -> None:  # fmt: skip
        self._runner, self._backend = runner, backend
        self._captures_prompts = captures_prompts
        self._max_pages, self._max_prompt = max_pages, max_prompt
        self._sampler = DeviceSampler(
            max_rows=max_sequences * (1 + num_drafts), vocab=runner.config.vocab_size,
            eos_token_ids=runner.config.eos_token_ids, device=backend.device, max_edited=0,
        )  # fmt: skip
        # A step without drafts has one row per sequence, another has as many as the step before drafted.
        queries = range(1, 2 + num_drafts) if adaptive else (1, 1 + num_drafts)
        self._graphs = DraftGraphs(
            runner, backend, self._sampler, max_sequences=max_sequences, max_pages=max_pages, num_drafts=num_drafts,
            queries=queries,
        )  # fmt: skip
        sizes = {"max_pages": max_pages, "max_prompt": max_prompt if captures_prompts and runner.exchange.stays else 0}
        self._prompts = PromptGraphs(runner, backend, **sizes, last_ids=self._sampler.last_ids)
        self._edits = RowEdits(
            max_requests=max_sequences, vocab=runner.config.vocab_size, eos_token_ids=runner.config.eos_token_ids,
            device=backend.device,
        )  # fmt: skip
        self.num_replayed = self.num_eager = self.num_rows = self.num_padded_rows = 0
        # While this is set every step is launched kernel by kernel.
        self.eager = False

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture steps of output rows and of prompts alone, and have what else prompts launch compiled; logs which."""
        begun, sampled = time.perf_counter(), sorted({size.rows for size in self._graphs.sizes()})
        # But for prompts that ask the host about experts without a slot.
        prompts = self._warm_runs() if self._captures_prompts else ()
        steps = chain(prompts, self._prompts.runs(), self._graphs.runs())
        compile_ahead(rehearsal(self._runner, steps, self._sampler.runs(sampled)), self._backend.device)
        for run in self._warm_runs():
            run()
        pool = torch.cuda.graph_pool_handle()
        with nothing_collected():
            self._prompts.capture(pool)
            self._graphs.capture(pool)
            self._sampler.capture(sampled, pool)
        sizes = [*self._prompts.sizes()]
        num_graphs = len(sizes) + self._graphs.num_graphs + self._sampler.num_graphs
        seconds = time.perf_counter() - begun
        log.info("%s", listed([*self._graphs.sizes(), *sizes], num_graphs=num_graphs, seconds=seconds))

    def _warm_runs(self) -> Iterator[Callable[[], object]]:
        """What is launched kernel by kernel beside the graphs."""
        model, backend, speculation = self._runner.model, self._backend, self._runner.speculation
        assert speculation is not None, "drafts are made by a layer for that"
        for size in sorted({min(size, self._max_prompt) for size in (*_WARM, self._max_prompt)}, reverse=True):
            bucket = Bucket(prompt=size, keys=size if backend.flat else 0, width=self._max_pages, chunks=CHUNKS)
            self._runner.exchange.expect(PeerRows(size))
            yield partial(speculation.warm, backend.graph_inputs(bucket, self._sampler.last_ids))
        row = torch.zeros(1, self._runner.config.hidden_size, dtype=self._runner.dtype, device=backend.device)
        yield partial(warm_scoring, model.head, row)
        yield partial(self._edits.warm, self._sampler.logits[:1])

    def rows_of(self, step: Step) -> int:
        """See `StepRunner.rows_of`. No graph is looked for where nobody puts rows by their padding."""
        if not self._runner.exchange.places_rows:
            return step.num_tokens
        found = self._find(step, PeerRows(0, (step.num_prefill_tokens,)))
        return step.num_tokens if found is None else found.inputs.size.rows

    @torch.inference_mode()
    def launch(
        self, step: Step, requests: Sequence[Request], *, before: "Launched | SpeculatedLaunch | None",
        num_drafts: int = 0, peers: PeerRows | None = None,
    ) -> "Launched | SpeculatedLaunch":  # fmt: skip
        """See `Runner.launch`; returns before the step has run, if it is captured."""
        peers = peers or PeerRows(self.rows_of(step), (step.num_prefill_tokens,))
        if not step.chunks and (idle := self._find_idle(peers)) is not None:
            return self._take_part(step, idle, num_drafts)
        graphs = self._find(step, peers)
        if graphs is None:
            if not self.eager and (prompts := self._prompts.replay(step)) is not None:
                self.num_replayed += 1
                self.num_rows += step.num_tokens
                self.num_padded_rows += prompts.inputs.num_rows
                return self._runner.settle(
                    step, step, requests, plan=prompts.inputs, hidden=prompts.hidden, logits=prompts.logits,
                    before=before, num_drafts=num_drafts, most_rows=peers.most,
                )  # fmt: skip
            self.num_eager += bool(step.chunks)
            return self._runner.launch(step, requests, before=before, num_drafts=num_drafts, peers=peers)
        begun = torch.cuda.Event(enable_timing=True)
        begun.record()
        graphs.inputs.fill(_known(step, before) if isinstance(before, Launched) else step.decode)
        assert graphs.verify is not None, "captured"
        graphs.verify.replay()
        self.num_replayed += 1
        self.num_rows += step.num_tokens
        self.num_padded_rows += graphs.inputs.num_rows
        sampler, count, each = self._sampler, len(step.decode), graphs.inputs.size.queries
        # Rows with edits are chosen once more; until then they want nothing that costs.
        edited, helped = self._apart(step, requests)
        own = [least(r.sampling) if i in edited or i in helped else r.sampling for i, r in enumerate(requests)]
        params = [p for p in own for _ in range(each)]
        if any(p.temperature or p.logprobs is not None for p in own):
            tokens = sampler.sample_rows(params, graphs.inputs.positions[: count * each] + 1)
        else:
            tokens = SampledTokens(ids=sampler.last_ids[: count * each])
        if edited:
            some = [step.decode[i] for i in edited], [requests[i] for i in edited]
            where, found = self._edits.choose(
                *some, places=edited, before=before, inputs=graphs.inputs, sampler=sampler
            )
            put(sampler, tokens, where, found)
        errors = self._help(step, requests, before, helped, tokens, each) if helped else {}
        drawn = any(request.sampling.temperature for request in requests)
        if drawn and (edited or helped):
            sampler.ask([request.sampling for request in requests for _ in range(each)])
        chosen = to_host(chosen_logits(sampler.logits, sampler.last_ids[: count * each]))
        # Before the next replay: what the sampler's graphs leave shares memory with others' intermediate results.
        tokens = tokens.each(to_host)
        graphs.replay(num_drafts, drawn=drawn)
        launched = SpeculatedLaunch(
            step, requests, tokens=tokens, places=_places(step, each), chosen=chosen,
            read=graphs.inputs.read[:count], state=self._graphs.tails.state[:count], num_drafts=num_drafts,
            errors=errors, begun=begun, exchange=self._runner.exchange,
        )  # fmt: skip
        if edited:
            ids = sampler.last_ids[: graphs.inputs.num_rows].view(-1, each)
            self._edits.keep(launched, ids, self._graphs.tails.state[:, 0])
        return launched

    def _take_part(self, step: Step, idle: IdleGraphs, num_drafts: int) -> SpeculatedLaunch:
        """A step of others."""
        begun = torch.cuda.Event(enable_timing=True)
        begun.record()
        idle.replay(num_drafts)
        self.num_replayed += 1
        ids, state = self._sampler.last_ids[:0], self._graphs.tails.state[:0]
        return SpeculatedLaunch(
            step, (), tokens=SampledTokens(ids=to_host(ids)), places=(), chosen=torch.empty(0), read=state,
            state=state, num_drafts=num_drafts, errors={}, begun=begun, exchange=self._runner.exchange,
        )  # fmt: skip

    def _apart(self, step: Step, requests: Sequence[Request]) -> tuple[list[int], list[int]]:
        """The requests whose logits are edited: here, and with the host's help."""
        edited, helped = list[int](), list[int]()
        for i, (chunk, request) in enumerate(zip(step.decode, requests, strict=True)):
            p = request.sampling
            if request.constraint is not None:
                helped.append(i)
            elif edits_logits(p) or chunk.start + 1 - len(request.prompt) < p.min_tokens:
                (edited if self._edits.takes(p) else helped).append(i)
        return edited, helped

    def _help(
        self, step: Step, requests: Sequence[Request], before: Yielded | None, helped: Sequence[int],
        tokens: SampledTokens, each: int,
    ) -> dict[int, str]:  # fmt: skip
        """Put into `tokens` what grammars let through, waiting for the step before; `errors_of` the step.

        `each`: rows of a sequence in the graph.
        """
        chunks, some = [step.decode[i] for i in helped], [requests[i] for i in helped]
        rows = sampled_rows(feed(Step(decode=tuple(chunks)), before), some, before)
        places = [i * each + row for i, chunk in zip(helped, chunks, strict=True) for row in range(chunk.num_tokens)]
        put_again(self._sampler, tokens, rows, places, self._runner.config.eos_token_ids)
        found = errors_of(rows)
        if not found:
            return {}
        # Of the step's rows these are some.
        numbers = {place: i for i, place in enumerate(_places(step, each))}
        return {numbers[places[i]]: error for i, error in found.items()}

    def _launches(self, peers: PeerRows) -> bool:
        """Whether steps beside such are launched kernel by kernel, whatever they are."""
        # Experts without a slot ask the host about anybody's prompts.
        return self.eager or (not self._captures_prompts and any(peers.prompts))

    def _find_idle(self, peers: PeerRows) -> IdleGraphs | None:
        return None if self._launches(peers) else self._graphs.find_idle(peers.most)

    def _find(self, step: Step, peers: PeerRows) -> SizedGraphs | None:
        """The smallest captured step that this one fits; None for what is launched kernel by kernel."""
        if self._launches(peers) or step.prefill or not step.decode:
            return None
        if any(chunk.num_sampled != chunk.num_tokens for chunk in step.decode):
            return None
        queries = max(chunk.num_tokens for chunk in step.decode)
        width = max(len(chunk.pages) for chunk in step.decode)
        return self._graphs.find(VerifySize(sequences=len(step.decode), queries=queries, width=width), peers.most)


def _places(step: Step, each: int) -> list[int]:
    """Where a graph with `each` rows of every sequence has the rows of a step."""
    return [b * each + row for b, chunk in enumerate(step.decode) for row in range(chunk.num_tokens)]


def _known(step: Step, before: Launched) -> list[Chunk]:
    """The decode chunks as the host has them: such a step before has left nothing on the device."""
    return [replace(chunk, fed=None) for chunk in feed(step, before).decode]
