"""A server's steps over given samples: one rank, the server's backend, and no scheduler.

Prompts are one step and outputs another, so prompt positions use the prompt formula and output positions the decode
formula. Chunks, batches and caches change no bit of a server, so these are the bits of every server.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from moeyard.torch.formula import routing_weights
from moeyard.torch.sample import Sample
from moeyard_kernels.backend import Backend, ExpertGate, StepPlan
from moeyard_kernels.types.gate import Chosen
from moeyard_kernels.types.layers import GateLayer
from moeyard_worker.checkpoint.loading import CheckpointWeights
from moeyard_worker.engine.assembly.local import runner_of
from moeyard_worker.engine.sampling.scoring import score
from moeyard_worker.exchange.base import PeerRows
from moeyard_worker.layers.routing import StepRouting
from moeyard_worker.models.spec import ModelSpec
from moeyard_worker.scheduling.step import Chunk, Scoring, Step

# Log-probabilities of each sample's output, fp32 [tokens], and the experts that its rows chose, int64 [tokens - 1, MoE
# layers, top_k].
Results = tuple[list[torch.Tensor], list[torch.Tensor]]


def run_samples(
    samples: Sequence[Sample],
    spec: ModelSpec,
    *,
    backend: Backend,
    weights: Callable[[Backend], CheckpointWeights],
    dtype: torch.dtype,
    max_rows: int,
) -> Results:
    """Return the results of all samples as a server of `dtype` computes them, in steps of at most `max_rows` rows or of
    one sample. `weights` gives the model's weights for a backend."""
    logprobs, routed = [], []
    groups = list(_grouped(samples, max_rows))
    with torch.inference_mode(), _few_threads(backend.device):
        run = _Run(groups, spec, backend=backend, weights=weights, dtype=dtype)
        for group in groups:
            found = run.group(group)
            logprobs += found[0]
            routed += found[1]
    # Inference tensors cannot take part in autograd.
    return [each.clone() for each in logprobs], [each.clone() for each in routed]


