"""Bench of a decode step of linear attention between its projections, in two launches and in three."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kernel_cases.case import Case, assert_bits
from kernel_cases.model_steps import DECODE_ROWS, MODELS, Delta, ModelStep
from moeyard_kernels.linear_attention import delta_step
from moeyard_kernels.types.state_slots import StateSlots

OPS: tuple[str, ...] = ("gdn_step", "kda_step")

_DIM, _TAPS = 128, 4


def cases() -> Iterator[Case]:
    """Yield Kimi-Linear-48B-A3B and Qwen3.5-35B-A3B."""
    yield from model_cases(tuple(MODELS.values()), DECODE_ROWS)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield decode rows; prompts are in `linear_attention`."""
    for batch in rows:
        for kind in dict.fromkeys(kind for model in models for kind in model.attention):
            if isinstance(kind, Delta) and batch in DECODE_ROWS:
                yield _case(kind.op, batch, kind.key_heads, kind.heads)


def _case(op: str, batch: int, k_heads: int, heads: int) -> Case:
    by_row, values = op == "kda_step", heads * _DIM
    channels, rates = 2 * k_heads * _DIM + values, values if by_row else heads
    wide = torch.randn(batch, channels + values + heads + rates, device="cuda", dtype=torch.bfloat16)
    qkv, gate, b, a = wide.split((channels, values, heads, rates), 1)
    conv = torch.randn(_TAPS, channels, device="cuda", dtype=torch.bfloat16).t()
    window = torch.randn(batch, _TAPS - 1, channels, device="cuda", dtype=torch.bfloat16)
    a_log = torch.linspace(-4, 1, heads, device="cuda")
    norm = torch.randn(_DIM, device="cuda", dtype=torch.float32 if by_row else torch.bfloat16)
    dt_bias = torch.randn(*((heads, _DIM) if by_row else (heads,)), device="cuda")
    state = torch.randn(batch, heads, _DIM, _DIM, device="cuda")
    slots = StateSlots.in_place(torch.randperm(batch, device="cuda"))
    kernel = delta_step.kda_step if by_row else delta_step.gdn_step
    run = partial(kernel, qkv, conv, window, b, a, a_log, dt_bias, state, gate, norm, 1e-6, slots=slots, sigmoid=by_row)
    two = next(
        config for config in delta_step.CONFIGS if isinstance(config, delta_step.TwoLaunches) and config.BV == 16
    )

    def on_copies(config: Any) -> tuple[torch.Tensor, ...]:
        """Return (out, states, windows)."""
        own = list(run.args)
        own[2], own[7] = window.clone(), state.clone()
        return kernel(*own, **run.keywords, config=config), own[7], own[2]

    def prove() -> None:
        whole = on_copies(delta_step.Chain())
        for config in delta_step.CONFIGS:
            assert_bits(str(config), on_copies(config), whole)

    return Case(
        op=op,
        shape=f"B{batch} H{k_heads}/{heads} {_DIM}x{_DIM} C{channels}",
        run=partial(run, config=two),
        prove=prove,
        num_bytes=2 * (state.nbytes + window.nbytes) + wide.nbytes + 2 * batch * values + conv.nbytes,
        baseline=partial(run, config=delta_step.Chain()),
        baseline_name="three launches",
        variants=[
            (config, partial(run, config=config))
            for config in delta_step.CONFIGS
            if not getattr(config, "EARLY", False)
        ],
        tune_key=(op, delta_step.shape_class(batch, heads, _DIM, _DIM)),
    )
