"""The seam between layers and devices: what a layer may ask of the backend it was built on.

A backend is chosen once, where a worker is assembled. Once a step it makes a plan (padding, page tables, whatever its
kernels want), which layers hand back without looking into it beyond `StepPlan`. Padding rows are the backend's
business: every activation has `num_rows` rows, what the rows from `num_tokens` on hold is finite or never read.

Objects that a backend makes for a layer (`Gate`, `GqaAttend`, `MlaAttend`, `GdnMix`, `ExpertSlots`, ...) keep its
weights and state in the form that the backend's kernels want. H counts hidden, T = num_tokens, K = experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from moeyard_kernels.types.gate import Chosen, GateRule, TokenChoice
from moeyard_kernels.types.step import StepRows
from moeyard_kernels.types.step_size import StepSize

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from moeyard_kernels.peers import Peers
    from moeyard_kernels.types.choices import Choices
    from moeyard_kernels.types.expert_residency import ResidencyCounts
    from moeyard_kernels.types.fetch_window import FetchWindow
    from moeyard_kernels.types.lent_memory import LentMemory
    from moeyard_kernels.types.logit_edits import LogitEdits
    from moeyard_kernels.types.peer_window import PeerWindow
    from moeyard_kernels.types.sampled_tokens import SampledTokens

# What a backend made and alone can read: it is handed back to the backend that made it.
Own = Any
T = TypeVar("T")


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

    def attend(self, qkv: torch.Tensor, plan: Own) -> torch.Tensor:
        """qkv [num_rows, (Hq + 2 Hkv) D] -> [num_rows, Hq D]; all of the step is stored before anything attends."""
        ...


class MlaAttend(Protocol):
    """Latent attention of one layer: rotation, latents into their pages, attention."""

    def attend(self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, plan: Own) -> torch.Tensor:
        """q [num_rows, Hq (nope + Dr)], latent [num_rows, R] as `Backend.mla` has it, k_rope [num_rows, Dr] ->
        [num_rows, Hq Dv]."""
        ...


class GdnMix(Protocol):
    """Gated DeltaNet of one layer: convolution, gates, the delta rule over the state in each sequence's slot, norm."""

    def mix(self, x: torch.Tensor, plan: Own) -> torch.Tensor:
        """x [num_rows, 2 Hk Dk + 2 Hv Dv + 2 Hv] holds q, k, v, z (the output's gate), b and a -> [num_rows, Hv Dv].

        Positions of a prompt take the chunk formula, those of an output the recurrent one, in order.
        """
        ...


class KdaMix(Protocol):
    """Kimi Delta Attention of one layer: the same, where every row of the state is forgotten at a rate of its own."""

    def mix(self, x: torch.Tensor, plan: Own) -> torch.Tensor:
        """x [num_rows, 3 H D + 2 D + H] holds q, k, v, what is narrow of the rates of forgetting and of the output's
        gate, and beta -> [num_rows, H D]."""
        ...


class Gate(Protocol):
    """How one layer's rows choose their experts: the router's product and the choice."""

    takes_shared: bool  # whether who computes the routed experts of a deferred choice computes shared ones, too

    def choose(self, x: torch.Tensor, plan: Own, *, defer: bool) -> Chosen:
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

    def compute(self, slot_of_expert: Own) -> None:
        """Run the pairs of every local expert whose slot in a `slot_table` is not -1."""
        ...

    def result(self) -> torch.Tensor | None:
        """[R, K, H], unweighted, with holes where `experts` was -1 (or the expert was in no table); None: put home."""
        ...


