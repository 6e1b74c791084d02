"""Triton: residual addition, norm, router product and top-k, as one launch for few rows and as their chain for others.

Every program normalises all rows by itself, which costs less than a launch while they are few, and multiplies them by
its slice of the experts: `linear`'s product, whose bits no tile shows. It reads its rows back from the output, where
all programs store the same bytes. The one that arrives last at a counter finds all logits and chooses. Slices of a
weight that no running launch writes (`static_weight`) are asked for before the launch ahead has ended.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from moeyard_kernels.common import launch, tuning
from moeyard_kernels.common.dependent import dependent, let_next_begin, wait_for_previous
from moeyard_kernels.common.rounding import INTERPRETED, product, round_to
from moeyard_kernels.elementwise.rms_norm import NUM_WARPS, add_norm_rows, add_rms_norm, row_tile
from moeyard_kernels.experts.topk_gate import choice_constants, choose_experts, topk_gate
from moeyard_kernels.linear.linear import linear
from moeyard_kernels.types.gate import GateRule

OP = "norm_gate"
# How many values of rows are one launch: each of its programs normalises them all, a tile of the norm after another.
FEW_VALUES = 16 * 1024
# Rows of a multiple of this many values: others' norm is laid out over the threads, and so summed, as a kernel goes.
_VALUES = 128
# Logits that one program holds while it chooses.
_CHOSEN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig(tuning.Config):
    """All rows, padded to BM, by BN experts, H in steps of BK; SWAP: the weight on the left.

    AHEAD steps of the weight are loaded before the rows are there, the rest of H is a loop of num_stages steps. Warps
    are those of the norm, whose sums depend on them.
    """

    kernel: Literal["gate"] = "gate"
    BM: int
    BN: int
    BK: int
    AHEAD: int
    SWAP: bool = False


def _config(BM: int, BN: int, BK: int, *, AHEAD: int = 0, SWAP: bool = False, num_stages: int = 4) -> GateConfig:
    return GateConfig(BM=BM, BN=BN, BK=BK, AHEAD=AHEAD, SWAP=SWAP, num_warps=NUM_WARPS, num_stages=num_stages)


# Rows on the left fill 16 rows of `mma.sync` or the 64 of wgmma; on the right, 8 columns of `mma.sync`.
CONFIGS: tuple[GateConfig, ...] = (
    _config(8, 16, 512, SWAP=True),
    _config(8, 16, 256, SWAP=True, num_stages=6),
    _config(8, 16, 256, SWAP=True, AHEAD=8),
    _config(8, 16, 512, SWAP=True, AHEAD=4),
    _config(8, 32, 256, SWAP=True, num_stages=5),
    _config(16, 16, 256, num_stages=6),
    _config(16, 16, 512),
    _config(16, 8, 256, num_stages=8),
    _config(16, 16, 256, SWAP=True, num_stages=6),
    _config(32, 16, 256, num_stages=5),
    _config(32, 16, 256, SWAP=True, num_stages=5),
    _config(64, 16, 128, num_stages=8),
    _config(64, 16, 256, num_stages=4),
    _config(64, 32, 128, num_stages=8),
    _config(64, 16, 128, SWAP=True, num_stages=8),
)


def shape_class(num_rows: int, num_experts: int, hidden: int) -> str:
    """The class that configs are stored under."""
    return f"M{next(r for r in (1, 8, 16, 32, 64) if num_rows <= r)} E{num_experts} H{hidden}"


def configs_for(num_rows: int) -> tuple[GateConfig, ...]:
    """The configs worth trying for that many rows: as few as hold them, and those of 64 rows, another instruction."""
    least = min(c.BM for c in CONFIGS if num_rows <= c.BM)
    return tuple(c for c in CONFIGS if c.BM in (least, 64) or (c.BM, least) == (16, 8))


def default_config(num_rows: int) -> GateConfig:
    """The config of shapes that nobody tuned."""
    return next(c for c in CONFIGS if num_rows <= c.BM)


@triton.jit
def _fetch(p_w, o_n, H: tl.constexpr, BL: tl.constexpr):
    """Ask for rows o_n of the weight in the L2: a hint, which reads nothing and so need not wait for anyone."""
    if not INTERPRETED:
        LINE: tl.constexpr = 128 // (p_w.dtype.element_ty.primitive_bitwidth // 8)
        o_l = tl.minimum(tl.arange(0, BL) * LINE, H - 1)
        p_line = (p_w + o_n.to(tl.int64)[:, None] * H + o_l[None, :]).to(tl.int64)
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [p_line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _slice(p_bw, o_k, H: tl.constexpr, EVEN_K: tl.constexpr):
    """One step of a program's experts, [BN, BK]."""
    m_w = None if EVEN_K else (o_k < H)[None, :]
    return tl.load(p_bw + o_k[None, :], mask=m_w, other=None if EVEN_K else 0.0)


