"""Bench of linear attention: Kimi-Linear-48B-A3B (32 heads of 128), Qwen3-Next and Qwen3.5-35B-A3B (16 and 32)."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.delta_chunk import PROMPTS, chunk_prefill
from moeyard_kernels import ops
from moeyard_kernels.elementwise import gated_rms_norm
from moeyard_kernels.linear_attention import causal_conv1d, causal_conv1d_prefill, delta_recurrent, restore_slots
from moeyard_kernels.types.state_slots import PromptChunks, SlotMoves, StateSlots

OPS: tuple[str, ...] = (
    "causal_conv1d_update",
    "causal_conv1d_prefill",
    "gdn_recurrent",
    "kda_recurrent",
    "gdn_chunk_prefill",
    "kda_chunk_prefill",
    "restore_slots",
    "gated_rms_norm",
)

_DIM, _TAPS = 128, 4
# Sequences, queries of each.
_STEPS = ((1, 1), (8, 1), (64, 1), (8, 4))


def cases() -> Iterator[Case]:
    """Yield decode steps of both models."""
    for batch, queries in _STEPS:
        yield _rule("kda_recurrent", batch, queries, 32, 32)
        yield _rule("gdn_recurrent", batch, queries, 16, 32)
    for batch, queries in _STEPS:
        # 2 x 16 key heads and 32 value heads of 128; Kimi-Linear has 3 x 32.
        yield _conv(batch, queries, 8192)
        yield _conv(batch, queries, 12288)
    for lengths in PROMPTS:
        yield chunk_prefill("kda_chunk_prefill", lengths, 32, 32)
        yield chunk_prefill("gdn_chunk_prefill", lengths, 16, 32)
    yield chunk_prefill("kda_chunk_prefill", (4096,), 32, 32, strong=True)
    for lengths in PROMPTS:
        yield _conv_prefill(lengths, 8192)
        yield _conv_prefill(lengths, 12288)
    for count in (0, 1, 16):
        # The list size of every captured prompt step, and Kimi-Linear's layer.
        yield _restore(count, 16, 12288)
    for num_rows in (1, 64, 4096):
        yield _norm(num_rows, sigmoid=False)
        yield _norm(num_rows, sigmoid=True)


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _slots(batch: int, queries: int) -> StateSlots:
    """Return slots that are updated in place, after the last query."""
    read = torch.randperm(batch, device="cuda")
    write = torch.full((batch, queries), -1, device="cuda")
    write[:, -1] = read
    return StateSlots(read=read, write=write)


def _one(slots: StateSlots) -> StateSlots:
    """Return the first sequence alone."""
    return StateSlots(read=slots.read[:1].clone(), write=slots.write[:1].clone())


def _on_cpu(slots: StateSlots) -> StateSlots:
    return StateSlots(read=slots.read.cpu(), write=slots.write.cpu())


def _with_state(run: partial[Any], state: torch.Tensor, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the result, the state after it) of a run whose last argument is the state, over a copy of it."""
    own = state.clone()
    return run.func(*run.args[:-1], own, **(run.keywords | changes)), own


def _torch_rule(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    slots: StateSlots,
) -> torch.Tensor:
    """Apply the rule to one query of each sequence after another, over states in slot order."""
    heads, k_dim, v_dim = state.shape[1:]
    gates = a.view(len(a), heads, -1, 1).float() + dt_bias.view(heads, -1, 1)
    decay = (-a_log.exp().view(heads, 1, 1) * F.softplus(gates)).exp()
    keys = (qkv.shape[1] - heads * v_dim) // 2
    q, k, v = qkv.float().split((keys, keys, heads * v_dim), 1)
    q, k = (x.view(len(x), -1, k_dim) for x in (q, k))
    share = heads // q.shape[1]
    q, k = (F.normalize(x, dim=-1).repeat_interleave(share, 1) for x in (q, k))
    v, beta = v.view(len(v), heads, v_dim), b.float().sigmoid().unsqueeze(-1)
    out = torch.empty_like(v)
    for j in range(slots.num_queries):
        rows = slice(j, None, slots.num_queries)
        state.mul_(decay[rows])
        read = torch.matmul(k[rows].unsqueeze(2), state).squeeze(2)
        state.add_(k[rows].unsqueeze(3) * ((v[rows] - read) * beta[rows]).unsqueeze(2))
        out[rows] = torch.matmul(q[rows].unsqueeze(2) * k_dim**-0.5, state).squeeze(2)
    return out.to(qkv.dtype)


