"""Bench of the sums around the experts: weighted reduce, row gate."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.model_steps import MODELS, ModelStep
from moeyard_kernels import ops
from moeyard_kernels.common.rows import row_class
from moeyard_kernels.elementwise import scale_rows
from moeyard_kernels.experts import moe_reduce_add_norm, moe_weighted_reduce

OPS = ("moe_weighted_reduce", "moe_reduce_add_norm", "scale_rows_")


def cases() -> Iterator[Case]:
    """Yield prompt shapes and decode steps."""
    for num_tokens, hidden in ((4096, 2048), (4096, 7168), (64, 7168), (1, 7168)):
        yield _reduce(num_tokens, 8, hidden)
    for num_tokens in (1, 8, 64, 512, 8192):
        for model in MODELS.values():
            yield _reduce_norm(num_tokens, model)
    for num_rows, hidden in ((4096, 2048), (4096, 7168), (64, 7168)):
        yield _scale(num_rows, hidden)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield the sum and the next norm, two launches for few rows of a large hidden size (cuda/backend.py)."""
    for num_tokens in rows:
        for model in models:
            yield _reduce_norm(num_tokens, model)
            if num_tokens <= 64 and model.hidden > 4096:
                yield _reduce(num_tokens, model.rule.top_k, model.hidden, with_residual=False)


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _torch_chain(
    parts: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    out = torch.bmm(weights.to(parts.dtype).unsqueeze(1), parts).squeeze(1) + shared
    return out if residual is None else out + residual


def _reduce(num_tokens: int, top_k: int, hidden: int, *, with_residual: bool | None = None) -> Case:
    parts, weights = _rows(num_tokens, top_k, hidden), torch.rand(num_tokens, top_k, device="cuda")
    shared, residual = _rows(num_tokens, hidden), _rows(num_tokens, hidden)
    with_residual = num_tokens <= 64 if with_residual is None else with_residual
    inputs = parts, weights, shared, residual if with_residual else None
    run = partial(moe_weighted_reduce.moe_weighted_reduce, *inputs)

    def prove() -> None:
        some = slice(num_tokens // 2, num_tokens // 2 + 32)
        args = [x[some] for x in (parts, weights, shared, residual)]
        chain = ops.moe_weighted_reduce.reference(*(x.cpu() for x in args[:3]))
        assert_bits("sequential fma chain", ops.moe_weighted_reduce(*args[:3]).cpu(), chain)
        assert_bits("residual after", ops.moe_weighted_reduce(*args).cpu(), args[3].cpu() + chain)
        assert_bits("rows alone", ops.moe_weighted_reduce(parts, weights, shared)[some].cpu(), chain)

    num_inputs = top_k + 1 + with_residual
    return Case(
        op="moe_weighted_reduce",
        shape=f"T{num_tokens} K{top_k} H{hidden} shared{' residual' if with_residual else ''}",
        run=run,
        prove=prove,
        num_bytes=2 * num_tokens * hidden * (num_inputs + 1) + 4 * num_tokens * top_k,
        target=Target("copy", 0.85) if num_tokens == 4096 else None,
        baseline=partial(_torch_chain, *inputs),
        baseline_name="bmm, add",
        variants=[(config, partial(run, config=config)) for config in moe_weighted_reduce.CONFIGS],
        tune_key=("moe_weighted_reduce", moe_weighted_reduce.shape_class(num_tokens, top_k, hidden)),
    )


def _norm_after(
    partial: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if shared is not None and gate is not None:
        shared = ops.scale_rows_(shared.clone(), gate.contiguous(), sigmoid=True)
    return ops.add_rms_norm(ops.moe_weighted_reduce(partial, weights, shared), residual, norm, eps)


def _reduce_norm(num_tokens: int, model: ModelStep) -> Case:
    top_k, hidden = model.rule.top_k, model.hidden
    beside = ["shared"] * bool(model.shared) + ["gated"] * model.shared_gate
    parts, weights = _rows(num_tokens, top_k, hidden), torch.rand(num_tokens, top_k, device="cuda")
    shared = _rows(num_tokens, hidden) if beside else None
    # A column of the logits, with their stride.
    gate = _rows(num_tokens, 272)[:, 256] if model.shared_gate else None
    inputs = parts, weights, shared, _rows(num_tokens, hidden), _rows(hidden), 1e-6
    run = partial(moe_reduce_add_norm.moe_reduce_add_norm, *inputs, shared_gate=gate)
    chain = partial(_norm_after, *inputs, gate)

    # A gate has no class of its own.
    tune_key = "moe_reduce_add_norm", moe_reduce_add_norm.shape_class(num_tokens, top_k, hidden)

    def prove() -> None:
        whole = run()
        wanted = chain()
        for config in (None, *moe_reduce_add_norm.CONFIGS):
            assert_bits(f"reduce, then norm, {config}", run(config=config), wanted)
        last = [x if x is None else x[-1:].clone() for x in inputs[:4]]
        alone = run.func(*last, *inputs[4:], shared_gate=None if gate is None else gate[-1:])
        assert_bits("row alone", alone, tuple(x[-1:] for x in whole))

    return Case(
        op="moe_reduce_add_norm",
        shape=" ".join([f"{model.name} T{num_tokens} K{top_k} H{hidden}", *beside]),
        run=run,
        prove=prove,
        num_bytes=2 * num_tokens * hidden * (top_k + 3 + bool(beside)) + 4 * num_tokens * top_k + 2 * hidden,
        target=Target("copy", 0.85) if num_tokens == 8192 else Target("speedup", 1.2),
        baseline=chain,
        baseline_name=("" if gate is None else "scale_rows_ of a copy, ") + "moe_weighted_reduce, add_rms_norm",
        variants=[(config, partial(run, config=config)) for config in moe_reduce_add_norm.CONFIGS],
        tune_key=tune_key if gate is None else None,
    )


def _scale(num_rows: int, hidden: int) -> Case:
    x, scale = _rows(num_rows, hidden), torch.ones(num_rows, device="cuda", dtype=torch.bfloat16)
    run = partial(scale_rows.scale_rows_, x, scale)

    def prove() -> None:
        factor = torch.rand(32, device="cuda").to(x.dtype)
        wanted = ops.scale_rows_.reference(x[:32].cpu(), factor.cpu())
        assert_bits("rounded product", ops.scale_rows_(x[:32].clone(), factor).cpu(), wanted)
        assert_bits("row alone", ops.scale_rows_(x[5:6].clone(), factor[5:6]).cpu(), wanted[5:6])

    return Case(
        op="scale_rows_",
        shape=f"T{num_rows} H{hidden}",
        run=run,
        prove=prove,
        num_bytes=4 * num_rows * hidden + 2 * num_rows,
        target=Target("copy", 0.85) if num_rows == 4096 else None,
        baseline=partial(torch.Tensor.mul_, x, scale.unsqueeze(1)),
        baseline_name="torch mul_",
        variants=[(config, partial(run, config=config)) for config in scale_rows.CONFIGS],
        tune_key=("scale_rows_", row_class(num_rows, f"H{hidden}")),
    )
