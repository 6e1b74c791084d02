"""The door to linear attention: short convolution, the gated delta rule over states in slots, gated norm. See `ops`."""

import torch

from moeyard_kernels.common.checks import FLOATS, check_devices, show
from moeyard_kernels.door.load import kernel
from moeyard_kernels.types.prompt_chunks import PromptChunks
from moeyard_kernels.types.state_slots import SlotMoves, StateSlots


def causal_conv1d_update(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, *, slots: StateSlots
) -> torch.Tensor:
    """silu of the convolution of decode rows x [B Q, C] by weight [C, K] -> [B Q, C], rounded once, to x's dtype.

    window [num_slots, K - 1, C] holds the inputs before a sequence's next position: those of slot `slots.read` come
    before the first query, and what is left behind query j goes to slot `slots.write`. x, weight and window share a
    dtype, fp32 or bf16, K is at most 8; the products and their sums are fp32, each rounded, in the order of the
    positions. Rows of x may be slices of wider ones, and the weight is contiguous or (read faster) its transpose is.
    Padding sequences give zeros. Slots must lie in [-1, num_slots): checked on a CPU, and on a GPU within
    `launch.checked()`.
    """
    op = "causal_conv1d_update"
    if x.dim() != 2 or x.dtype not in FLOATS or x.shape[0] != slots.num_rows:
        raise ValueError(f"{op}: x must be fp32 or bf16 [{slots.num_rows}, C], got {show(x)}")
    _check_conv(op, x, weight, window)
    check_devices(op, x=x, weight=weight, window=window, slots=slots.read)
    return kernel("linear_attention.causal_conv1d", x).causal_conv1d_update(x, weight, window, slots=slots)


def causal_conv1d_prefill(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor, *, chunks: PromptChunks
) -> torch.Tensor:
    """`causal_conv1d_update` over whole prompts: rows x [T, C] of `chunks` -> [T, C], the same bits at each position.

    The inputs before a prompt's first row come from its slot, zeros where it begins at position 0; its last K - 1 are
    left there, and those before each of its snapshots in that one's slot. K is at most 8.
    """
    op = "causal_conv1d_prefill"
    if x.dim() != 2 or x.dtype not in FLOATS or x.shape[0] != chunks.num_rows:
        raise ValueError(f"{op}: x must be fp32 or bf16 [{chunks.num_rows}, C], got {show(x)}")
    _check_conv(op, x, weight, window)
    if chunks.last_slot >= window.shape[0]:
        raise ValueError(f"{op}: slot {chunks.last_slot} is none of window {show(window)}")
    check_devices(op, x=x, weight=weight, window=window, table=chunks.table)
    return kernel("linear_attention.causal_conv1d_prefill", x).causal_conv1d_prefill(x, weight, window, chunks=chunks)


def gdn_recurrent(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    slots: StateSlots,
    static_state: bool = False,
) -> torch.Tensor:
    """Gated DeltaNet (arXiv 2412.06464) of decode rows -> [B Q, Hv, Dv] in qkv's dtype, and their states, in place.

    qkv [B Q, 2 Hk Dk + Hv Dv] holds queries, keys and values as the convolution gives them; b and a are [B Q, Hv]; all
    three fp32 or bf16, each row contiguous. a_log, dt_bias [Hv] and state [num_slots, Hv, Dk, Dv] are fp32. In fp32:
    queries and keys are normalised (1e-6 beside the sum of squares), queries scaled by Dk^-0.5, and for each row

        S <- exp(-exp(a_log) softplus(a + dt_bias)) S;  S <- S + k (sigmoid(b) (v - k S));  out = q S

    Value head h reads with key head h // (Hv // Hk). A sequence goes on from slot `slots.read` and leaves what is
    behind query j in slot `slots.write`. Queries one by one and several at once give the same bits. Padding sequences
    give zeros. Slots must lie in [-1, num_slots): checked on a CPU, and on a GPU within `launch.checked()`.
    static_state: the caller knows that no launch still at work writes `slots` or any state that they name, as when they
    belong to the step before and a product ran in between: a GPU may then read them before the launch ahead has ended.
    """
    _check_rule("gdn_recurrent", qkv, b, a, a_log, dt_bias, state, by_row=False)
    _check_rows_of("gdn_recurrent", qkv, slots)
    return kernel("linear_attention.delta_recurrent", qkv).gdn_recurrent(
        qkv, b, a, a_log, dt_bias, state, slots=slots, static_state=static_state
    )