@triton.jit
def _rows(p_by, m_m, o_k, H: tl.constexpr, EVEN_K: tl.constexpr):
    """One step of the rows, [BM, BK]."""
    m_y = m_m[:, None]
    if not EVEN_K:
        m_y = m_y & (o_k < H)[None, :]
    return tl.load(p_by + o_k[None, :], mask=m_y, other=0.0)


@triton.jit(do_not_specialize=["T"])
def _norm_gate_kernel(
    p_x, p_residual, p_norm, p_w, p_bias, p_out, p_total, p_logits, p_weights, p_ids, p_arrived, T, D, E, SIZE, eps,
    scaling, H: tl.constexpr, ROUND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    AHEAD: tl.constexpr, SWAP: tl.constexpr, STATIC: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    NORM_STAGES: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2SUM: tl.constexpr,
    BT: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BKK: tl.constexpr,
):  # fmt: skip
    """T <= BM rows of D = H values by experts [i BN, i BN + BN) of E; logits [T, E] fp32, rounded to p_w's if ROUND.

    [BR, BD] is the norm's tile, BT rows are chosen for at once. p_arrived [1] is zero before and after. Grid:
    (ceil(E / BN),).
    """
    EVEN_K: tl.constexpr = H % BK == 0
    o_m, o_k = tl.arange(0, BM), tl.arange(0, BK)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_m = o_m < T
    # Experts past the last repeat it: their results are not stored.
    o_w = tl.minimum(o_n, E - 1)
    p_bw = p_w + o_w.to(tl.int64)[:, None] * H
    if AHEAD * BK < H:
        _fetch(p_w, o_w, H, BL)
    if not STATIC:
        wait_for_previous()
        let_next_begin()
    b_ws = ()
    for u in tl.static_range(AHEAD):
        b_w = _slice(p_bw, u * BK + o_k, H, EVEN_K)
        # Triton has no unpacking.
        b_ws = b_ws + (b_w,)  # type: ignore[assignment]  # noqa: RUF005
    if STATIC:
        wait_for_previous()
        let_next_begin()

    for i_block in tl.range(0, tl.cdiv(T, BR), num_stages=NORM_STAGES):
        # The interpreter's loops count in plain integers.
        i_rows = tl.full([], i_block, tl.int64)
        add_norm_rows(p_x, p_residual, p_norm, p_out, p_total, i_rows, T, D, eps, BR, BD, False)
    # Threads read what others of the program stored.
    tl.debug_barrier()
    p_by = p_out + o_m.to(tl.int64)[:, None] * H
    b_acc = tl.zeros([BN, BM] if SWAP else [BM, BN], dtype=tl.float32)
    b_ys = ()
    for u in tl.static_range(AHEAD + 1):
        # Rows of the next step are on their way while one is multiplied.
        if u < AHEAD:
            b_y = _rows(p_by, m_m, u * BK + o_k, H, EVEN_K)
            b_ys = b_ys + (b_y,)  # type: ignore[assignment]  # noqa: RUF005
        if u > 0:
            b_acc = product(b_ys[u - 1], b_ws[u - 1], b_acc, SWAP)  # type: ignore[misc]
    for i_k in range(AHEAD * BK, H, BK):
        b_acc = product(
            _rows(p_by, m_m, i_k + o_k, H, EVEN_K), _slice(p_bw, i_k + o_k, H, EVEN_K), b_acc, SWAP
        )  # fmt: skip
    if SWAP:
        b_acc = tl.trans(b_acc)
    if ROUND:
        b_acc = round_to(b_acc, p_w.dtype.element_ty)
    tl.store(p_logits + o_m[:, None] * E + o_n[None, :], b_acc, mask=m_m[:, None] & (o_n < E)[None, :])

    # All threads' logits, then the program's arrival, which releases them; whoever comes last acquires all others'.
    tl.debug_barrier()
    i_arrived = tl.atomic_add(p_arrived, 1, sem="acq_rel", scope="gpu")
    if i_arrived == tl.num_programs(0) - 1:
        tl.debug_barrier()
        tl.store(p_arrived, 0)
        for i_block in range(0, tl.cdiv(T, BT)):
            i_rows = tl.full([], i_block, tl.int64)
            choose_experts(
                p_logits, p_bias, p_weights, p_ids, i_rows, T, E, SIZE, scaling, K, SOFTMAX, RENORMALIZE, HAS_BIAS,
                NUM_GROUPS, TOPK_GROUPS, TOP2SUM, BT, BG, BS, BKK, ".cg",
            )  # fmt: skip