def _rule(op: str, batch: int, queries: int, k_heads: int, heads: int) -> Case:
    by_row = op == "kda_recurrent"
    rates, num_rows = heads * (_DIM if by_row else 1), batch * queries
    wide = _rows(num_rows, (2 * k_heads + heads) * _DIM + heads + rates)
    qkv, b, a = wide.split(((2 * k_heads + heads) * _DIM, heads, rates), 1)
    a_log = torch.linspace(-4, 1, heads, device="cuda")
    dt_bias = torch.randn(*((heads, _DIM) if by_row else (heads,)), device="cuda")
    state, slots = torch.randn(batch, heads, _DIM, _DIM, device="cuda"), _slots(batch, queries)
    kernel = delta_recurrent.kda_recurrent if by_row else delta_recurrent.gdn_recurrent
    run = partial(kernel, qkv, b, a, a_log, dt_bias, state, slots=slots)

    def prove() -> None:
        whole = _with_state(run, state)
        for config in delta_recurrent.CONFIGS:
            assert_bits(str(config), _with_state(run, state, config=config), whole)
        one, slot = _one(slots), slots.read[:1]
        alone = partial(run.func, qkv[:queries].clone(), b[:queries], a[:queries], a_log, dt_bias, state, slots=one)
        out, left = _with_state(alone, state)
        assert_bits("sequence alone", (out, left[slot]), (whole[0][:queries], whole[1][slot]))
        reference = getattr(ops, op).reference
        exact = state.cpu().double()
        wanted = reference(
            *(x[:queries].cpu().double() for x in (qkv, b, a)), a_log.cpu(), dt_bias.cpu(), exact, slots=_on_cpu(one)
        )
        for what, got, right, bound in (("out", out, wanted, 5e-3), ("state", left[slot], exact[slot.cpu()], 1e-5)):
            error = (got.cpu().double() - right).norm() / right.norm()
            assert error < bound, f"{what}: relative error {error:.2e}"

    return Case(
        op=op,
        shape=f"B{batch} Q{queries} H{k_heads}/{heads} {_DIM}x{_DIM}",
        run=run,
        prove=prove,
        num_bytes=2 * state.nbytes + wide.nbytes + 2 * num_rows * heads * _DIM,
        target=Target("us", 6.0) if num_rows == 1 else Target("copy", 0.8) if num_rows == 64 else None,
        baseline=partial(_torch_rule, qkv, b, a, a_log, dt_bias, state, slots=slots),
        baseline_name="torch gates, matmul, mul_, add_",
        variants=[(config, partial(run, config=config)) for config in delta_recurrent.TIMED],
        tune_key=(op, delta_recurrent.shape_class(batch, heads, _DIM, _DIM)),
    )


def _torch_conv(x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, *, slots: StateSlots) -> torch.Tensor:
    """Convolve windows in slot order."""
    batch, channels = slots.num_sequences, x.shape[1]
    inputs = torch.cat((window, x.reshape(batch, -1, channels)), 1)
    window.copy_(inputs[:, slots.num_queries :])
    return F.silu((inputs.unfold(1, _TAPS, 1) * weight).sum(-1)).flatten(0, 1)


