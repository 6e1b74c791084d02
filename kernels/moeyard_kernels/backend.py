"""The interface between layers and devices: the operations that a backend offers to layers.

A worker chooses its backend once, at assembly. In each step the backend makes a plan (padding, page tables and other
kernel inputs). Layers pass the plan back and read only the fields of `StepPlan`. The backend pads rows: every
activation has `num_rows` rows, and rows from `num_tokens` on hold finite values or are never read.

A backend makes one object for each part of a layer (`ExpertGate`, `GqaAttend`, `MlaAttend`, `DeltaMix`, `ExpertSlots`).
It holds the weights and state in the layout of the backend's kernels. H is the hidden size, T = num_tokens, K = experts
per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from moeyard_kernels.types.gate import Chosen, ExpertParts, TokenChoice
from moeyard_kernels.types.layers import (
    CompressedLayer,
    GateLayer,
    GdnLayer,
    GqaLayer,
    HyperLayer,
    HyperMix,
    KdaLayer,
    MlaLayer,
)
from moeyard_kernels.types.step import StepRows

# Features of one backend are typed by its class: captured steps, residency that the device decides, and counts of
# chosen experts on the device.
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

# Made by a backend for its own use; callers only pass it back.
Opaque = Any


class StepPlan(Protocol):
    """The rows of one step, as far as all layers may read them. Other fields are private to the backend.

    num_tokens: real rows T; the first num_prompt are prompt rows. num_rows >= T: rows of every activation. token_ids,
    positions: [num_rows] int64. sample_rows: [num_sampled or more] int64 rows whose logits are wanted; None for all
    rows in order.
    """

    num_tokens: int
    num_prompt: int
    num_rows: int
    num_sampled: int
    token_ids: torch.Tensor
    positions: torch.Tensor

    @property
    def sample_rows(self) -> torch.Tensor | None: ...


class GqaAttend(Protocol):
    """Grouped-query attention of one layer: head norms, rotation, cache write, attention."""

    def attend(self, qkv: torch.Tensor, plan: Opaque) -> torch.Tensor:
        """qkv [num_rows, (Hq + 2 Hkv) D] -> [num_rows, Hq D]. Store all rows of the step before any row attends."""


class MlaAttend(Protocol):
    """Latent attention of one layer: rotation, cache write of the latents, attention."""

    def attend(self, q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, plan: Opaque) -> torch.Tensor:
        """q [num_rows, Hq (nope + Dr)], latent [num_rows, R] as in `Backend.mla`, k_rope [num_rows, Dr] -> [num_rows,
        Hq Dv]."""


class CompressedAttend(Protocol):
    """Attention over a window and compressed entries, of one layer: `CompressedLayer`."""

    def attend(self, x: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, plan: Opaque) -> torch.Tensor:
        """x [num_rows, H], q [num_rows, Hq D + Hi Di] with the indexer's queries last, kv [num_rows, D] normalised ->
        [num_rows, G R], the first output projection of all groups. Prompt positions and others have a formula each."""


class BlockAttend(Protocol):
    """Attention of one layer of DSpark, whose keys come from the model's states: `CompressedLayer` with a window."""

    def store(self, kv: torch.Tensor, plan: Opaque) -> None:
        """Rotate and store keys kv [num_rows, D], normalised, of all rows of a step."""

    def attend(self, q: torch.Tensor, kv: torch.Tensor, plan: Opaque) -> torch.Tensor:
        """q [num_rows, Hq D], kv [num_rows, D] normalised -> [num_rows, G R]. All chunks of the plan have `block` rows.
        Each row sees all rows of its chunk, and the stored keys of the `window` positions before the chunk. Keys of the
        chunk's positions are undefined afterwards."""


class HyperSite(Protocol):
    """Hyper-connections in front of one block, or of the head: `HyperLayer`."""

    def enter(self, streams: torch.Tensor) -> tuple[torch.Tensor, HyperMix | None]:
        """Streams [num_rows, S, H] -> the rows [num_rows, H] that the block reads, and how to write its result."""


