"""Runs steps on one rank: takes a `Step` and returns the results of its sampled chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from moeyard_kernels.backend import Backend, StepPlan
from moeyard_worker.engine.sampling.sampling import (
    SampledRow,
    Yielded,
    accepted,
    choose,
    chosen_logits,
    errors_of,
    feed,
    sampled_rows,
    unsound,
)
from moeyard_worker.engine.sampling.scoring import Scores, read_scores, score, unsound_scores
from moeyard_worker.engine.steps.drafting import BlockSpeculation, Speculation, tails_of
from moeyard_worker.exchange.base import Exchange, PeerRows
from moeyard_worker.layers.moe import Experts
from moeyard_worker.layers.overwriting import compare, overwrite, tensors
from moeyard_worker.layers.routing import StepRouting
from moeyard_worker.models.decoder import Decoder, Load, Use
from moeyard_worker.models.dspark import BlockDrafter
from moeyard_worker.models.mtp import Drafter
from moeyard_worker.models.spec import ModelSpec
from moeyard_worker.scheduling.request import Accepted, Request
from moeyard_worker.scheduling.step import Chunk, Step
from moeyard_worker.state.pools import allocate


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step that runs or has run: `results[i]` belongs to `step.sampled[i]`, `scores[i]` to `step.scored[i]`.

    `unsound`: ids of requests with non-finite logits. `experts`: those that all rows chose, if they are wanted.
    """

    step: Step
    results: list[Accepted]
    scores: Scores = field(default_factory=list)
    experts: bytes = b""
    unsound: tuple[str, ...] = ()
    device_seconds: float | None = None
    waited: float = 0.0

    def has_run(self) -> bool:
        """Return True: this step has finished."""
        return True


class Loaded(NamedTuple):
    """A model with its dense weights, and what makes drafts with it."""

    model: Decoder
    speculation: Speculation | BlockSpeculation | None