def kda_recurrent(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    slots: StateSlots,
    static_state: bool = False,
) -> torch.Tensor:
    """Kimi Delta Attention (arXiv 2510.26692) of decode rows: `gdn_recurrent` with a gate of each row of the state.

    a is [B Q, Hv Dk] and dt_bias [Hv, Dk]; row d of head h's state keeps exp(-exp(a_log[h]) softplus(a + dt_bias)).
    """
    _check_rule("kda_recurrent", qkv, b, a, a_log, dt_bias, state, by_row=True)
    _check_rows_of("kda_recurrent", qkv, slots)
    return kernel("linear_attention.delta_recurrent", qkv).kda_recurrent(
        qkv, b, a, a_log, dt_bias, state, slots=slots, static_state=static_state
    )


def gdn_step(
    qkv: torch.Tensor, conv: torch.Tensor, window: torch.Tensor, b: torch.Tensor, a: torch.Tensor,
    a_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor, gate: torch.Tensor, norm: torch.Tensor,
    eps: float, *, slots: StateSlots, sigmoid: bool = False, rows: torch.Tensor | None = None,
    static_state: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`causal_conv1d_update`, `gdn_recurrent` and `gated_rms_norm` of decode rows, bit for bit -> [B Q, Hv Dv].

    qkv [B Q, C] by conv [C, K] over window [num_slots, K - 1, C]; the rule with b, a, a_log, dt_bias and state; its
    results, or those of `rows`, normalised by norm [Dv] and eps, times silu or sigmoid of gate [B Q, Hv Dv]. Arguments
    are those of the three; qkv, b, a and gate may be slices of wider rows. On a GPU three launches, or two where a
    stored config says so, there are one query each, and conv's transpose is contiguous. static_state: as in
    `gdn_recurrent`, of the windows too.
    """
    _check_step("gdn_step", qkv, conv, window, (b, a, a_log, dt_bias, state), gate, norm, slots, rows)
    return kernel("linear_attention.delta_step", qkv).gdn_step(
        qkv, conv, window, b, a, a_log, dt_bias, state, gate, norm, eps,
        slots=slots, sigmoid=sigmoid, rows=rows, static_state=static_state,
    )  # fmt: skip


def kda_step(
    qkv: torch.Tensor, conv: torch.Tensor, window: torch.Tensor, b: torch.Tensor, a: torch.Tensor,
    a_log: torch.Tensor, dt_bias: torch.Tensor, state: torch.Tensor, gate: torch.Tensor, norm: torch.Tensor,
    eps: float, *, slots: StateSlots, sigmoid: bool = False, rows: torch.Tensor | None = None,
    static_state: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`gdn_step` with the rule of `kda_recurrent`."""
    _check_step("kda_step", qkv, conv, window, (b, a, a_log, dt_bias, state), gate, norm, slots, rows)
    return kernel("linear_attention.delta_step", qkv).kda_step(
        qkv, conv, window, b, a, a_log, dt_bias, state, gate, norm, eps,
        slots=slots, sigmoid=sigmoid, rows=rows, static_state=static_state,
    )  # fmt: skip


def gdn_chunk_prefill(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    chunks: PromptChunks,
) -> torch.Tensor:
    """`gdn_recurrent` over whole prompts, in chunks of 64 positions: rows [T, ...] of `chunks` -> [T, Hv, Dv].

    The same rule of the same arguments, as a linear system of each chunk (arXiv 2412.06464), so not the bits of
    `gdn_recurrent`. A prompt goes on from the state in its slot, from zeros where it begins at position 0 (whatever the
    slot holds), and leaves there what is behind its last row; and in the slot of each of its snapshots, what one that
    ended there would leave. A row's bits and the state's depend neither on the other prompts nor on how one was cut
    into steps. On a GPU the products of bf16 rows run on tensor cores with operands in
    bf16 and sums in fp32; gates, their sums and the state between chunks are fp32. Relative error of the outputs
    against float64: at most 5e-3.
    """
    _check_rule("gdn_chunk_prefill", qkv, b, a, a_log, dt_bias, state, by_row=False)
    _check_prompts("gdn_chunk_prefill", qkv, state, chunks)
    return kernel("linear_attention.delta_chunk", qkv).gdn_chunk_prefill(
        qkv, b, a, a_log, dt_bias, state, chunks=chunks
    )


def kda_chunk_prefill(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    *,
    chunks: PromptChunks,
) -> torch.Tensor:
    """`gdn_chunk_prefill` of Kimi Delta Attention (arXiv 2510.26692), with the arguments of `kda_recurrent`."""
    _check_rule("kda_chunk_prefill", qkv, b, a, a_log, dt_bias, state, by_row=True)
    _check_prompts("kda_chunk_prefill", qkv, state, chunks)
    return kernel("linear_attention.delta_chunk", qkv).kda_chunk_prefill(
        qkv, b, a, a_log, dt_bias, state, chunks=chunks
    )


def restore_slots(state: torch.Tensor, window: torch.Tensor, *, moves: SlotMoves) -> None:
    """Copy slot `moves.source[n]` of a layer's state [num_slots, Hv, Dk, Dv] and window [num_slots, K - 1, C] to slot
    `moves.target[n]`, where it is no -1.

    state is fp32, window fp32 or bf16, both contiguous. Slots must lie in [0, num_slots): checked on a CPU, and on a
    GPU within `launch.checked()`.
    """
    op = "restore_slots"
    if state.dim() != 4 or state.dtype != torch.float32:
        raise ValueError(f"{op}: state must be fp32 [slots, Hv, Dk, Dv], got {show(state)}")
    if window.dim() != 3 or window.dtype not in FLOATS or window.shape[0] != state.shape[0]:
        raise ValueError(f"{op}: window must be fp32 or bf16 [{state.shape[0]}, K - 1, C], got {show(window)}")
    check_devices(op, state=state, window=window, source=moves.source)
    kernel("linear_attention.restore_slots", state).restore_slots(state, window, moves=moves)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, sigmoid: bool = False,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """rms_norm(x) * silu(gate), or sigmoid(gate), for x [T, H, D], gate [T, H D], weight [D] -> [T, H D] in x's dtype.

    The gate is activated and multiplied in fp32, and the product rounded once; a weight in fp32 rounds nothing before
    (Kimi-Linear), one of x's dtype as in `rms_norm`. Rows of the gate may be slices of wider ones. rows [T] int64: row
    t of x is x[rows[t]], with the gate of row t; checked on a CPU, and on a GPU within `launch.checked()`.
    """
    op = "gated_rms_norm"
    if x.dim() != 3 or x.dtype not in FLOATS:
        raise ValueError(f"{op}: x must be fp32 or bf16 [T, H, D], got {show(x)}")
    _check_gated(op, tuple(x.shape), x.dtype, gate, weight, rows)
    check_devices(op, x=x, gate=gate, weight=weight, rows=rows)
    return kernel("elementwise.gated_rms_norm", x).gated_rms_norm(x, gate, weight, eps, sigmoid=sigmoid, rows=rows)


def _check_gated(
    op: str, shape: tuple[int, ...], dtype: torch.dtype, gate: torch.Tensor, weight: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:  # fmt: skip
    x = f"x {str(dtype).removeprefix('torch.')} {list(shape)}"
    if gate.shape != (shape[0], shape[1] * shape[2]) or gate.dtype not in FLOATS:
        raise ValueError(f"{op}: gate {show(gate)} does not fit {x}")
    if weight.shape != shape[2:] or weight.dtype not in (dtype, torch.float32):
        raise ValueError(f"{op}: weight {show(weight)} does not fit {x}")
    if rows is not None and (rows.shape != shape[:1] or rows.dtype != torch.int64):
        raise ValueError(f"{op}: rows {show(rows)}, expected int64 [{shape[0]}]")


def _check_step(
    op: str, qkv: torch.Tensor, conv: torch.Tensor, window: torch.Tensor, rule: tuple[torch.Tensor, ...],
    gate: torch.Tensor, norm: torch.Tensor, slots: StateSlots, rows: torch.Tensor | None,
) -> None:  # fmt: skip
    b, a, a_log, dt_bias, state = rule
    _check_rule(op, qkv, b, a, a_log, dt_bias, state, by_row=op == "kda_step")
    _check_rows_of(op, qkv, slots)
    _check_conv(op, qkv, conv, window)
    if window.shape[0] != state.shape[0]:
        raise ValueError(f"{op}: window {show(window)} has other slots than state {show(state)}")
    _check_gated(op, (qkv.shape[0], state.shape[1], state.shape[3]), qkv.dtype, gate, norm, rows)
    check_devices(op, qkv=qkv, conv=conv, window=window, gate=gate, norm=norm, rows=rows)


def _check_conv(op: str, x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor) -> None:
    if weight.dim() != 2 or weight.shape[0] != x.shape[1] or not 2 <= weight.shape[1] <= 8 or weight.dtype != x.dtype:
        raise ValueError(f"{op}: weight {show(weight)} does not fit x {show(x)}")
    if window.dim() != 3 or window.shape[1:] != (weight.shape[1] - 1, x.shape[1]) or window.dtype != x.dtype:
        raise ValueError(f"{op}: window {show(window)} does not fit weight {show(weight)}")


def _check_rows_of(op: str, qkv: torch.Tensor, slots: StateSlots) -> None:
    if qkv.shape[0] != slots.num_rows:
        raise ValueError(f"{op}: the slots are for {slots.num_rows} rows, qkv is {show(qkv)}")
    check_devices(op, qkv=qkv, slots=slots.read)


def _check_prompts(op: str, qkv: torch.Tensor, state: torch.Tensor, chunks: PromptChunks) -> None:
    if qkv.shape[0] != chunks.num_rows:
        raise ValueError(f"{op}: the chunks are of {chunks.num_rows} rows, qkv is {show(qkv)}")
    if chunks.last_slot >= state.shape[0]:
        raise ValueError(f"{op}: slot {chunks.last_slot} is none of state {show(state)}")
    check_devices(op, qkv=qkv, table=chunks.table)


def _check_rule(
    op: str, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    state: torch.Tensor, *, by_row: bool,
) -> None:  # fmt: skip
    if state.dim() != 4 or state.dtype != torch.float32:
        raise ValueError(f"{op}: state must be fp32 [slots, Hv, Dk, Dv], got {show(state)}")
    num_heads, k_dim, v_dim = state.shape[1:]
    if qkv.dim() != 2 or qkv.dtype not in FLOATS:
        raise ValueError(f"{op}: qkv must be fp32 or bf16 [T, 2 Hk Dk + Hv Dv], got {show(qkv)}")
    keys, rest = divmod(qkv.shape[1] - num_heads * v_dim, 2 * k_dim)
    if rest or keys < 1 or num_heads % keys:
        raise ValueError(f"{op}: qkv {show(qkv)} does not fit state {show(state)}")
    rates = num_heads * k_dim if by_row else num_heads
    for name, x, width in (("b", b, num_heads), ("a", a, rates)):
        if x.shape != (qkv.shape[0], width) or x.dtype not in FLOATS:
            raise ValueError(f"{op}: {name} {show(x)}, expected fp32 or bf16 [{qkv.shape[0]}, {width}]")
    shape = (num_heads, k_dim) if by_row else (num_heads,)
    for name, x, wanted in (("a_log", a_log, (num_heads,)), ("dt_bias", dt_bias, shape)):
        if x.shape != wanted or x.dtype != torch.float32:
            raise ValueError(f"{op}: {name} {show(x)}, expected fp32 {list(wanted)}")
    check_devices(op, qkv=qkv, b=b, a=a, a_log=a_log, dt_bias=dt_bias, state=state)