class DeltaMix(Protocol):
    """Linear attention of one layer: convolution, gates, the delta rule over each sequence's state slot, norm."""

    def mix(self, x: torch.Tensor, plan: Opaque) -> torch.Tensor:
        """x [num_rows, C] -> [num_rows, Hv Dv]. Prompt positions use the chunk formula, others the recurrent one.

        Gated DeltaNet has C = 2 Hk Dk + 2 Hv Dv + 2 Hv for q, k, v, z (the output gate), b and a. Kimi Delta Attention
        has a decay rate for each row of the state. Its C = 3 H D + 2 D + H is for q, k, v, the low-rank inputs of the
        decay and of the output gate, and beta.
        """


class ExpertGate(Protocol):
    """The router of one layer: its product and the choice of experts."""

    computes_shared: bool  # a deferred choice's expert kernel computes shared experts, too

    def choose(self, x: torch.Tensor, plan: Opaque, *, defer: bool) -> Chosen:
        """Choose experts for normalised rows x [num_rows, H]: T' rows, T <= T' <= num_rows; ids of padding are -1.
        `defer`: the expert kernel may make the choice of a single row, and no one reads the choice before it."""


class ExpertRun(Protocol):
    """The routed experts over the rows that one layer received. The caller may compute it in several parts."""

    @property
    def counts(self) -> tuple[int, ...]:
        """(row, k) pairs of each local expert. On a GPU the host waits for the device."""

    @property
    def decode_counts(self) -> tuple[int, ...]:
        """The counts of decode rows. On a GPU the host waits for the device."""

    @property
    def known_counts(self) -> tuple[int, ...] | None:
        """`counts` if the host has them without waiting, else None."""

    def compute(self, slot_of_expert: Opaque) -> None:
        """Compute the pairs of every local expert whose slot in a `slot_table` is not -1."""

    def result(self) -> torch.Tensor | None:
        """Return [R, K, H], unweighted; entries are undefined where `experts` was -1 or no table had the expert. None
        if `compute` wrote the results into the peer window."""


class ReceivedRows(Protocol):
    """The rows that an exchange delivers to a rank for one layer: `Dispatched` of the worker has the definitions."""

    @property
    def rows(self) -> torch.Tensor: ...
    @property
    def experts(self) -> torch.Tensor: ...
    @property
    def prompt(self) -> torch.Tensor | None: ...
    @property
    def num_owners(self) -> int: ...
    @property
    def deferred_choice(self) -> TokenChoice | None: ...
    @property
    def result_window(self) -> PeerWindow | None: ...


class ExpertSlots(Protocol):
    """Memory for S experts of one rank, each in the form its kernel wants."""

    num_slots: int

    @property
    def regions(self) -> tuple[torch.Tensor, ...]:
        """The tensors of all slots, () if each slot has memory of its own."""

    def write(self, slot: int, fill: Fill) -> None:
        """Put the expert that `fill` writes into a slot."""

    def contents(self, slot: int) -> tuple[torch.Tensor, ...]:
        """Return the memory of a slot, to read."""

    def slot_table(self, slots: Sequence[int]) -> Opaque:
        """Return the slot of each local expert as `ExpertRun.compute` reads it; -1 for an expert that does not run."""

    def begin(self, received: ReceivedRows, *, num_experts: int) -> ExpertRun:
        """Begin a run over the rows of one layer with `num_experts` local experts."""


@runtime_checkable
class MovableSlots(ExpertSlots, Protocol):
    """Slots whose number can change, for ranks whose experts may move."""

    def pack(self, fill: Fill) -> Opaque:
        """Return one expert in the form that `write` stores, in its own memory. Any thread may call it during steps."""

    def rearrange(self, order: Sequence[Opaque]) -> None:
        """Replace the slots by len(order) new ones. Slot s becomes the old slot order[s], a `pack` result, or empty
        (None)."""