def _grouped(samples: Sequence[Sample], max_rows: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    for sample in samples:
        if group and sum(each.num_rows for each in group) + sample.num_rows > max_rows:
            yield group
            group = []
        group.append(sample)
    yield group


@contextmanager
def _few_threads(device: torch.device) -> Iterator[None]:
    """In this context, torch uses two threads at most on a CPU: with more, bits depend on the batch."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(min(before, 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    """A rank without peers that has room for any of `groups`."""

    def __init__(
        self,
        groups: Sequence[Sequence[Sample]],
        spec: ModelSpec,
        *,
        backend: Backend,
        weights: Callable[[Backend], CheckpointWeights],
        dtype: torch.dtype,
    ) -> None:
        config = spec.config
        self._page_size, self._has_slots = backend.page_size, config.has_slots
        self._routed_layers = list(config.routed_layers)
        self._replay = _ReplayingBackend(backend)
        backend = cast(Backend, self._replay)
        self._routing = StepRouting(
            config.routed_layers,
            max_rows=max(sum(sample.num_rows for sample in group) for group in groups),
            top_k=config.top_k,
            id_bytes=config.expert_id_bytes,
            device=backend.device,
        )
        self._runner = runner_of(
            weights(backend),
            spec,
            backend=backend,
            dtype=dtype,
            num_pages=max(sum(self._num_pages(sample) for sample in group) for group in groups),
            num_state_slots=max(map(len, groups)) if self._has_slots else 0,
            routing=self._routing,
        )

    def _num_pages(self, sample: Sample) -> int:
        return -(-sample.num_rows // self._page_size)

    def group(self, group: Sequence[Sample]) -> Results:
        """Return the results of one group."""
        chunks, page = [], 0
        for i, sample in enumerate(group):
            count = self._num_pages(sample)
            chunk = Chunk(
                key=(b"", str(i)),
                start=0,
                token_ids=tuple(sample.prompt),
                pages=tuple(range(page, page + count)),
                state_slot=i if self._has_slots else -1,
                prompt=True,
                num_sampled=0,
                scoring=Scoring(first=len(sample.prompt) - 1, targets=tuple(sample.output[:1]), num_top=0),
            )
            chunks.append(chunk)
            page += count
        logprobs, routed = self._step(group, Step(prefill=tuple(chunks)))
        outputs = [
            replace(
                chunk,
                start=len(sample.prompt),
                token_ids=tuple(sample.output[:-1]),
                prompt=False,
                scoring=Scoring(first=0, targets=tuple(sample.output[1:]), num_top=0),
            )
            for chunk, sample in zip(chunks, group, strict=True)
        ]
        # An output of one token has no row.
        longer = [i for i, sample in enumerate(group) if len(sample.output) > 1]
        if longer:
            rest = self._step([group[i] for i in longer], Step(decode=tuple(outputs[i] for i in longer)))
            for i, more, ids in zip(longer, *rest, strict=True):
                logprobs[i], routed[i] = torch.cat((logprobs[i], more)), torch.cat((routed[i], ids))
        return logprobs, routed

    def _step(self, group: Sequence[Sample], step: Step) -> Results:
        """Return the results of a step with one scored chunk per sample."""
        runner, model = self._runner, self._runner.model
        self._replay.given = self._given(group, step)
        runner.exchange.steps.set_rows(PeerRows(step.num_tokens, (step.num_prefill_tokens,)))
        hidden = model.hidden(runner.backend.plan(step))
        # As in `Runner.settle`: on a GPU every new size selects another kernel.
        blocks = score(runner.backend, model.head, hidden, step, whole=hidden.device.type != "cpu")
        logprobs = torch.cat([cast(torch.Tensor, block.logprobs) for block in blocks])
        # The next step overwrites the rows.
        routed = self._routing.rows(step.num_tokens).long()
        counts = [len(chunk.scoring.targets) for chunk in step.chunks if chunk.scoring is not None]
        return list(logprobs.split(counts)), list(routed.split([chunk.num_tokens for chunk in step.chunks]))

    def _given(self, group: Sequence[Sample], step: Step) -> torch.Tensor | None:
        """Return the given experts of the step's rows, [rows, MoE layers, top_k], -1 where a sample has none."""
        if all(sample.routed_experts is None for sample in group):
            return None
        parts, shape = [], self._routing.rows(1).shape[1:]
        for sample, chunk in zip(group, step.chunks, strict=True):
            if (routed := sample.routed_experts) is None:
                parts.append(torch.full((chunk.num_tokens, *shape), -1))
            else:
                rows = routed[chunk.start : chunk.start + chunk.num_tokens]
                parts.append(rows[:, self._routed_layers].long().cpu())
        return torch.cat(parts).to(self._runner.backend.device)


class _ReplayingBackend:
    """A backend whose gates choose the experts in `given` [rows, MoE layers, top_k], if there are any; -1 leaves the
    choice to the gate. A row whose own choice is the given one keeps the bits of its weights."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._num_gates = backend, 0
        self.given: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def gate(self, layer: GateLayer) -> "_ReplayingGate":
        """Return the gate of the next MoE layer: a decoder makes them in order."""
        self._num_gates += 1
        return _ReplayingGate(self, self._backend.gate(layer), layer, self._num_gates - 1)


class _ReplayingGate:
    def __init__(self, owner: _ReplayingBackend, gate: ExpertGate, layer: GateLayer, index: int) -> None:
        self._owner, self._gate, self._layer, self._index = owner, gate, layer, index
        self.computes_shared = gate.computes_shared

    def choose(self, x: torch.Tensor, plan: StepPlan, *, defer: bool) -> Chosen:
        chosen, given, count = self._gate.choose(x, plan, defer=defer), self._owner.given, plan.num_tokens
        if given is None:
            return chosen
        own = chosen.ids[:count]
        ids = torch.where(given[:, self._index] < 0, own, given[:, self._index])
        differs = (ids != own).any(1, keepdim=True)
        if not differs.any():
            return chosen
        weight = self._layer.weight
        logits = self._owner.linear(x[:count].to(weight.data.dtype), weight).float()
        weights = torch.where(differs, routing_weights(logits, ids, self._layer.rule), chosen.weights[:count])
        return replace(
            chosen,
            ids=torch.cat((ids, chosen.ids[count:])),
            weights=torch.cat((weights, chosen.weights[count:])),
        )