def _conv(batch: int, queries: int, channels: int) -> Case:
    # Tap-major, as layers store it.
    x, weight = _rows(batch * queries, channels + 4096 + 64)[:, :channels], _rows(_TAPS, channels).t()
    window, slots = _rows(batch, _TAPS - 1, channels), _slots(batch, queries)
    kernel = causal_conv1d.causal_conv1d_update
    # The window is the last argument, as the state is for the rule.
    run = partial(kernel, x, weight, window, slots=slots)

    def prove() -> None:
        whole = _with_state(run, window)
        for config in causal_conv1d.CONFIGS:
            assert_bits(str(config), _with_state(run, window, config=config), whole)
        one, slot = _one(slots), slots.read[:1]
        stored = partial(kernel, x, weight.contiguous(), window, slots=slots)
        assert_bits("weight as stored", _with_state(stored, window), whole)
        out, left = _with_state(partial(kernel, x[:queries].clone(), weight, window, slots=one), window)
        assert_bits("sequence alone", (out, left[slot]), (whole[0][:queries], whole[1][slot]))
        kept = window.cpu()
        wanted = ops.causal_conv1d_update.reference(x[:queries].cpu(), weight.cpu(), kept, slots=_on_cpu(one))
        assert_bits("window", left[slot].cpu(), kept[slot.cpu()])
        error = (out.cpu().double() - wanted.double()).norm() / wanted.double().norm()
        assert error < 5e-3, f"relative error {error:.2e}"

    return Case(
        op="causal_conv1d_update",
        shape=f"B{batch} Q{queries} C{channels}",
        run=run,
        prove=prove,
        num_bytes=2 * window.nbytes + 4 * batch * queries * channels + weight.nbytes,
        baseline=partial(_torch_conv, x, weight, window, slots=slots),
        baseline_name="torch cat, copy_, mul, sum, silu",
        variants=[(config, partial(run, config=config)) for config in causal_conv1d.CONFIGS],
        tune_key=("causal_conv1d_update", causal_conv1d.shape_class(batch, channels)),
    )