class Backend(Protocol):
    """The operations of layers on one device. One instance per rank and model; it records the plans that its objects
    need."""

    device: torch.device
    page_size: int
    peers: Peers
    # Slots that stream the missing experts of prompts, in addition to the policy's slots.
    stream_slots: int

    @property
    def choices(self) -> GateCounts | None:
        """The counters of its gates; None if the host already knows the counts (`ExpertRun.known_counts`)."""

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
    def silu_mul(self) -> Callable[[torch.Tensor, float | None], torch.Tensor]: ...
    @property
    def sample(self) -> Callable[..., SampledTokens]: ...
    @property
    def token_logprobs(self) -> Callable[[torch.Tensor, torch.Tensor, int], SampledTokens]: ...

    def matrix(self, weight: Matrix) -> Matrix:
        """Return weight [N, K] in the layout of `linear`, repacked once. Call it for every use of a weight or for none.
        Raises ValueError for a form that the backend cannot multiply."""

    def plan(self, step: StepRows) -> StepPlan:
        """Return the plan of one step. An empty step has no rows."""

    def linear(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K] @ weight [N, K].T + bias [N]; sums in fp32, one rounding. A row's bits depend on no other row."""

    def sigmoid_mul(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x [M, N] * sigmoid(gate [M, N]), in fp32 with one rounding; may overwrite x."""

    def beside(self, run: Callable[[], torch.Tensor], plan: Opaque) -> Callable[[], torch.Tensor]:
        """Return a function that gives the result of `run`, which reads nothing that is launched later. Call that
        function once: a device may run `run` in parallel with the launches in between."""

    def reduce_add_norm(
        self, parts: ExpertParts, residual: torch.Tensor, norm: torch.Tensor, eps: float, plan: Opaque
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply `ops.moe_weighted_reduce`, then `ops.add_rms_norm` with residual [num_rows, H] and norm [H]. Returns
        (normalised rows, new residual), [num_rows, H]. The gated shared experts' output is rounded first."""

    def gate(self, layer: GateLayer) -> ExpertGate: ...
    def gqa(self, layer: GqaLayer) -> GqaAttend: ...
    def mla(self, layer: MlaLayer) -> MlaAttend: ...
    def gdn(self, layer: GdnLayer) -> DeltaMix: ...
    def kda(self, layer: KdaLayer) -> DeltaMix: ...
    def compressed(self, layer: CompressedLayer) -> CompressedAttend: ...
    def block_attend(self, layer: CompressedLayer) -> BlockAttend: ...
    def hyper_site(self, layer: HyperLayer) -> HyperSite: ...

    def hyper_leave(
        self, result: torch.Tensor | ExpertParts, streams: torch.Tensor, mix: HyperMix, site: Opaque, plan: Opaque
    ) -> tuple[torch.Tensor, torch.Tensor, HyperMix | None]:
        """Write a block's result, rows [num_rows, H] or unreduced parts, into streams [num_rows, S, H], then enter
        `site`. Returns (new streams, rows, mix)."""

    def rebuilding(self) -> AbstractContextManager[None]:
        """Return a context in which the objects of all layers are made again, in the same order, to take their weights.
        They use the counters of the first ones."""

    def expert_slots(self, *, num_slots: int, form: ExpertForm) -> ExpertSlots:
        """Allocate memory for routed experts."""

    def expert_residency(
        self,
        slots: Opaque,
        *,
        policy: str,
        num_layers: int,
        num_experts: int,
        num_slots: int,
        all_on_host: bool,
        shared: bool,
    ) -> ExpertResidency | None:
        """Return the residency of `num_slots` of these slots; the others stream the misses of prompts. None if the host
        decides. all_on_host: host memory also holds the experts in slots. `shared`: other ranks of the host may read
        the experts in host memory."""
