"""What `ops` demands of its arguments; every function raises ValueError naming the argument and both values."""

import torch

from moeyard_kernels.decode_plan import DecodePlan

FLOATS = (torch.float32, torch.bfloat16)


def show(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def check_expert(gate_up: torch.Tensor, down: torch.Tensor, rows: torch.Tensor) -> None:
    hidden = rows.shape[1]
    if gate_up.dim() != 2 or gate_up.shape[1] != hidden or down.shape != (hidden, gate_up.shape[0] // 2):
        raise ValueError(f"grouped_mlp: gate_up {show(gate_up)}, down {show(down)} do not fit rows {show(rows)}")
    if gate_up.dtype != rows.dtype or down.dtype != rows.dtype:
        raise ValueError(f"grouped_mlp: gate_up {gate_up.dtype}, down {down.dtype} for rows of {rows.dtype}")


def check_norm(op: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() == 0 or weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"{op}: weight {show(weight)} does not fit x {show(x)}")
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        raise ValueError(f"{op}: x {x.dtype} and weight {weight.dtype} must share a dtype, fp32 or bf16")


def check_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int, group_score: str) -> None:
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"topk_gate: {num_experts} experts in {num_groups} groups")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_gate: topk_groups {topk_groups} of {num_groups} groups")
    if top_k > num_experts // num_groups * topk_groups:
        raise ValueError(f"topk_gate: top_k {top_k} exceeds {topk_groups} groups of {num_experts // num_groups}")
    if group_score not in ("max", "top2sum"):
        raise ValueError(f"topk_gate: group_score {group_score!r} is neither 'max' nor 'top2sum'")
    if group_score == "top2sum" and num_experts // num_groups < 2:
        raise ValueError(f"topk_gate: group_score 'top2sum' of groups of {num_experts // num_groups}")


def check_plan(op: str, plan: DecodePlan, num_rows: int, page_size: int) -> None:
    if plan.num_rows != num_rows or plan.page_size != page_size:
        raise ValueError(
            f"{op}: the plan is for {plan.num_rows} rows and pages of {plan.page_size}, got {num_rows} and {page_size}"
        )


def missing(op: str) -> NotImplementedError:
    return NotImplementedError(f"{op}: no Triton kernel yet, CPU tensors only")
