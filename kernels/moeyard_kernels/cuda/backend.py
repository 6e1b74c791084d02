"""The backend of GPUs: layers over the door's kernels, each row's bits its own. See `backend`.

It asks for no GPU itself: on the CPU the same calls run through the oracles, which is how its composition is tested
where there is none.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch

from moeyard_kernels import ops
from moeyard_kernels.cuda.attention import CudaGqa, CudaMla
from moeyard_kernels.cuda.capturing import capture, capture_while_serving, compile_ahead, without_collection
from moeyard_kernels.cuda.choices import CudaChoices
from moeyard_kernels.cuda.experts import CudaExpertSlots
from moeyard_kernels.cuda.footprint import STREAM_SLOTS
from moeyard_kernels.cuda.linear_attention import CudaGdn, CudaKda
from moeyard_kernels.cuda.plan import CudaPlan
from moeyard_kernels.cuda.residency import CudaResidency
from moeyard_kernels.cuda.staging import Staging
from moeyard_kernels.cuda.step_inputs import StepInputs
from moeyard_kernels.cuda.verified_rows import Tails
from moeyard_kernels.ops.op import load
from moeyard_kernels.peers import Peers
from moeyard_kernels.types.decode_tables import BLOCK
from moeyard_kernels.types.expert_layout import FEW_PAIRS, can_share
from moeyard_kernels.types.gate import Chosen, GateRule, SharedRow, TokenChoice, no_choice
from moeyard_kernels.types.step import StepRows
from moeyard_kernels.types.step_size import StepSize

# Few rows of a large hidden size are reduced faster by many programs, and normalised behind them: 4.0 us of one row of
# 7168 against 4.4 on an H200. Everything else is one launch (2.2 of 3.2 us at one row of 2048, 86 of 105 at 8192).
_FEW_ROWS, _LARGE = 64, 4096


class CudaGate:
    """See `Gate`.

    fp32 logits of bf16 rows: where the weight's values are bf16's, as those of bf16 checkpoints are, both operands stay
    bf16 and only the sums are fp32. Their products are exact either way, and the fp32 product of a GPU is 20 times as
    slow.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, rule: GateRule, *, dtype: torch.dtype,
        choices: CudaChoices, shared_gate: torch.Tensor | None = None,
        shared: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._choices, self._counts = choices, choices.of_gate(weight.shape[0], weight.device)
        self._num_experts, self._gated = weight.shape[0], shared_gate is not None
        self._fp32_logits = weight.dtype == torch.float32
        if shared_gate is not None:
            # One product gives both, in rows of a multiple of 16 logits: of such strides Triton reads many at once.
            padding = weight.new_zeros(-(1 + weight.shape[0]) % 16, weight.shape[1])
            weight = torch.cat((weight, shared_gate.to(weight.dtype), padding))
        # A weight in another dtype than fp32 is in the rows'.
        rounded = weight.to(dtype if self._fp32_logits else weight.dtype)
        self._weight = rounded if torch.equal(rounded.to(weight.dtype), weight) else weight
        self._rule, self._bias, self._arguments = rule, bias, asdict(rule)
        self._defers = rule.top_k <= FEW_PAIRS
        # The first product of shared experts is one launch with the router's then, of operands that are alike.
        self.takes_shared = (
            shared is not None and self._weight.dtype == shared[0].dtype == torch.bfloat16
            and self._defers and can_share(shared[1].shape[1])
        )  # fmt: skip
        self._shared = shared if self.takes_shared else None

    def choose(self, x: torch.Tensor, plan: CudaPlan, *, defer: bool) -> Chosen:
        """See `Gate.choose`."""
        if not plan.num_rows:
            return no_choice(x, self._rule.top_k)
        defer = defer and plan.num_rows == 1 and self._defers
        rows, out_dtype = x.to(self._weight.dtype), torch.float32 if self._fp32_logits else None
        shared = None
        if defer and self._shared is not None:
            gate_up, down = self._shared
            logits, y = ops.linear_pair(rows, self._weight, gate_up, static_weight=True, out_dtype=out_dtype)
            shared = SharedRow(gate_up=y, down=down, out=torch.empty_like(x))
        else:
            logits = ops.linear(rows, self._weight, static_weight=True, out_dtype=out_dtype)
        counted = {"counts": self._counts, "entries": plan.entries} if self._choices.on else {}
        shared_gate = logits[:, self._num_experts] if self._gated else None
        if self._gated:
            logits = logits[:, : self._num_experts]
        if defer:
            weights, ids = (logits.new_empty(1, self._rule.top_k, dtype=d) for d in (torch.float32, torch.int64))
            later = TokenChoice(
                rule=self._rule, logits=logits, bias=self._bias, weights=weights, ids=ids, shared=shared, **counted
            )
            return Chosen(weights=weights, ids=ids, shared_gate=shared_gate, deferred=later)
        weights, ids = ops.topk_gate(logits, **self._arguments, bias=self._bias, **counted)
        return Chosen(weights=weights, ids=ids, shared_gate=shared_gate)


