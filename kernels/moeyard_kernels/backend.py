"""The seam between layers and devices: what a layer may ask of the backend it was built on.

A backend is chosen once, where a worker is assembled. Once a step it makes a plan (padding, page tables, whatever its
kernels want), which layers hand back without looking into it beyond `StepPlan`. Padding rows are the backend's
business: every activation has `num_rows` rows, what the rows from `num_tokens` on hold is finite or never read.

Objects that a backend makes for a layer (`Gate`, `GqaAttend`, `MlaAttend`, `GdnMix`, `ExpertSlots`, ...) keep its
weights and state in the form that the backend's kernels want. H counts hidden, T = num_tokens, K = experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from moeyard_kernels.types.gate import Chosen, GateRule, TokenChoice
from moeyard_kernels.types.layers import GdnLayer, GqaLayer, KdaLayer, MlaLayer
from moeyard_kernels.types.step import StepRows

# What one backend alone offers has its class as its type: steps that are captured, residency that a device decides, and
# counts of chosen experts that a device keeps.
if TYPE_CHECKING:
    import torch

    from moeyard_kernels.cuda.backend import CudaBackend
    from moeyard_kernels.cuda.gate import GateCounts
    from moeyard_kernels.cuda.residency import CudaResidency
    from moeyard_kernels.cuda.step_inputs import StepInputs as StepInputs
    from moeyard_kernels.cuda.verified_rows import VerifiedRows as VerifiedRows
    from moeyard_kernels.peers import Peers
    from moeyard_kernels.types.matrix import Fill, Matrix
    from moeyard_kernels.types.peer_window import PeerWindow
    from moeyard_kernels.types.sampling import SampledTokens
    from moeyard_kernels.types.weight_form import ExpertForm

    StepBackend = CudaBackend
    ExpertResidency = CudaResidency
else:
    StepBackend = ExpertResidency = StepInputs = VerifiedRows = Any

# What a backend makes for itself: callers hand it back without looking into it.
Opaque = Any


class StepPlan(Protocol):
    """One step's rows, as far as all layers may know them. The rest is the backend's own.

    num_tokens: real rows T, of which num_prompt come first. num_rows >= T: rows of every activation.
    token_ids, positions: [num_rows] int64. sample_rows: [num_sampled or more] int64 rows whose logits are wanted; None
    where all are, in order.
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_sampled(self) -> int: ...
    @property
    def token_ids(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def sample_rows(self) -> torch.Tensor | None: ...


class GqaAttend(Protocol):
    """Grouped-query attention of one layer: head norms, rotation, keys and values into their pages, attention."""

    def attend(self, qkv: torch.Tensor, plan: Opaque) -> torch.Tensor:
        """qkv [num_rows, (Hq + 2 Hkv) D] -> [num_rows, Hq D]; all of the step is stored before anything attends."""
        ...


class MlaAttend(Protocol):
    """Latent attention of one layer: rotation, latents into their pages, attention."""

    def attend(self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, plan: Opaque) -> torch.Tensor:
        """q [num_rows, Hq (nope + Dr)], latent [num_rows, R] as `Backend.mla` has it, k_rope [num_rows, Dr] ->
        [num_rows, Hq Dv]."""
        ...


class GdnMix(Protocol):
    """Gated DeltaNet of one layer: convolution, gates, the delta rule over the state in each sequence's slot, norm."""

    def mix(self, x: torch.Tensor, plan: Opaque) -> torch.Tensor:
        """x [num_rows, 2 Hk Dk + 2 Hv Dv + 2 Hv] holds q, k, v, z (the output's gate), b and a -> [num_rows, Hv Dv].

        Positions of a prompt take the chunk formula, those of an output the recurrent one, in order.
        """
        ...


class KdaMix(Protocol):
    """Kimi Delta Attention of one layer: the same, where every row of the state is forgotten at a rate of its own."""

    def mix(self, x: torch.Tensor, plan: Opaque) -> torch.Tensor:
        """x [num_rows, 3 H D + 2 D + H] holds q, k, v, what is narrow of the rates of forgetting and of the output's
        gate, and beta -> [num_rows, H D]."""
        ...


class Gate(Protocol):
    """How one layer's rows choose their experts: the router's product and the choice."""

    takes_shared: bool  # whether who computes the routed experts of a deferred choice computes shared ones, too

    def choose(self, x: torch.Tensor, plan: Opaque, *, defer: bool) -> Chosen:
        """The choice of normalised rows x [num_rows, H]: of T' rows, T <= T' <= num_rows; ids of padding are -1.
        `defer`: whoever computes the experts of one row may make its choice, and nobody else reads it before."""
        ...


class ExpertRun(Protocol):
    """The routed experts over one layer's received rows, computed in as many parts as the caller likes."""

    @property
    def counts(self) -> tuple[int, ...]:
        """(row, k) pairs of each local expert. On a GPU the host waits for them."""
        ...

    @property
    def decode_counts(self) -> tuple[int, ...]:
        """Those of decode rows."""
        ...

    @property
    def known_counts(self) -> tuple[int, ...] | None:
        """`counts` where the host has them anyway, else None."""
        ...

    def compute(self, slot_of_expert: Opaque) -> None:
        """Run the pairs of every local expert whose slot in a `slot_table` is not -1."""
        ...

    def result(self) -> torch.Tensor | None:
        """[R, K, H], unweighted, with holes where `experts` was -1 (or the expert was in no table); None: put home."""
        ...


class ExpertSlots(Protocol):
    """Memory for S experts of one rank, each in the form its kernel wants."""

    num_slots: int

    def write(self, slot: int, fill: Fill) -> None:
        """Put the expert that `fill` writes into a slot."""
        ...

    def slot_table(self, slots: Sequence[int]) -> Opaque:
        """The slot of each local expert, -1 for one that is not to be run, in the form `ExpertRun.compute` takes."""
        ...

    def begin(
        self, rows: torch.Tensor, experts: torch.Tensor, *, num_experts: int, prompt: torch.Tensor | None, one_in: int,
        choice: TokenChoice | None = None, home: PeerWindow | None = None,
    ) -> ExpertRun:  # fmt: skip
        """rows [R, H] for local ids experts [R, K] (-1: not here); prompt [R] bool marks prompt rows (None: none).

        `one_in`: of so many pairs at best one is here, for whom it helps to know. `choice`: of one row, whose experts
        are still to be chosen; the run's `compute` does it. `home`: where `compute` may put the results by itself.
        """
        ...


@runtime_checkable
class MovableSlots(ExpertSlots, Protocol):
    """Slots of which there may be more or fewer later, where a rank's experts may change."""

    def pack(self, fill: Fill) -> Opaque:
        """One expert as `write` would put it into a slot, in memory of its own. In any thread, beside steps."""
        ...

    def rearrange(self, order: Sequence[Opaque]) -> None:
        """From now on there are len(order) slots: number s is what slot order[s] was, or what `pack` gave, or None."""
        ...


class Backend(Protocol):
    """What layers are written in. One instance per rank and model; it remembers which plans its objects will need."""

    device: torch.device
    page_size: int
    peers: Peers
    # How many slots misses of prompts pass through, beside those that the policy hands out.
    stream_slots: int

    @property
    def choices(self) -> GateCounts | None:
        """What its gates count; None where the host learns what experts compute (`ExpertRun.known_counts`)."""
        ...

    # Ops, as `ops` declares them.
    @property
    def rms_norm(self) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]: ...
    @property
    def add_rms_norm(
        self,
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]: ...
    @property
    def mla_split_qkv_a_norm(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]: ...
    @property
    def silu_mul(self) -> Callable[[torch.Tensor], torch.Tensor]: ...
    @property
    def sample(self) -> Callable[..., SampledTokens]: ...
    @property
    def token_logprobs(self) -> Callable[[torch.Tensor, torch.Tensor, int], SampledTokens]: ...

    def matrix(self, weight: Matrix) -> Matrix:
        """Return weight [N, K] in the layout of `linear`, repacked once. A given weight goes through here always or
        never. Raises ValueError for a form without products here."""
        ...

    def plan(self, step: StepRows) -> StepPlan:
        """The plan of one step. An empty step gives no rows."""
        ...

    def linear(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K] @ weight [N, K].T + bias [N]; sums in fp32, one rounding, each row's bits its own."""
        ...

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x [M, N] * sigmoid(gate [M, N]), in fp32 with one rounding; may take the place of x."""
        ...

    def gate(
        self, weight: Matrix, bias: torch.Tensor | None, rule: GateRule, *, dtype: torch.dtype,
        shared_gate: Matrix | None = None, shared: tuple[Matrix, Matrix] | None = None,
    ) -> Gate:  # fmt: skip
        """weight [E, H] is fp32 where the family computes its logits so; bias [E] fp32 counts for the choice only.
        `dtype` is that of the rows; shared_gate [1, H] gives the logit of a shared expert, and `shared` are its gate_up
        [2 I, H] and down [H, I]."""
        ...

    def beside(self, run: Callable[[], torch.Tensor], plan: Opaque) -> Callable[[], torch.Tensor]:
        """What gives the result of `run`, which reads nothing that is launched from here on. Ask for it once: a device
        may have run it beside what was launched until then."""
        ...

    def reduce_add_norm(
        self, partial: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, residual: torch.Tensor,
        norm: torch.Tensor, eps: float, plan: Opaque, *, shared_gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`ops.moe_weighted_reduce` of partial [T', K, H], weights [T', K] and shared [num_rows, H], that times the
        sigmoid of shared_gate [num_rows] and rounded, then `ops.add_rms_norm` with residual [num_rows, H] and norm [H]:
        (normalised rows, new residual), [num_rows, H]."""
        ...

    def gqa(self, layer: GqaLayer) -> GqaAttend: ...
    def mla(self, layer: MlaLayer) -> MlaAttend: ...
    def gdn(self, layer: GdnLayer) -> GdnMix: ...
    def kda(self, layer: KdaLayer) -> KdaMix: ...

    def expert_slots(self, *, num_slots: int, form: ExpertForm) -> ExpertSlots:
        """Memory for routed experts."""
        ...

    def expert_residency(
        self, slots: Opaque, *, policy: str, num_layers: int, num_experts: int, num_slots: int, shared: bool
    ) -> ExpertResidency | None:
        """For `num_slots` of these slots, the others being for what prompts miss; None where the host is to decide.
        `shared`: what is kept in the host's memory may be read by other ranks of the host."""
        ...