def chain(
    x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    rule: GateRule, *, eps: float, fp32_logits: bool = False, static_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """A launch for each step: the bits of `norm_gate`."""
    normed, total = add_rms_norm(x, residual, norm, eps)
    out_dtype = torch.float32 if fp32_logits else None
    logits = linear(normed.to(weight.dtype), weight, static_weight=static_weight, out_dtype=out_dtype)
    return normed, total, *topk_gate(logits, bias=bias, **asdict(rule))


def norm_gate(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: GateRule,
    *,
    eps: float,
    arrived: torch.Tensor,
    fp32_logits: bool = False,
    static_weight: bool = False,
    config: GateConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `moeyard_kernels.ops.norm_gate`. One launch with a `config` (one of CONFIGS), and for few rows in bf16."""
    launch.check_layout(OP, x=x, residual=residual, norm=norm, weight=weight, bias=bias, arrived=arrived)
    num_rows, hidden = x.shape
    num_experts = weight.shape[0]
    fits = hidden % _VALUES == 0 and weight.dtype == torch.bfloat16
    if config is None and not (fits and 0 < num_rows <= min(FEW_VALUES // hidden, CONFIGS[-1].BM)):
        return chain(
            x, residual, norm, weight, bias, rule, eps=eps, fp32_logits=fp32_logits, static_weight=static_weight
        )
    if config is None:
        name = shape_class(num_rows, num_experts, hidden)
        config = tuning.choose(OP, name, x, (GateConfig,), lambda: default_config(num_rows))
    if not fits or not 0 < num_rows <= config.BM:
        raise ValueError(f"{OP}: {weight.dtype} [{num_rows}, {hidden}] does not fit {config}")
    out, total = launch.new_output(num_rows, hidden, like=x), launch.new_output(num_rows, hidden, like=x)
    logits = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x.device)
    weights = torch.empty(num_rows, rule.top_k, dtype=torch.float32, device=x.device)
    ids = torch.empty(num_rows, rule.top_k, dtype=torch.int64, device=x.device)
    constants: dict[str, Any] = choice_constants(rule, num_experts, has_bias=bias is not None)
    constants["BKK"] = constants.pop("BK")
    # At least a row for each warp, so that none waits for others within a row.
    chosen = max(NUM_WARPS, triton.next_power_of_2(num_rows))
    chosen = min(chosen, max(NUM_WARPS, _CHOSEN // (constants["BG"] * constants["BS"])))
    rows, block = row_tile(hidden)
    _norm_gate_kernel[(triton.cdiv(num_experts, config.BN),)](
        x, residual, norm, weight, x if bias is None else bias, out, total, logits, weights, ids, arrived, num_rows,
        hidden, num_experts, num_experts // constants["NUM_GROUPS"], eps, float(rule.scaling), H=hidden,
        ROUND=not fp32_logits, BM=config.BM, BN=config.BN, BK=config.BK,
        AHEAD=min(config.AHEAD, triton.cdiv(hidden, config.BK)), SWAP=config.SWAP, STATIC=static_weight,
        BL=triton.next_power_of_2(triton.cdiv(hidden * weight.element_size(), 128)), BR=rows,
        BD=block, NORM_STAGES=1 if num_rows <= rows else 3, BT=chosen, **constants, **config.options,
        **dependent(x), enable_fp_fusion=False,
    )  # fmt: skip
    return launch.finish(out, x.dtype), launch.finish(total, x.dtype), weights, ids
