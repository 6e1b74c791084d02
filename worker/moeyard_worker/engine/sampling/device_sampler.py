"""Tokens of a step's rows on a GPU, without the host: fixed chains of launches over logits in one place.

What a row asks for (temperature, cuts, seed, position, penalties) is in tensors that one copy fills before a step. The
tokens that a request's penalties count stay on the device: a row of counts per request, written once from its prompt
and output and from then on kept by the chain itself, so that a step need not wait for the tokens of the one before.
"""

import bisect
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.staging import Staging
from moeyard_kernels.types.logit_edits import LogitEdits
from moeyard_kernels.types.sampled_tokens import MAX_TOP, SampledTokens
from moeyard_kernels.types.sending import copy_to
from moeyard_worker.engine.sampling.sampling import Yielded, bias_of, edit_words, edits_logits, seed_bits
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.request import Request
from moeyard_worker.scheduling.step import Chunk, RequestKey, Step

_T = TypeVar("_T")
# Biased tokens of a request for which the device has room; OpenAI's API allows 300. More are edited on the host.
MAX_BIASES = 512


@dataclass(frozen=True, slots=True)
class Chain:
    """Which launches a step's rows need: cuts are top-k, top-p and min-p, edits are bias and penalties."""

    cuts: bool
    edits: bool
    logprobs: bool


CHAINS = tuple(
    Chain(cuts, edits, logprobs)
    for cuts, edits in ((False, False), (True, False), (True, True))
    for logprobs in (False, True)
)


@dataclass(slots=True)
class _Counted:
    """A request's row of counts: how many output tokens are in it, and whether tokens are held back for now."""

    slot: int
    sampling: SamplingParams
    num_output: int
    held: bool


@contextmanager
def nothing_collected() -> Iterator[None]:
    """A graph of an engine that is no more, destroyed by the collector during a capture, would spoil that."""
    gc.collect()
    with _no_collection():
        yield


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def captured(run: Callable[[], _T], pool: Any, *, ahead: bool = True) -> tuple[torch.cuda.CUDAGraph, _T]:
    """What `run` launches, as a graph with its memory from `pool`, and what it returned.

    `ahead`: it runs once before that, for what only a first run makes. Otherwise kernels that are new are compiled and
    loaded while it is captured, which CUDA lets a thread do that asks for it ("relaxed"): half of the time.
    """
    if ahead:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, pool=pool, stream=_capturing(torch.cuda.current_device()), capture_error_mode="relaxed"
    ):
        result = run()
    return graph, result