class CudaBackend:
    """`Backend` on `device`. Raises ValueError for a page size that does not divide the attention's block of 64."""

    rms_norm = staticmethod(ops.rms_norm)
    add_rms_norm = staticmethod(ops.add_rms_norm)
    mla_split_qkv_a_norm = staticmethod(ops.mla_split_qkv_a_norm)
    silu_mul = staticmethod(ops.silu_mul)
    sigmoid_mul = staticmethod(ops.sigmoid_mul)
    sample = staticmethod(ops.sample)
    token_logprobs = staticmethod(ops.token_logprobs)
    # For captured steps: see `capturing`.
    capture = staticmethod(capture)
    capture_while_serving = staticmethod(capture_while_serving)
    without_collection = staticmethod(without_collection)
    stream_slots = STREAM_SLOTS

    def __init__(self, *, page_size: int, device: torch.device) -> None:
        if page_size < 1 or BLOCK % page_size:
            raise ValueError(f"page_size {page_size} does not divide {BLOCK}")
        self.page_size, self.device = page_size, device
        self.peers = Peers(device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The sliding windows of the layers built so far, whether one of them decompresses its keys, and whether one
        # keeps state in slots.
        self.windows: set[int | None] = set()
        self.flat = self.slots = False
        self.choices = CudaChoices()
        self._attention: list[CudaGqa | CudaMla] = []

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Backend.matrix`: as it is."""
        return weight

    def plan(self, step: StepRows) -> CudaPlan:
        """See `Backend.plan`."""
        return CudaPlan(
            step, page_size=self.page_size, windows=self.windows, flat=self.flat, device=self.device, slots=self.slots
        )

    def step_inputs(self, size: StepSize, last_ids: torch.Tensor, tails: Tails | None = None) -> StepInputs:
        """Inputs of a captured step of that size, for the layers built so far; see `StepInputs`."""
        return StepInputs(
            size, page_size=self.page_size, windows=self.windows, last_ids=last_ids, slots=self.slots, tails=tails
        )

    def tails(self, *, max_sequences: int, num_drafts: int, limit: int) -> Tails:
        """See `Tails`."""
        return Tails(max_sequences=max_sequences, num_drafts=num_drafts, limit=limit, device=self.device)

    def staging(self, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, stages: int) -> Staging:
        """See `Staging`."""
        return Staging(fields, self.device, stages=stages)

    def compile_ahead(self, runs: Iterable[Callable[[], object]]) -> None:
        """See `capturing.compile_ahead`."""
        compile_ahead(runs, self.device)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Backend.linear`; weights do not change while a model serves."""
        return ops.linear(x, weight, bias, static_weight=True)

    def gqa(self, **arguments: Any) -> CudaGqa:
        """See `Backend.gqa`."""
        self.windows.add(arguments["window"])
        found = CudaGqa(**arguments)
        self._attention.append(found)
        return found

    def mla(self, **arguments: Any) -> CudaMla:
        """See `Backend.mla`."""
        self.windows.add(None)
        self.flat = True
        found = CudaMla(**arguments)
        self._attention.append(found)
        return found

    def before_compiling(self, tell: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `tell` before each kernel that this thread compiles while the context lasts."""
        watching: AbstractContextManager[None] = load("common.compiling").before_compiling(tell)
        return watching

    def warm_compaction(self) -> None:
        """Have what keeps a part of prompts compiled, before there is one that waits for it."""
        for attention in self._attention:
            attention.warm_compaction()

    def gdn(self, **arguments: Any) -> CudaGdn:
        """See `Backend.gdn`."""
        self.slots = True
        return CudaGdn(**arguments)

    def kda(self, **arguments: Any) -> CudaKda:
        """See `Backend.kda`."""
        self.slots = True
        return CudaKda(**arguments)

    def expert_slots(self, *, num_slots: int, hidden: int, intermediate: int, dtype: torch.dtype) -> CudaExpertSlots:
        """See `Backend.expert_slots`."""
        return CudaExpertSlots(
            num_slots=num_slots, hidden=hidden, intermediate=intermediate, dtype=dtype, device=self.device
        )

    def expert_residency(self, slots: CudaExpertSlots, **arguments: Any) -> CudaResidency:
        """See `Backend.expert_residency`."""
        return CudaResidency(slots, **arguments)

    def gate(self, weight: torch.Tensor, bias: torch.Tensor | None, rule: GateRule, **arguments: Any) -> CudaGate:
        """See `Backend.gate`."""
        return CudaGate(weight, bias, rule, choices=self.choices, **arguments)

    def beside(self, run: Callable[[], torch.Tensor], plan: CudaPlan) -> Callable[[], torch.Tensor]:
        """See `Backend.beside`: on a stream of its own, where rows are so few that launches leave much of a GPU idle.

        Memory that is freed there is used again by the next call, which waits for all that the caller launched before.
        """
        if self._side is None or plan.num_rows > _FEW_ROWS:
            return run
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            result = run()

        def joined() -> torch.Tensor:
            torch.cuda.current_stream(self.device).wait_stream(side)
            return result

        return joined

    def reduce_add_norm(
        self, partial: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, residual: torch.Tensor,
        norm: torch.Tensor, eps: float, plan: CudaPlan, *, shared_gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """See `Backend.reduce_add_norm`."""
        if not plan.num_rows:
            return residual, residual
        if plan.num_rows <= _FEW_ROWS and residual.shape[1] > _LARGE and shared_gate is None:
            return ops.add_rms_norm(ops.moe_weighted_reduce(partial, weights, shared), residual, norm, eps)
        return ops.moe_reduce_add_norm(partial, weights, shared, residual, norm, eps, shared_gate=shared_gate)