def _torch_conv_prompt(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, *, chunks: PromptChunks
) -> torch.Tensor:
    """Convolve one prompt after another."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for slot, begin, end, *_ in chunks.parts:
        inputs = torch.cat((window[slot], x[begin:end]))
        window[slot].copy_(inputs[1 - _TAPS :])
        done = F.conv1d(inputs.t().unsqueeze(0), weight.unsqueeze(1), groups=x.shape[1])
        out[begin:end] = F.silu(done)[0].t()
    return out


def _conv_prefill(lengths: tuple[int, ...], channels: int) -> Case:
    num_rows, num = sum(lengths), len(lengths)
    x, weight = _rows(num_rows, channels + 64)[:, :channels], _rows(_TAPS, channels).t()
    window = _rows(num, _TAPS - 1, channels)
    # Every second prompt continues from its slot's state.
    chunks = PromptChunks.plan(lengths, [64 * (i % 2) for i in range(num)], range(num), device="cuda")
    kernel = causal_conv1d_prefill.causal_conv1d_prefill
    run = partial(kernel, x, weight, window, chunks=chunks)

    def prove() -> None:
        whole, left = _with_state(run, window)
        for config in causal_conv1d_prefill.CONFIGS:
            assert_bits(str(config), _with_state(run, window, config=config), (whole, left))
        slot, begin, end, fresh, _ = chunks.parts[-1]
        alone = PromptChunks.plan([end - begin], [0 if fresh else 64], [slot], device="cuda")
        out, kept = _with_state(partial(kernel, x[begin:end], weight, window, chunks=alone), window)
        assert_bits("prompt alone", (out, kept[slot]), (whole[begin:end], left[slot]))
        # The last position, as a decode row computes it.
        before = torch.cat((window[slot] * (not fresh), x[begin : end - 1]))[1 - _TAPS :].unsqueeze(0)
        first = StateSlots.in_place(torch.zeros(1, dtype=torch.int64, device="cuda"))
        step = ops.causal_conv1d_update(x[end - 1 : end], weight, before.clone(), slots=first)
        assert_bits("as a step", step, out[-1:])

    return Case(
        op="causal_conv1d_prefill",
        shape=f"T{num_rows} of {num} C{channels}",
        run=run,
        prove=prove,
        num_bytes=4 * num_rows * channels + 2 * window.nbytes + weight.nbytes,
        target=Target("copy", 0.8) if num_rows >= 4096 else None,
        baseline=partial(_torch_conv_prompt, x, weight, window, chunks=chunks),
        baseline_name="torch cat, conv1d, silu",
        variants=[(config, partial(run, config=config)) for config in causal_conv1d_prefill.CONFIGS],
        tune_key=("causal_conv1d_prefill", causal_conv1d_prefill.shape_class(channels)),
    )


def _torch_restore(state: torch.Tensor, window: torch.Tensor, *, moves: SlotMoves) -> None:
    """Restore moves that contain no -1."""
    for x in (state, window):
        x.index_copy_(0, moves.target, x.index_select(0, moves.source))


def _restore(count: int, room: int, channels: int) -> Case:
    """Return a case with `count` moves between slots of a layer, in a list of size `room`."""
    state = torch.randn(2 * room, 32, _DIM, _DIM, device="cuda")
    window = _rows(2 * room, _TAPS - 1, channels)
    pairs = [(room + n, n) if n < count else (-1, 0) for n in range(room)]
    moves = SlotMoves.plan(pairs, device="cuda")
    run = partial(restore_slots.restore_slots, state, window, moves=moves)

    def prove() -> None:
        wanted = state.clone(), window.clone()
        _torch_restore(*wanted, moves=SlotMoves.plan(pairs[:count], device="cuda"))
        for config in restore_slots.CONFIGS:
            got = state.clone(), window.clone()
            run.func(*got, moves=moves, config=config)
            assert_bits(str(config), got, wanted)

    return Case(
        op="restore_slots",
        shape=f"{count} of {room}, H32 {_DIM}x{_DIM} C{channels}",
        run=run,
        prove=prove,
        num_bytes=2 * count * (state[0].nbytes + window[0].nbytes),
        target=Target("copy", 0.8) if count == room else None,
        baseline=partial(_torch_restore, state, window, moves=moves) if count == room else None,
        baseline_name="torch index_select, index_copy_",
        variants=[(config, partial(run, config=config)) for config in restore_slots.CONFIGS],
    )


def _torch_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, sigmoid: bool
) -> torch.Tensor:
    factor = gate.float().sigmoid() if sigmoid else F.silu(gate.float())
    return (F.rms_norm(x, x.shape[2:], weight, eps).flatten(1) * factor).to(x.dtype)


def _norm(num_rows: int, *, sigmoid: bool) -> Case:
    heads = 32
    x, weight = _rows(num_rows, heads, _DIM), _rows(_DIM)
    gate = _rows(num_rows, 3 * heads * _DIM)[:, heads * _DIM : 2 * heads * _DIM]
    run = partial(gated_rms_norm.gated_rms_norm, x, gate, weight, 1e-6, sigmoid=sigmoid)

    def prove() -> None:
        whole = run()
        last = ops.gated_rms_norm(x[-1:].clone(), gate[-1:], weight, 1e-6, sigmoid=sigmoid)
        assert_bits("row alone", last, whole[-1:])
        some = x[-64:].double()
        normed = some / (some.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        opened = gate[-64:].double()
        exact = normed.flatten(1) * (opened.sigmoid() if sigmoid else F.silu(opened))
        error = (whole[-64:].double() - exact).norm() / exact.norm()
        assert error < 1e-2, f"relative error {error:.2e}"

    return Case(
        op="gated_rms_norm",
        shape=f"T{num_rows} H{heads} D{_DIM} {'sigmoid' if sigmoid else 'silu'}",
        run=run,
        prove=prove,
        num_bytes=6 * num_rows * heads * _DIM,
        target=Target("copy", 0.8) if num_rows == 4096 else None,
        baseline=partial(_torch_norm, x, gate, weight, 1e-6, sigmoid=sigmoid),
        baseline_name="F.rms_norm, silu, mul",
    )
