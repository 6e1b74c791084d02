"""Token counts and biases of requests on the device, for penalties and biases.

A request's row is written once from its prompt and output. Each step then adds the tokens that it chooses, so a step
need not wait for the tokens of the step before.
"""

from dataclasses import dataclass, field

import torch

from moeyard_kernels.types.sampling import LogitEdits
from moeyard_kernels.types.sending import copy_to
from moeyard_worker.engine.sampling.sampling import Yielded, bias_of, edit_words
from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.request import Request
from moeyard_worker.scheduling.step import Chunk, RequestKey

# Biased tokens of a request that fit on the device; OpenAI's API allows 300. Requests with more are edited on the host.
MAX_BIASES = 512
# Rows of `EditCounts.bias`: biases while stop tokens are allowed, while they are held back, and in the current step.
FREE, HELD, NOW = range(3)


@dataclass(slots=True)
class Counted:
    """The row of a request, `slot`, with `num_output` tokens and those that `launches` accept.

    Each launch is paired with the request's index in it. `held`: which biases the current step uses.
    """

    slot: int
    sampling: SamplingParams
    num_output: int
    held: bool | None = None
    launches: list[tuple[Yielded, int]] = field(default_factory=list)

    def settle(self, before: Yielded | None) -> bool:
        """Add the accepted tokens of all launches except `before`, which runs. Return whether `before` counts tokens
        too."""
        runs = self.launches[-1:] if self.launches and self.launches[-1][0] is before else []
        for launch, place in self.launches[: len(self.launches) - len(runs)]:
            self.num_output += len(launch.results[place].token_ids)
        self.launches = runs
        return bool(runs)


class EditCounts:
    """Rows of up to `max_requests` requests at once.

    words: [max_requests, V], as in `LogitEdits`. bias: [3, max_requests, MAX_BIASES].
    """

    def __init__(self, *, max_requests: int, vocab: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._vocab, self._eos = vocab, eos_token_ids
        self.words = torch.zeros(max_requests, vocab, dtype=torch.int32, device=device)
        self.bias = torch.zeros(3, max_requests, MAX_BIASES, dtype=torch.float64, device=device)
        self._counted: dict[RequestKey, Counted] = {}

    def takes(self, p: SamplingParams) -> bool:
        """Return whether the biases of a request fit."""
        return len(p.logit_bias) + len(p.stop_token_ids) + len(self._eos) <= MAX_BIASES

    def up_to_date(self, chunk: Chunk, request: Request, here: set[RequestKey], before: Yielded | None) -> Counted:
        """Return the request's row, which counts all tokens before the chunk's first sampled row. `here` are the
        requests of this step. Waits for `before` only if its tokens are not on the device."""
        # A fed chunk's start assumes one token of the step before.
        num_output, found = chunk.end - chunk.num_sampled + 1 - len(request.prompt), self._counted.get(request.key)
        if found is not None and found.sampling is request.sampling:
            runs = found.settle(before)
            if found.num_output + runs == num_output and (chunk.fed is not None or not runs):
                return found
        return self._count(chunk, request, here, before)

    def _count(self, chunk: Chunk, request: Request, here: set[RequestKey], before: Yielded | None) -> Counted:
        output = request.known_output
        if chunk.fed is not None:
            assert before is not None, "a fed chunk needs the step before"
            output = [*output, *before.results[chunk.fed].token_ids]
        p, known = request.sampling, self._counted.pop(request.key, None)
        found = Counted(known.slot if known is not None else self._free(here), p, len(output))
        self._counted[request.key] = found
        held, free = (bias_of(p, held=each, eos_token_ids=self._eos, vocab=self._vocab) for each in (True, False))
        copy_to(self.words[found.slot], edit_words(p, held, request.prompt, output, self._vocab))
        both = torch.tensor([[free.get(token, 0.0) for token in held], list(held.values())], dtype=torch.float64)
        copy_to(self.bias[FREE:NOW, found.slot, : len(held)], both)
        return found

    def hold(self, found: Counted, held: bool) -> None:
        """Select the biases of the current step: with or without stop tokens held back."""
        if found.held != held:
            found.held = held
            self.bias[NOW, found.slot] = self.bias[HELD if held else FREE, found.slot]

    def _free(self, here: set[RequestKey]) -> int:
        """Return a slot that no request of this step uses; there is one for each request of a step."""
        if len(self._counted) < self.words.shape[0]:
            return min(set(range(self.words.shape[0])) - {c.slot for c in self._counted.values()})
        return self._counted.pop(next(key for key in self._counted if key not in here)).slot

    def rows(self, slots: torch.Tensor, tokens: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return words [B Q, V] and biases [B Q, MAX_BIASES] of rows that read tokens [B, Q], of sequences with `slots`
        [B].

        A row counts its request's tokens, and the drafts up to its own; token 0 of a sequence is already counted.
        `held` [B, Q]: 1 where the sequence is too short to stop.
        """
        count, each = tokens.shape
        words = self.words[slots][:, None].repeat(1, each, 1)
        for row in range(1, each):
            index = tokens[:, row, None, None].expand(count, each - row, 1)
            words[:, row:].scatter_add_(2, index, torch.full_like(index, LogitEdits.ONCE, dtype=torch.int32))
        return words.view(count * each, -1), self.bias[held, slots[:, None]].view(count * each, -1)

    def add(self, slots: torch.Tensor, ids: torch.Tensor, once: torch.Tensor) -> None:
        """Count ids [B] in `slots` [B] where once [B] int32 is `LogitEdits.ONCE` rather than 0."""
        self.words.view(-1).scatter_add_(0, slots * self._vocab + ids, once)