class ExpertSlots(Protocol):
    """Memory for S experts of one rank, each in the form its kernel wants."""

    num_slots: int

    def write(self, slot: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> int:
        """Put one expert, gate and up [I, H] and down [H, I], into a slot, rounded to the served dtype; its bytes."""
        ...

    def slot_table(self, slots: Sequence[int]) -> Own:
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

    def pack(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Own:
        """One expert as `write` would put it into a slot, in memory of its own. In any thread, beside steps."""
        ...

    def rearrange(self, order: Sequence[Own]) -> None:
        """From now on there are len(order) slots: number s is what slot order[s] was, or what `pack` gave, or None."""
        ...


class ExpertResidency(Protocol):
    """Experts of which not all have slots, where the backend decides which and copies them itself.

    Layers and experts are counted from 0. The decisions are those of the policy that it is named. `lent`: how other
    processes of the host find what is kept in its memory, if they may.
    """

    lent: LentMemory | None

    def put(self, layer: int, expert: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> int:
        """Keep one expert in the host's memory; its bytes."""
        ...

    def start(self) -> int:
        """Fill the slots as the policy starts, once all experts are kept; the bytes copied."""
        ...

    def run(self, layer: int, run: Own, fetch: FetchWindow | None = None) -> None:
        """Compute all of an `ExpertRun` of `slots`. Without prompt rows nobody waits for the device, and ranks with a
        `fetch` window, all of a host or none, read what they miss together."""
        ...

    def counts(self, *, wait: bool) -> ResidencyCounts:
        """What was counted: by now, which waits for the device, or by the call before the last, which does not."""
        ...

    def validate(self) -> None:
        """Assert every invariant; waits for the device."""
        ...


class Backend(Protocol):
    """What layers are written in. One instance per rank and model; it remembers which plans its objects will need."""

    device: torch.device
    page_size: int
    peers: Peers
    # How many slots misses of prompts pass through, beside those that the policy hands out.
    stream_slots: int

    @property
    def choices(self) -> Choices | None:
        """What its gates count; None where the host learns what experts compute (`ExpertRun.known_counts`)."""
        ...

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [N, K] in the form that `linear` wants; a given weight goes through here always or never."""
        ...

    def plan(self, step: StepRows) -> StepPlan:
        """The plan of one step. An empty step gives no rows."""
        ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K] @ weight [N, K].T + bias [N]; sums in fp32, one rounding, each row's bits its own."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `ops.rms_norm`."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ops.add_rms_norm`."""
        ...

    def mla_split_qkv_a_norm(
        self, qkv_a: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `ops.mla_split_qkv_a_norm`."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `ops.silu_mul`."""
        ...

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x [M, N] * sigmoid(gate [M, N]), in fp32 with one rounding; may take the place of x."""
        ...

    def sample(
        self,
        logits: torch.Tensor,
        *,
        temperature: torch.Tensor | None = None,
        top_k: torch.Tensor | None = None,
        top_p: torch.Tensor | None = None,
        min_p: torch.Tensor | None = None,
        seeds: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        edits: LogitEdits | None = None,
        logprobs: int | None = None,
    ) -> SampledTokens:
        """See `ops.sample`."""
        ...

    def token_logprobs(self, logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> SampledTokens:
        """See `ops.token_logprobs`."""
        ...

    def gate(
        self, weight: torch.Tensor, bias: torch.Tensor | None, rule: GateRule, *, dtype: torch.dtype,
        shared_gate: torch.Tensor | None = None, shared: tuple[Own, Own] | None = None,
    ) -> Gate:  # fmt: skip
        """weight [E, H] is fp32 where the family computes its logits so; bias [E] fp32 counts for the choice only.
        `dtype` is that of the rows; shared_gate [1, H] gives the logit of a shared expert, and `shared` are its gate_up
        [2 I, H] and down [H, I]."""
        ...

    def beside(self, run: Callable[[], torch.Tensor], plan: Own) -> Callable[[], torch.Tensor]:
        """What gives the result of `run`, which reads nothing that is launched from here on. Ask for it once: a device
        may have run it beside what was launched until then."""
        ...

    def reduce_add_norm(
        self, partial: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, residual: torch.Tensor,
        norm: torch.Tensor, eps: float, plan: Own, *, shared_gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`ops.moe_weighted_reduce` of partial [T', K, H], weights [T', K] and shared [num_rows, H], that times the
        sigmoid of shared_gate [num_rows] and rounded, then `ops.add_rms_norm` with residual [num_rows, H] and norm [H]:
        (normalised rows, new residual), [num_rows, H]."""
        ...

    def gqa(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, window: int | None, eps: float,
        q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, rope: torch.Tensor | None, interleaved: bool,
        k: torch.Tensor, v: torch.Tensor,
    ) -> GqaAttend:  # fmt: skip
        """Norm weights are [D] (each head by itself) or [heads D] (all heads together); rope [positions, Dr], of the
        first Dr <= D values of a head, is cos then sin; k, v [Hkv, num_pages, page_size, D] are the layer's pages, zero
        at first."""
        ...

    def mla(
        self, *, num_heads: int, nope_dim: int, rope_dim: int, v_dim: int, scale: float, kv_b: torch.Tensor,
        rope: torch.Tensor | None, interleaved: bool, kv_norm: torch.Tensor | None, eps: float, latents: torch.Tensor,
    ) -> MlaAttend:  # fmt: skip
        """kv_b [Hq, nope + Dv, R]; kv_norm [R], with eps, is for latents that come as projected, None if they come
        normalised; latents [num_pages, page_size, R + Dr] are the layer's pages, zero at first."""
        ...

    def gdn(
        self, *, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int, eps: float, conv: torch.Tensor,
        a_log: torch.Tensor, dt_bias: torch.Tensor, norm: torch.Tensor, state: torch.Tensor, window: torch.Tensor,
    ) -> GdnMix:  # fmt: skip
        """conv [C, K] over C = 2 Hk Dk + Hv Dv channels; a_log, dt_bias [Hv] fp32; norm [Dv]; state [num_slots, Hv, Dk,
        Dv] fp32 and window [num_slots, K - 1, C] are the layer's slots. A chunk at position 0 starts from zeros."""
        ...

    def kda(
        self, *, num_heads: int, head_dim: int, eps: float, wide: torch.Tensor, conv: torch.Tensor,
        a_log: torch.Tensor, dt_bias: torch.Tensor, norm: torch.Tensor, state: torch.Tensor, window: torch.Tensor,
    ) -> KdaMix:  # fmt: skip
        """wide [2, H D, D] takes what is narrow of rates and gate to all heads; conv [C, K] over C = 3 H D channels;
        a_log [H], dt_bias [H D] and norm [D] fp32; state [num_slots, H, D, D] fp32 and window [num_slots, K - 1, C] are
        the layer's slots, as of `gdn`."""
        ...

    def expert_slots(self, *, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype) -> ExpertSlots:
        """Memory for routed experts."""
        ...

    def expert_residency(
        self, slots: Own, *, policy: str, num_layers: int, num_experts: int, num_slots: int, shared: bool
    ) -> ExpertResidency | None:
        """For `num_slots` of these slots, the others being for what prompts miss; None where the host is to decide.
        `shared`: what is kept in the host's memory may be read by other ranks of the host."""
        ...


class VerifiedRows(Protocol):
    """Decode rows of a captured step, several per sequence, whose tokens the device knows.

    positions, tokens: [B, Q]. start: [B], where they begin. read: [B, 1 + Q], start and tokens.
    """

    size: StepSize
    positions: torch.Tensor
    tokens: torch.Tensor
    start: torch.Tensor
    read: torch.Tensor

    def accept(self, ids: torch.Tensor) -> torch.Tensor:
        """Keep of ids [rows], chosen for the rows, those whose rows read the right tokens. Returns how many, [B]."""
        ...

    def draft_rows(self, positions: torch.Tensor) -> StepPlan:
        """One row per sequence at positions [B]."""
        ...


class StepInputs(StepPlan, Protocol):
    """Inputs of a captured step, which each step fills in before a replay."""

    @property
    def size(self) -> StepSize: ...
    @property
    def verified(self) -> VerifiedRows | None: ...

    def begin(self) -> None:
        """Launch what makes the step's tokens, to be captured with it."""
        ...

    def fill(self, step: StepRows) -> None:
        """Take a step that fits, with a row at least."""
        ...


class StepBackend(Backend, Protocol):
    """A backend whose steps can be captured, as graphs with memory from a pool."""

    # Whether prompts decompress their keys.
    flat: bool

    def step_inputs(self, size: StepSize, last_ids: torch.Tensor, tails: Own = None) -> StepInputs:
        """Inputs of a step of that size. Tokens that the host does not know come from `last_ids`, or from `tails`."""
        ...

    def tails(self, *, max_sequences: int, num_drafts: int, limit: int) -> Own:
        """Memory for what a step leaves to the next: `state` [max_sequences, 2 + num_drafts] int64, per sequence how
        many tokens were accepted, the last of them and the drafts behind it. No position reaches `limit`."""
        ...

    def staging(self, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, stages: int) -> Own:
        """Named tensors that the host writes while the device reads those of a step before."""
        ...

    def capture(self, run: Callable[[], T], pool: Any, *, ahead: bool = True) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture what `run` launches. `ahead`: run it once before."""
        ...

    def capture_while_serving(self, run: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
        """Capture what `run` launches between steps, without waiting for anything."""
        ...

    def without_collection(self) -> AbstractContextManager[None]:
        """Collect garbage now and not meanwhile: a graph that is destroyed during a capture would spoil it."""
        ...

    def compile_ahead(self, runs: Iterable[Callable[[], object]]) -> None:
        """Compile what `runs` launch, without launching it."""
        ...