def captured_meanwhile(run: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """What `run` launches, as `captured` has it, while steps are served: nothing is waited for, and no memory that the
    host or the device keeps at hand is given back. Raises what `run` raises; then no graph is left."""
    graph, side = torch.cuda.CUDAGraph(), _capturing(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with _no_collection(), torch.cuda.stream(side):
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # boundary: what was half captured may not end as it should
                graph.capture_end()
            graph.reset()
            raise
        graph.capture_end()
    return graph


@cache
def _capturing(device: int) -> torch.cuda.Stream:
    """The stream of all captures on a device: memory of a pool goes from one to the next only there. Torch's own is one
    for all devices, and takes its own device with it, which is another where a process has changed to a second one."""
    return torch.cuda.Stream(device)


class DeviceSampler:
    """Samples up to `max_rows` rows of `logits` [max_rows, V] fp32, which steps write; chosen ids go to `last_ids`.

    `max_edited`: of how many requests tokens are counted, as many as rows if None.
    """

    def __init__(
        self, *, max_rows: int, vocab: int, eos_token_ids: tuple[int, ...], device: torch.device,
        max_edited: int | None = None,
    ) -> None:  # fmt: skip
        self._vocab, self._eos = vocab, eos_token_ids
        self.logits = torch.zeros(max_rows, vocab, dtype=torch.float32, device=device)
        self.last_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        wide, long = (torch.float64, (max_rows,)), (torch.int64, (max_rows,))
        self._staging = Staging(
            {"temperature": wide, "top_p": wide, "min_p": wide, "penalties": (torch.float64, (max_rows, 3)),
             "top_k": long, "seeds": long, "positions": long, "slots": long},
            # A step whose rows are edited tells it twice.
            device, stages=4,
        )  # fmt: skip
        num_slots = max_rows if max_edited is None else max_edited
        self._words = torch.zeros(num_slots, vocab, dtype=torch.int32, device=device)
        self._bias = torch.zeros(num_slots, MAX_BIASES, dtype=torch.float64, device=device)
        self._counted: dict[RequestKey, _Counted] = {}
        self._graphs: dict[Chain, list[tuple[int, torch.cuda.CUDAGraph, SampledTokens]]] = {}
        # The graph that chose last; none if that was launched.
        self.replayed: tuple[torch.cuda.CUDAGraph, ...] = ()
        # Rows of nothing: a chain runs before there is a step.
        self._fill([], [], [])

    def capture(self, rows: Iterable[int], pool: Any) -> None:
        """Capture every chain for each number of rows."""
        for chain in self._chains():
            graphs = list[tuple[int, torch.cuda.CUDAGraph, SampledTokens]]()
            for count in sorted(rows, reverse=True):
                graphs.append((count, *captured(partial(self._run, chain, count), pool, ahead=not graphs)))
            self._graphs[chain] = sorted(graphs, key=lambda found: found[0])

    def runs(self, rows: Iterable[int]) -> Iterator[Callable[[], object]]:
        """What `capture` captures."""
        return (partial(self._run, chain, count) for chain, count in product(self._chains(), rows))

    def _chains(self) -> list[Chain]:
        return [chain for chain in CHAINS if not chain.edits or len(self._words)]

    @property
    def num_graphs(self) -> int:
        """How many were captured."""
        return sum(map(len, self._graphs.values()))

    def takes(self, requests: Sequence[Request]) -> bool:
        """Whether the device has room for what these requests add to their logits."""
        params = (request.sampling for request in requests)
        return all(len(p.logit_bias) + len(p.stop_token_ids) + len(self._eos) <= MAX_BIASES for p in params)

    def sample(self, step: Step, requests: Sequence[Request], before: Yielded | None) -> SampledTokens:
        """Choose for `step.sample_rows`, whose logits are the first rows of `logits`; without waiting for them.

        The tensors are the sampler's own, good until the next call. `before` is waited for only where a request's
        penalties count tokens that are not on the device yet.
        """
        chunks = step.sampled
        assert all(chunk.num_sampled == 1 for chunk in chunks), "drafts are proposed by nobody yet"
        count = len(chunks)
        slots = self._slots(chunks, requests, before)
        params = [request.sampling for request in requests]
        self._fill(params, [chunk.end for chunk in chunks], slots)
        edits = any(slot >= 0 for slot in slots)
        chain = Chain(
            # Edits have no chain without cuts.
            cuts=edits or any(_cuts(p) for p in params),
            edits=edits,
            logprobs=any(p.logprobs is not None for p in params),
        )
        return self._choose(chain, count)

    def sample_rows(self, params: Sequence[SamplingParams], positions: torch.Tensor) -> SampledTokens:
        """Choose for the first len(params) rows of `logits`, none of which edits them, whose tokens will sit at
        `positions` [len(params)], known to the device alone."""
        count = len(params)
        self.ask(params)
        self._staging.on_device["positions"][:count] = positions
        cuts, logprobs = any(_cuts(p) for p in params), any(p.logprobs is not None for p in params)
        return self._choose(Chain(cuts=cuts, edits=False, logprobs=logprobs), count)

    def ask(self, params: Sequence[SamplingParams]) -> None:
        """Bring what rows ask for to the device, but for their positions."""
        self._fill(params, [0] * len(params), [-1] * len(params))

    def asked(self, count: int, stride: int) -> dict[str, torch.Tensor]:
        """Of `count` rows, `stride` apart, what `ask` brought, as arguments of `ops.sample`; to be captured."""
        on = self._staging.on_device
        names = ("temperature", "seeds", "top_k", "top_p", "min_p")
        return {name: on[name][: count * stride : stride].contiguous() for name in names}

    def _choose(self, chain: Chain, count: int) -> SampledTokens:
        graphs = self._graphs.get(chain)
        self.replayed = ()
        if not graphs or graphs[-1][0] < count:
            return self._run(chain, count)
        _, graph, tokens = graphs[bisect.bisect_left(graphs, count, key=lambda found: found[0])]
        graph.replay()
        self.replayed = (graph,)
        return tokens.each(lambda x: x[:count])

    def _run(self, chain: Chain, count: int) -> SampledTokens:
        on = {name: tensor[:count] for name, tensor in self._staging.on_device.items()}
        arguments = {name: on[name] for name in ("temperature", "seeds", "positions")}
        if chain.cuts:
            arguments |= {name: on[name] for name in ("top_k", "top_p", "min_p")}
        edits = None
        if chain.edits:
            edits = LogitEdits(words=self._words, bias=self._bias, slots=on["slots"], penalties=on["penalties"])
        logprobs = min(MAX_TOP, self._vocab) if chain.logprobs else None
        tokens = ops.sample(self.logits[:count], edits=edits, logprobs=logprobs, **arguments)
        if edits is not None:
            # Rows without a slot add nothing, to whatever word.
            places = edits.slots.clamp(min=0) * self._vocab + tokens.ids
            self._words.view(-1).scatter_add_(0, places, (edits.slots >= 0).int() * LogitEdits.ONCE)
        self.last_ids[:count] = tokens.ids
        return tokens

    def _fill(self, params: Sequence[SamplingParams], positions: Sequence[int], slots: Sequence[int]) -> None:
        host, count = self._staging.begin(), len(params)
        for name in ("temperature", "top_p", "min_p", "top_k"):
            host[name][:count] = [getattr(p, name) for p in params]
            host[name][count:] = 0
        host["top_p"][count:] = 1
        host["seeds"][:count] = [seed_bits(p.seed) for p in params]
        host["positions"][:count] = positions
        host["penalties"][:count] = [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params
        ] or np.zeros((0, 3))
        host["slots"][:count], host["slots"][count:] = slots, -1
        self._staging.send()

    def _slots(self, chunks: Sequence[Chunk], requests: Sequence[Request], before: Yielded | None) -> list[int]:
        """Where each row's counts are, up to date with the tokens before it; -1 for a row without edits."""
        here = {request.key for request in requests}
        slots = []
        for chunk, request in zip(chunks, requests, strict=True):
            p, num_output = request.sampling, chunk.end - len(request.prompt)
            held = num_output < p.min_tokens
            if not edits_logits(p) and not held:
                slots.append(-1)
                continue
            found = self._counted.get(request.key)
            if found is None or found.sampling is not p or found.num_output != num_output:
                found = self._count(chunk, request, num_output, held, here, before)
            elif found.held != held:
                self._hold(found.slot, p, held)
            found.held, found.num_output = held, num_output + 1
            slots.append(found.slot)
        return slots

    def _count(
        self, chunk: Chunk, request: Request, num_output: int, held: bool, here: set[RequestKey],
        before: Yielded | None,
    ) -> _Counted:  # fmt: skip
        """Write a request's row of counts from all its tokens."""
        output: Sequence[int] = request.output
        if chunk.fed is not None:
            assert before is not None, "a fed chunk has a step before it"
            output = [*output, *before.results[chunk.fed].token_ids]
        assert len(output) == num_output, f"{len(output)} output tokens known of {num_output}"
        known = self._counted.pop(request.key, None)
        slot = known.slot if known is not None else self._free(here)
        found = self._counted[request.key] = _Counted(slot, request.sampling, num_output, held)
        bias = self._biases(request.sampling, True)
        words = edit_words(request.sampling, bias, request.prompt, output, self._vocab)
        copy_to(self._words[slot], words)
        self._hold(slot, request.sampling, held)
        return found

    def _hold(self, slot: int, params: SamplingParams, held: bool) -> None:
        """A request's biases: of tokens held back for now, or no longer, too."""
        now = self._biases(params, held)
        values = [now.get(token, 0.0) for token in self._biases(params, True)]
        copy_to(self._bias[slot, : len(values)], torch.tensor(values, dtype=torch.float64))

    def _biases(self, params: SamplingParams, held: bool) -> dict[int, float]:
        return bias_of(params, held=held, eos_token_ids=self._eos, vocab=self._vocab)

    def _free(self, here: set[RequestKey]) -> int:
        """A slot that no request of this step has: there are as many as rows."""
        if len(self._counted) < self._words.shape[0]:
            return min(set(range(self._words.shape[0])) - {c.slot for c in self._counted.values()})
        return self._counted.pop(next(key for key in self._counted if key not in here)).slot


def _cuts(p: SamplingParams) -> bool:
    return p.top_k > 0 or p.top_p < 1 or p.min_p > 0
