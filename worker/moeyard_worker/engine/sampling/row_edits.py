"""Penalties, biases and minimum lengths of rows that verify drafts, on a GPU without the host.

A row's edits are of the tokens before it: those that its request is known to have put out, and the drafts that the row
counts on. The former are counted on the device, a row of counts per request, written once from its prompt and output
and from then on kept by the steps themselves; the latter are added for each row. So a step need not wait for the tokens
of the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.verify_inputs import VerifyInputs
from moeyard_kernels.types.logit_edits import LogitEdits
from moeyard_kernels.types.sampled_tokens import MAX_TOP, SampledTokens
from moeyard_kernels.types.sending import copy_to, to_device
from moeyard_worker.engine.sampling.device_sampler import MAX_BIASES, DeviceSampler
from moeyard_worker.engine.sampling.sampling import Yielded, bias_of, edit_words, seed_bits
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.request import Request
from moeyard_worker.scheduling.step import Chunk, RequestKey


@dataclass(slots=True)
class _Counted:
    """A request's row: of `num_output` tokens, and of those that `launches` accepted, each with its place there."""

    slot: int
    sampling: SamplingParams
    num_output: int
    launches: list[tuple[Yielded, int]] = field(default_factory=list)


class RowEdits:
    """Of up to `max_requests` requests at once."""

    def __init__(
        self, *, max_requests: int, vocab: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:  # fmt: skip
        self._vocab, self._eos, self._device = vocab, eos_token_ids, device
        self._words = torch.zeros(max_requests, vocab, dtype=torch.int32, device=device)
        # While tokens are not held back, and while they are.
        self._bias = torch.zeros(2, max_requests, MAX_BIASES, dtype=torch.float64, device=device)
        self._counted: dict[RequestKey, _Counted] = {}
        self._now: tuple[torch.Tensor, torch.Tensor, list[tuple[_Counted, int]]] | None = None

    def warm(self, logits: torch.Tensor) -> None:
        """Have the kernels compiled that choose with edits, by a row of logits [1, V] that none changes."""
        none, off = torch.zeros(1, dtype=torch.int64, device=self._device), self._bias[0, 0, :1]
        penalties = torch.stack((off + 1, off, off), 1)
        edits = LogitEdits(words=self._words[:1], bias=self._bias[0, :1], slots=none, penalties=penalties)
        one = {"temperature": off + 1, "top_p": off + 1, "min_p": off, "seeds": none, "top_k": none, "positions": none}
        for arguments, logprobs in product(({}, one), (None, min(MAX_TOP, self._vocab))):
            ops.sample(logits, edits=edits, logprobs=logprobs, **arguments)

    def takes(self, p: SamplingParams) -> bool:
        """Whether there is room for what a request adds to its logits."""
        return len(p.logit_bias) + len(p.stop_token_ids) + len(self._eos) <= MAX_BIASES

    def choose(
        self, chunks: Sequence[Chunk], requests: Sequence[Request], *, places: Sequence[int], before: Yielded | None,
        inputs: VerifyInputs, sampler: DeviceSampler,
    ) -> tuple[torch.Tensor, SampledTokens]:  # fmt: skip
        """Tokens of all rows of these sequences, whose places in the step are given, and where the rows are.

        Waits for the step before only where a request's tokens are not on the device yet. `keep` must follow.
        """
        here = {request.key for request in requests}
        found = [self._up_to_date(c, r, here, before) for c, r in zip(chunks, requests, strict=True)]
        count, each = len(places), inputs.size.queries
        params = [request.sampling for request in requests]
        whole = [
            list(places), [each.slot for each in found], [len(r.prompt) for r in requests],
            [p.min_tokens for p in params], [seed_bits(p.seed) for p in params], [p.top_k for p in params],
        ]  # fmt: skip
        exact = [
            [p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.frequency_penalty, p.presence_penalty]
            for p in params
        ]
        real = to_device(torch.tensor(exact, dtype=torch.float64), self._device)
        where, slots, num_prompt, min_tokens, seeds, top_k = to_device(torch.tensor(whole), self._device)
        numbers = torch.arange(each, device=self._device)
        positions = inputs.start[where][:, None] + numbers + 1
        rows = (where[:, None] * each + numbers).flatten()
        held = (positions - num_prompt[:, None] < min_tokens[:, None]).long()
        edits = LogitEdits(
            words=self._words_of(slots, inputs.tokens[where]).view(count * each, self._vocab),
            bias=self._bias[held, slots[:, None]].view(count * each, MAX_BIASES),
            slots=torch.arange(count * each, device=self._device),
            penalties=real[:, 3:].repeat_interleave(each, 0).contiguous(),
        )
        arguments: dict[str, Any] = {}
        if any(p.temperature for p in params):
            one = (("temperature", real[:, 0]), ("top_p", real[:, 1]), ("min_p", real[:, 2]), ("seeds", seeds))
            arguments = {name: x.repeat_interleave(each) for name, x in (*one, ("top_k", top_k))}
            arguments["positions"] = positions.flatten()
        logprobs = min(MAX_TOP, self._vocab) if any(p.logprobs is not None for p in params) else None
        self._now = where, slots, list(zip(found, places, strict=True))
        return rows, ops.sample(sampler.logits[rows], edits=edits, logprobs=logprobs, **arguments)

    def _words_of(self, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[B, Q, V]: of each row the counts of its request, and of the drafts among tokens [B, Q] up to the row's own.

        Token 0 of a sequence is known, and counted already.
        """
        count, each = tokens.shape
        words = self._words[slots][:, None].repeat(1, each, 1)
        for row in range(1, each):
            index = tokens[:, row, None, None].expand(count, each - row, 1)
            words[:, row:].scatter_add_(2, index, torch.full_like(index, LogitEdits.ONCE, dtype=torch.int32))
        return words

    def keep(self, launch: Yielded, ids: torch.Tensor, accepted: torch.Tensor) -> None:
        """Count what a launch accepts: the first accepted[b] of ids [B, Q] of every sequence of the step."""
        assert self._now is not None, "chosen before"
        where, slots, found = self._now
        self._now = None
        ids, accepted = ids[where], accepted[where]
        for row in range(ids.shape[1]):
            once = (row < accepted).int() * LogitEdits.ONCE
            self._words.view(-1).scatter_add_(0, slots * self._vocab + ids[:, row], once)
        for counted, place in found:
            counted.launches.append((launch, place))

    def _up_to_date(self, chunk: Chunk, request: Request, here: set[RequestKey], before: Yielded | None) -> _Counted:
        """The request's row, with all tokens before the chunk's first sampled row in it."""
        # Of a fed chunk the least start: it counts on one token of the step before.
        num_output, found = chunk.start + 1 - len(request.prompt), self._counted.get(request.key)
        if found is not None and found.sampling is request.sampling:
            flying = found.launches[-1:] if found.launches and found.launches[-1][0] is before else []
            for launch, place in found.launches[: len(found.launches) - len(flying)]:
                found.num_output += len(launch.results[place].token_ids)
            found.launches = flying
            if found.num_output + (chunk.fed is not None) == num_output and bool(flying) == (chunk.fed is not None):
                return found
        return self._count(chunk, request, here, before)

    def _count(self, chunk: Chunk, request: Request, here: set[RequestKey], before: Yielded | None) -> _Counted:
        """Write a request's row from all its tokens."""
        output: Sequence[int] = request.output
        if chunk.fed is not None:
            assert before is not None, "a fed chunk has a step before it"
            output = [*output, *before.results[chunk.fed].token_ids]
        p, known = request.sampling, self._counted.pop(request.key, None)
        found = _Counted(known.slot if known is not None else self._free(here), p, len(output))
        self._counted[request.key] = found
        held = bias_of(p, held=True, eos_token_ids=self._eos, vocab=self._vocab)
        words = edit_words(p, held, request.prompt, output, self._vocab)
        copy_to(self._words[found.slot], words)
        free = bias_of(p, held=False, eos_token_ids=self._eos, vocab=self._vocab)
        both = torch.tensor([[free.get(token, 0.0) for token in held], list(held.values())], dtype=torch.float64)
        copy_to(self._bias[:, found.slot, : len(held)], both)
        return found

    def _free(self, here: set[RequestKey]) -> int:
        """A slot that no request of this step has: there are as many as sequences."""
        if len(self._counted) < self._words.shape[0]:
            return min(set(range(self._words.shape[0])) - {c.slot for c in self._counted.values()})
        return self._counted.pop(next(key for key in self._counted if key not in here)).slot
