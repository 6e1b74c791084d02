"""Sampling of a step's rows on a GPU, by fixed sequences of launches over logits in one buffer.

One copy before each step fills the tensors of all parameters (temperature, cuts, seed, position, penalties). Only rows
with a grammar need the host: their mask depends on the token before, which reaches the host when the step before ends.
The step itself starts then, so the host has the time of the forward pass. These rows are chosen again, and their
neighbours do not wait.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any

import numpy as np
import torch

from moeyard_kernels.backend import StepBackend, VerifiedRows
from moeyard_kernels.types.sampling import MAX_TOP, LogitEdits, SampledTokens
from moeyard_kernels.types.sending import to_device
from moeyard_worker.engine.sampling.edit_counts import NOW, Counted, EditCounts
from moeyard_worker.engine.sampling.sampling import (
    Yielded,
    edits_logits,
    errors_of,
    feed,
    penalties_of,
    sample_logits,
    sampled_rows,
    seed_bits,
)
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.request import Request
from moeyard_worker.scheduling.step import Chunk, Step


@dataclass(frozen=True, slots=True)
class SamplingChain:
    """The launches that a step's rows need: cuts are top-k, top-p and min-p; edits are biases and penalties."""

    cuts: bool
    edits: bool
    logprobs: bool


# Rows with edits always use the chain with cuts.
_CHAINS = tuple(
    SamplingChain(cuts, edits, logprobs)
    for cuts, edits in ((False, False), (True, False), (True, True))
    for logprobs in (False, True)
)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The sampled chunks of a step and their requests; `before`: the step that it was planned on."""

    chunks: Sequence[Chunk]
    requests: Sequence[Request]
    before: Yielded | None
    verified: VerifiedRows | None

    @property
    def each(self) -> int:
        return 1 if self.verified is None else self.verified.size.queries

    def num_output(self, i: int) -> int:
        """Return how many output tokens precede the first sampled row of a chunk, given its planned start."""
        return self.chunks[i].end - self.chunks[i].num_sampled + 1 - len(self.requests[i].prompt)


class StepSampler:
    """Samples up to `max_rows` rows of `logits` [max_rows, V] fp32, which steps write; chosen ids go to `last_ids`.

    Up to `max_requests` requests at once may have biases or penalties. `verifies`: sequences have several rows, which
    verify drafts; such rows with edits are chosen again by separate launches.
    """

    def __init__(
        self,
        backend: StepBackend,
        *,
        max_rows: int,
        max_requests: int,
        vocab: int,
        eos_token_ids: tuple[int, ...],
        verifies: bool = False,
    ) -> None:
        self._backend, self._vocab, self._eos, self._verifies = backend, vocab, eos_token_ids, verifies
        device = backend.device
        self.logits = torch.zeros(max_rows, vocab, dtype=torch.float32, device=device)
        self.last_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        wide, long = (torch.float64, (max_rows,)), (torch.int64, (max_rows,))
        self._staging = backend.staging(
            {
                **dict.fromkeys(("temperature", "top_p", "min_p"), wide),
                "penalties": (torch.float64, (max_rows, 3)),
                **dict.fromkeys(("top_k", "seeds", "positions", "slots"), long),
            },
            # A step with edited rows fills it twice.
            stages=4,
        )
        self._counts = EditCounts(max_requests=max_requests, vocab=vocab, eos_token_ids=eos_token_ids, device=device)
        self._graphs: dict[SamplingChain, list[tuple[int, torch.cuda.CUDAGraph, SampledTokens]]] = {}
        # Edited sequences whose accepted tokens are not counted yet: their indices, slots and rows.
        self._uncounted: tuple[torch.Tensor, torch.Tensor, list[tuple[Counted, int]]] | None = None
        # The graphs of the last choice; None if it was launched eagerly.
        self.replayed: tuple[torch.cuda.CUDAGraph, ...] | None = ()
        # A chain runs before the first step.
        self._fill([], [], [])

    def capture(self, rows: Iterable[int], pool: Any) -> None:
        """Capture every chain for each number of rows."""
        for chain in self._chains():
            graphs = list[tuple[int, torch.cuda.CUDAGraph, SampledTokens]]()
            for count in sorted(rows, reverse=True):
                run = partial(self._run, chain, count)
                graphs.append((count, *self._backend.capture(run, pool, ahead=not graphs)))
            self._graphs[chain] = sorted(graphs, key=lambda found: found[0])

    def runs(self, rows: Iterable[int]) -> Iterator[Callable[[], object]]:
        """Yield the launches that `capture` captures."""
        return (partial(self._run, chain, count) for chain, count in product(self._chains(), rows))

    def _chains(self) -> list[SamplingChain]:
        return [chain for chain in _CHAINS if not (chain.edits and self._verifies)]

    def release(self) -> None:
        """Free all captured graphs."""
        self._graphs.clear()
        self.replayed = None

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return sum(map(len, self._graphs.values()))

    def warm(self) -> None:
        """Compile the kernels that choose edited rows again, with a row that no edit changes."""
        none, off = torch.zeros(1, dtype=torch.int64, device=self._backend.device), self._counts.bias[0, 0, :1]
        penalties = torch.stack((off + 1, off, off), 1)
        edits = LogitEdits(words=self._counts.words[:1], bias=self._counts.bias[0, :1], slots=none, penalties=penalties)
        one = {"temperature": off + 1, "top_p": off + 1, "min_p": off, "seeds": none, "top_k": none, "positions": none}
        for arguments, logprobs in product(({}, one), (None, self._num_top)):
            self._backend.sample(self.logits[:1], edits=edits, logprobs=logprobs, **arguments)

    @property
    def _num_top(self) -> int:
        return min(MAX_TOP, self._vocab)

    def choose(
        self,
        step: Step,
        requests: Sequence[Request],
        *,
        before: Yielded | None,
        verified: VerifiedRows | None = None,
        greedy: bool = True,
    ) -> tuple[SampledTokens, dict[int, str]]:
        """Choose tokens for all sampled rows of a step, from the first rows of `logits`, without waiting for them.

        Sequence b has rows b * Q + j of `verified`, or one row. `greedy`: `last_ids` holds the argmax of the logits.
        Waits for `before` if a grammar needs its tokens, or if a penalty counts tokens that are not on the device. The
        returned tokens belong to the sampler until the next replay; `errors_of` the step's rows come with them. With
        edits, `count_accepted` must follow if drafts are verified.
        """
        rows = _Sampled(step.sampled, requests, before, verified)
        edited, on_host = self._edited(rows)
        separate = on_host if verified is None else edited + on_host
        params = [request.sampling for request in requests]
        for i in separate:
            params[i] = _cheapest(params[i])
        self.replayed = ()
        if (edited and verified is None) or any(p.temperature or p.logprobs is not None for p in params):
            if verified is None:
                self._fill(params, [chunk.end for chunk in rows.chunks], self._slots(rows, edited))
            else:
                params = [p for p in params for _ in range(rows.each)]
                self.set_params(params)
                self._staging.on_device["positions"][: len(params)] = verified.positions.flatten()[: len(params)] + 1
            tokens = self._chosen(params, edits=verified is None and bool(edited))
        else:
            count = len(params) * rows.each
            if not greedy and count:
                self.last_ids[:count] = self._backend.sample(self.logits[:count]).ids
            tokens = SampledTokens(ids=self.last_ids[:count])
        if edited and verified is not None:
            self._choose_edited(rows, verified, edited, tokens)
        errors = self._choose_on_host(rows, on_host, tokens) if on_host else {}
        if separate and verified is not None and any(request.sampling.temperature for request in requests):
            # Drafts are sampled with the same parameters as the tokens.
            self.set_params([request.sampling for request in requests for _ in range(rows.each)])
        return tokens, errors

    def _edited(self, rows: _Sampled) -> tuple[list[int], list[int]]:
        """Return the requests whose logits are edited: on the device, and with the host's help."""
        edited, on_host = list[int](), list[int]()
        for i, request in enumerate(rows.requests):
            p = request.sampling
            if request.constraint is not None:
                on_host.append(i)
            elif edits_logits(p) or rows.num_output(i) < p.min_tokens:
                (edited if self._counts.takes(p) else on_host).append(i)
        return edited, on_host

    def _counted(self, rows: _Sampled, edited: Sequence[int]) -> list[Counted]:
        here = {rows.requests[i].key for i in edited}
        return [self._counts.up_to_date(rows.chunks[i], rows.requests[i], here, rows.before) for i in edited]

    def _slots(self, rows: _Sampled, edited: Sequence[int]) -> list[int]:
        slots = [-1] * len(rows.chunks)
        for i, found in zip(edited, self._counted(rows, edited), strict=True):
            self._counts.hold(found, rows.num_output(i) < found.sampling.min_tokens)
            # The chain counts the token that it chooses.
            found.num_output += 1
            slots[i] = found.slot
        return slots

    def _choose_edited(
        self, rows: _Sampled, verified: VerifiedRows, edited: Sequence[int], tokens: SampledTokens
    ) -> None:
        some, found = [rows.requests[i] for i in edited], self._counted(rows, edited)
        count, each, device = len(edited), rows.each, self._backend.device
        params = [request.sampling for request in some]
        whole = [[*edited], [counted.slot for counted in found], [len(request.prompt) for request in some]]
        whole += [[p.min_tokens for p in params], [seed_bits(p.seed) for p in params], [p.top_k for p in params]]
        exact = [(p.temperature, p.top_p, p.min_p, *penalties_of(p)) for p in params]
        real = to_device(torch.tensor(exact, dtype=torch.float64), device)
        where, slots, num_prompt, min_tokens, seeds, top_k = to_device(torch.tensor(whole), device)
        numbers = torch.arange(each, device=device)
        positions = verified.start[where][:, None] + numbers + 1
        places = (where[:, None] * each + numbers).flatten()
        held = (positions - num_prompt[:, None] < min_tokens[:, None]).long()
        words, bias = self._counts.rows(slots, verified.tokens[where], held)
        penalties = real[:, 3:].repeat_interleave(each, 0).contiguous()
        edits = LogitEdits(words=words, bias=bias, slots=torch.arange(count * each, device=device), penalties=penalties)
        arguments: dict[str, torch.Tensor] = {}
        if any(p.temperature for p in params):
            one = (("temperature", real[:, 0]), ("top_p", real[:, 1]), ("min_p", real[:, 2]), ("seeds", seeds))
            arguments = {name: x.repeat_interleave(each) for name, x in (*one, ("top_k", top_k))}
            arguments["positions"] = positions.flatten()
        logprobs = self._num_top if any(p.logprobs is not None for p in params) else None
        self._uncounted = where, slots, list(zip(found, edited, strict=True))
        chosen = self._backend.sample(self.logits[places], edits=edits, logprobs=logprobs, **arguments)
        self._put(tokens, places, chosen)

    def count_accepted(self, launch: Yielded, accepted: torch.Tensor, each: int) -> None:
        """Count the first accepted[b] of `each` tokens of every edited sequence of the step that `launch` runs."""
        if self._uncounted is None:
            return
        where, slots, found = self._uncounted
        self._uncounted = None
        count = self.last_ids.shape[0] // each
        ids, accepted = self.last_ids[: count * each].view(count, each)[where], accepted[where]
        for row in range(each):
            self._counts.add(slots, ids[:, row], (row < accepted).int() * LogitEdits.ONCE)
        for counted, place in found:
            counted.launches.append((launch, place))

    def _choose_on_host(self, rows: _Sampled, on_host: Sequence[int], tokens: SampledTokens) -> dict[int, str]:
        """Choose again for rows that need the host; wait for the step before. Return `errors_of` the step's rows."""
        some = tuple(rows.chunks[i] for i in on_host)
        sampled = sampled_rows(feed(Step(decode=some), rows.before), [rows.requests[i] for i in on_host], rows.before)
        # The sequence of each row, and its place in it.
        named = [(i, row) for i, chunk in zip(on_host, some, strict=True) for row in range(chunk.num_sampled)]
        where = to_device(torch.tensor([i * rows.each + row for i, row in named]), self._backend.device)
        self._put(tokens, where, sample_logits(self._backend, self.logits[where], sampled, self._eos))
        firsts = [*accumulate((chunk.num_sampled for chunk in rows.chunks), initial=0)]
        return {firsts[named[k][0]] + named[k][1]: error for k, error in errors_of(sampled).items()}

    def _put(self, tokens: SampledTokens, where: torch.Tensor, chosen: SampledTokens) -> None:
        """Write the tokens of the rows `where` into `tokens`. Alternatives stay, because they depend on the logits
        only."""
        tokens.ids[where] = self.last_ids[where] = chosen.ids
        if chosen.logprobs is not None:
            assert tokens.logprobs is not None, "tokens with log-probabilities were chosen for all rows"
            assert tokens.ranks is not None, "tokens with log-probabilities were chosen for all rows"
            assert chosen.ranks is not None, "log-probabilities come with ranks"
            tokens.logprobs[where], tokens.ranks[where] = chosen.logprobs, chosen.ranks

    def set_params(self, params: Sequence[SamplingParams]) -> None:
        """Copy the parameters of rows to the device, without positions."""
        self._fill(params, [0] * len(params), [-1] * len(params))

    def params_of(self, count: int, stride: int) -> dict[str, torch.Tensor]:
        """Return `count` rows of `set_params`, `stride` apart, as arguments of `sample` for a capture."""
        on = self._staging.on_device
        names = ("temperature", "seeds", "top_k", "top_p", "min_p")
        return {name: on[name][: count * stride : stride].contiguous() for name in names}

    def _chosen(self, params: Sequence[SamplingParams], *, edits: bool) -> SampledTokens:
        cuts = edits or any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params)
        chain = SamplingChain(cuts=cuts, edits=edits, logprobs=any(p.logprobs is not None for p in params))
        graphs, count = self._graphs.get(chain), len(params)
        if not graphs or graphs[-1][0] < count:
            self.replayed = None
            return self._run(chain, count)
        _, graph, tokens = graphs[bisect.bisect_left(graphs, count, key=lambda found: found[0])]
        graph.replay()
        self.replayed = (graph,)
        return tokens.each(lambda x: x[:count])

    def _run(self, chain: SamplingChain, count: int) -> SampledTokens:
        on = {name: tensor[:count] for name, tensor in self._staging.on_device.items()}
        arguments = {name: on[name] for name in ("temperature", "seeds", "positions")}
        if chain.cuts:
            arguments |= {name: on[name] for name in ("top_k", "top_p", "min_p")}
        edits = None
        if chain.edits:
            counts = self._counts
            edits = LogitEdits(words=counts.words, bias=counts.bias[NOW], slots=on["slots"], penalties=on["penalties"])
        logprobs = self._num_top if chain.logprobs else None
        tokens = self._backend.sample(self.logits[:count], edits=edits, logprobs=logprobs, **arguments)
        if edits is not None:
            # Rows without a slot add 0, to any word.
            once = (edits.slots >= 0).int() * LogitEdits.ONCE
            self._counts.add(edits.slots.clamp(min=0), tokens.ids, once)
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
        host["penalties"][:count] = [penalties_of(p) for p in params] or np.zeros((0, 3))
        host["slots"][:count], host["slots"][count:] = slots, -1
        self._staging.send()


def _cheapest(p: SamplingParams) -> SamplingParams:
    """Return the cheapest parameters: greedy, with the same alternatives, which do not depend on the choice."""
    return SamplingParams(max_tokens=p.max_tokens, temperature=0.0, logprobs=p.logprobs)