class Runner:
    """A model with its dense weights and state on one rank.

    `load` gives the dense weights; `experts` computes the rows that the exchange delivers. The runner owns both.
    `routing` receives the experts that rows choose, if requests may want them. `max_sequences` bounds the sequences of
    a step (None: its rows do).
    """

    model: Decoder
    speculation: Speculation | BlockSpeculation | None

    def __init__(
        self,
        spec: ModelSpec,
        *,
        load: Load,
        backend: Backend,
        exchange: Exchange,
        experts: Experts,
        dtype: torch.dtype,
        num_pages: int,
        num_state_slots: int = 0,
        max_sequences: int | None = None,
        routing: StepRouting | None = None,
    ) -> None:
        self.config, self._max_sequences = spec.config, max_sequences
        self.page_size = page_size = backend.page_size
        self.backend = backend
        self.dtype = dtype
        self.exchange, self.routing = exchange, routing
        self._experts = experts
        # The state of each layer, which outlives the weights.
        self._state: dict[int, dict[str, torch.Tensor]] = {}
        self._sizes = {"num_pages": num_pages, "page_size": page_size, "num_slots": num_state_slots}
        self.use(self.assemble(spec, load))

    def _arrays(self, layer: int) -> dict[str, torch.Tensor]:
        """Return the state arrays of a layer, allocated once."""
        if layer not in self._state:
            state, device = self.config.attention[layer].state(), self.backend.device
            self._state[layer] = allocate(state, **self._sizes, dtype=self.dtype, device=device)
        return self._state[layer]

    @torch.inference_mode()
    def assemble(self, spec: ModelSpec, load: Load) -> Loaded:
        """Load dense weights into a model over this rank's state, beside the model in use. Any thread, during steps."""
        model = Decoder(
            spec,
            backend=self.backend,
            load=load,
            exchange=self.exchange,
            experts=self._experts,
            allocate=self._arrays,
            routing=self.routing,
        )
        if spec.draft is None:
            return Loaded(model, None)
        if self.config.block_drafts is not None:
            blocks = BlockSpeculation(
                BlockDrafter(spec, model=model, backend=self.backend, load=load),
                model=model,
                config=self.config,
                backend=self.backend,
                exchange=self.exchange,
                max_sequences=self._max_sequences,
            )
            return Loaded(model, blocks)
        drafter = Drafter(spec, model.more_layers[0], model=model, backend=self.backend, load=load)
        speculation = Speculation(
            drafter,
            model=model,
            backend=self.backend,
            exchange=self.exchange,
            eos_token_ids=self.config.eos_token_ids,
            slots=bool(self.config.attention[-1].state().slots),
        )
        return Loaded(model, speculation)

    def states(self) -> list[torch.Tensor]:
        """Return the state arrays of all layers."""
        return [each for arrays in self._state.values() for each in arrays.values()]

    def drop(self) -> None:
        """Forget the dense weights until `use`. No step may run."""
        del self.model, self.speculation

    def use(self, loaded: Loaded) -> None:
        """Compute with this model from the next step on. Not for captured steps, which hold the addresses of weights:
        see `overwrite`."""
        self.model, self.speculation = loaded.model, loaded.speculation

    @torch.inference_mode()
    def overwrite(self, spec: ModelSpec, load: Load) -> None:
        """Load dense weights into the memory of the present ones, one layer at a time. Call it between steps.

        Raises ValueError if a weight needs memory of another form than the present one.
        """
        self._renew(spec, load, overwrite)

    @torch.inference_mode()
    def compare(self, spec: ModelSpec, load: Load) -> None:
        """Raise ValueError if `overwrite` would. Nothing changes. Any thread may call it during steps.

        `load` may give weights in host memory.
        """
        self._renew(spec, load, compare)

    def _renew(self, spec: ModelSpec, load: Load, use: Use) -> None:
        with self.backend.rebuilding():
            self.model.renew(spec, load, use)
            if self.speculation is not None:
                self.speculation.drafter.renew(spec, load, use)

    @torch.inference_mode()
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the dense weights in memory, by names of their places."""
        states = {each.data_ptr() for arrays in self._state.values() for each in arrays.values()}
        shared = {id(each) for each in (self.backend, self.exchange, self._experts, self.routing)}
        drafter = None if self.speculation is None else self.speculation.drafter
        for each, name in ((self.model, "model"), (drafter, "drafts")):
            for place, tensor in tensors(each, name, shared):
                if tensor.data_ptr() not in states:
                    yield place, tensor
                shared.add(id(tensor))

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """Return fp32 logits [num_sampled padded, V]. Row i belongs to step.sample_rows[i]; padding rows are undefined.
        An empty step returns no row but takes part in every exchange. Raises ExchangeError when a peer is lost."""
        return self.model.forward(self.backend.plan(step))

    def warm_recompute(self) -> None:
        """Compile the kernels that recompute output with several rows per sequence, for models with state per sequence.
        Call it before the first step, while slots and pages are empty."""
        if not self.config.has_slots:
            return
        # Few rows and many rows use different kernels.
        for rows in (2, 5):
            ids = (0,) * rows
            again = Chunk(key=(b"", ""), start=0, token_ids=ids, pages=ids, state_slot=0, prompt=False, num_sampled=1)
            self.exchange.steps.set_rows(PeerRows(rows))
            self.forward(Step(decode=(again,)))
        if self.backend.choices is not None:
            self.backend.choices.clear()

    def rows_of(self, step: Step) -> int:
        """Return the most rows, with padding, that a step brings to its exchanges."""
        return step.num_tokens

    @torch.inference_mode()
    def launch(
        self,
        step: Step,
        requests: Sequence[Request],
        *,
        before: Yielded | None,
        num_drafts: int = 0,
        peers: PeerRows | None = None,
    ) -> Launched:
        """Start a step. `requests[i]` belongs to `step.sampled[i]`; `before` is the launch that the step was planned
        on.

        Draft up to `num_drafts` tokens per sequence; all ranks make the same number of passes. `peers`: the rows that
        ranks bring to the exchanges (None: there is no other rank).

        On this runner the step has run when this returns, and fed rows take their tokens from the results of `before`.
        Raises ExchangeError when a peer is lost.
        """
        peers = peers or PeerRows(step.num_tokens, (step.num_prefill_tokens,))
        self.exchange.steps.set_rows(peers)
        fed = feed(step, before)
        plan = self.backend.plan(fed)
        hidden = self.model.hidden(plan)
        logits = self.model.sampled(hidden, plan)
        return self.settle(
            step,
            fed,
            requests,
            plan=plan,
            hidden=hidden,
            logits=logits,
            before=before,
            num_drafts=num_drafts,
            most_rows=peers.most,
        )

    def settle(
        self,
        step: Step,
        fed: Step,
        requests: Sequence[Request],
        *,
        plan: StepPlan,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        before: Yielded | None,
        num_drafts: int,
        most_rows: int,
    ) -> Launched:
        """Do the rest of `launch`: choose tokens from a step's `logits`, and draft from its `hidden` states.

        `fed` is the step with all its tokens and `plan` the plan that computed it. No rank brings more than `most_rows`
        rows to an exchange of the drafts.
        """
        rows = sampled_rows(fed, requests, before)
        self.exchange.steps.drain()
        chosen = choose(self.backend, logits, rows, self.config.eos_token_ids)
        ids = torch.tensor([token_id for token_id, _ in chosen], dtype=torch.int64)
        found = chosen_logits(logits, ids.to(logits.device))
        results = accepted(fed, chosen, errors_of(rows))
        if num_drafts or isinstance(self.speculation, BlockSpeculation):
            assert self.speculation is not None, "drafts need a layer that makes them"
            tails = tails_of(fed, requests, rows, results)
            self.speculation.draft(tails, fed, plan, hidden, num_passes=num_drafts, most_rows=most_rows)
            results = [tail.drafted() for tail in tails]
        _look_ahead(fed, requests, rows, results)
        # A smaller product is faster on a CPU; on a GPU every new size selects another kernel.
        whole = self.backend.device.type != "cpu"
        scores = (
            read_scores(step, score(self.backend, self.model.head, hidden, step, whole=whole)) if step.scored else []
        )
        bad = unsound(fed, requests, found) + (unsound_scores(step, scores) if scores else ())
        routed = b"" if self.routing is None else as_bytes(self.routing.rows(step.num_tokens).cpu())
        return Launched(step=step, results=results, scores=scores, experts=routed, unsound=tuple(dict.fromkeys(bad)))


def as_bytes(ids: torch.Tensor) -> bytes:
    """Return the ids of experts on the host as bytes, an id of two bytes in little-endian order."""
    data: bytes = ids.numpy().tobytes()
    return data


def _look_ahead(
    step: Step, requests: Sequence[Request], rows: Sequence[SampledRow], results: Sequence[Accepted]
) -> None:
    """Request the next masks now, so that they are computed during the next step."""
    first = 0
    for chunk, request, result in zip(step.sampled, requests, results, strict=True):
        if request.constraint is not None and not request.ended:
            request.constraint.expect([*rows[first].output, *result.token_ids])
        first += chunk.num_sampled
