"""Triton: one token per row of logits, in a fixed chain of launches; `ref.sample` has the formulas.

    max      largest logit of each part of a row, lowest id first; of many groups of tokens if there is a top-k
    top      largest of the row: the token of a greedy row, the zero point of the weights of the others
    cut      (top-k) where top-k ends; mostly the token too                                      -> sample_cut
    race     best few of each part by log(weight / E) in fp32                                    -> sample_race
    rank     their exact scores in fp64: the token unless there is a top-p
    mass     (top-p) the mass before each of the best, in fixed point
    settle   (top-p) the best within the nucleus; a search of the row where the above leaves doubt

Which launches there are follows from which arguments are None; each is over at once for rows that have their token.
Every row keeps its numbers to itself, all that is combined across programs is exact (maxima, integer sums), and fp64 is
computed by the formulas of the reference, without contraction to fma: no tile, no batch and no order of programs shows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeyard_kernels import tuning
from moeyard_kernels.launch import MAX_GRID_Y, check_indices, check_layout
from moeyard_kernels.ref.sample import LogitEdits
from moeyard_kernels.sample_blocks import NO_ID, from_key, mass, to_key, values, weight
from moeyard_kernels.sample_cut import cut_kernel
from moeyard_kernels.sample_race import mass_kernel, race_kernel, rank_kernel, settle_kernel
from moeyard_kernels.tuning import Config

# Candidates of each part of a row, and those of a row that are tested against top-p.
_PER_PART = 4
_TESTED = 8
# Groups of tokens per program of the first launch, for top-k.
_GROUPS = 256


def _config(block: int, rounds: int, num_warps: int, *, race: int = 4096, mass: int = 512, list_: int = 4096) -> Config:
    return tuning.config(
        BLOCK=block, ROUNDS=rounds, RACE=race, MASS=mass, LIST=list_, num_warps=num_warps, num_stages=1
    )


# BLOCK x ROUNDS tokens per program that reads a row in parts (MASS at a time when it sums masses), RACE per program of
# the race, LIST tokens in which top-k is found in registers.
CONFIGS = (
    *(
        _config(b, r, w)
        for b, r, w in ((512, 4, 4), (1024, 4, 4), (1024, 8, 4), (2048, 4, 4), (2048, 4, 8), (2048, 8, 8))
    ),
    *(_config(1024, 8, 4, race=race, mass=mass) for race in (2048, 4096) for mass in (256, 512, 1024)),
    _config(1024, 8, 4, list_=2048),
)


def shape_class(num_rows: int, vocab: int) -> str:
    """Rows up to a power of two, and the vocabulary."""
    return f"B{triton.next_power_of_2(num_rows)} V{vocab}"


def default_config(num_rows: int, vocab: int) -> Config:
    """Small parts where few rows must fill the machine."""
    return _config(1024, 8, 4) if num_rows * vocab > 2**21 else _config(512, 4, 4, race=2048)


@triton.jit
def _max_kernel(  # type: ignore[no-untyped-def]
    p_logits, p_words, p_bias, p_slots, p_penalties, p_key, p_id, p_groups, V, L,
    EDIT: tl.constexpr, GROUPS: tl.constexpr, ROUNDS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Key and lowest id of the largest of ROUNDS * BV logits, and the keys of GROUPS group maxima. Grid: (C, B)."""
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b_id = i_c * ROUNDS * BV + tl.arange(0, BV)
    b_best = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, b_id, b_id < V, V, L, EDIT)
    for r in tl.static_range(1, ROUNDS):
        o_v = (i_c * ROUNDS + r) * BV + tl.arange(0, BV)
        b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
        m_v = (b_x > b_best) | ((b_x != b_x) & (b_best == b_best))
        b_best = tl.where(m_v, b_x, b_best)
        b_id = tl.where(m_v, o_v, b_id)
    b_key = to_key(b_best)
    best = tl.max(b_key)
    o_c = i_b * tl.num_programs(0) + i_c
    tl.store(p_key + o_c, best)
    tl.store(p_id + o_c, tl.min(tl.where(b_key == best, b_id, NO_ID)))
    if GROUPS > 0:
        b_group = tl.max(tl.reshape(b_key, [GROUPS, BV // GROUPS], can_reorder=True), 1)
        tl.store(p_groups + o_c * GROUPS + tl.arange(0, GROUPS), b_group)


@triton.jit
def _top_kernel(  # type: ignore[no-untyped-def]
    p_key, p_id, p_temperature, p_top, p_open, p_ids, C, SAMPLED: tl.constexpr, BC: tl.constexpr
):
    """The largest logit of row i_b and its token; open says that the row is to be sampled."""
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)
    b_key = tl.load(p_key + i_b * C + o_c, mask=o_c < C, other=0)
    b_id = tl.load(p_id + i_b * C + o_c, mask=o_c < C, other=NO_ID)
    b_key = tl.where(o_c < C, b_key, tl.min(b_key))
    best = tl.max(b_key)
    tl.store(p_ids + i_b, tl.min(tl.where(b_key == best, b_id, NO_ID)).to(tl.int64))
    top = from_key(best)
    tl.store(p_top + i_b, top)
    if SAMPLED:
        finite = (top < float("inf")) & (top > -float("inf"))
        tl.store(p_open + i_b, (finite & (tl.load(p_temperature + i_b) > 0)).to(tl.int32))


@triton.jit
def _total_kernel(  # type: ignore[no-untyped-def]
    p_logits, p_top, p_total, V, SCALE: tl.constexpr, ROUNDS: tl.constexpr, BV: tl.constexpr
):
    """The sum of exp(logit - largest) of ROUNDS * BV tokens, in fixed point. Grid: (C, B)."""
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    top = tl.load(p_top + i_b)
    b_sum = tl.zeros([BV], dtype=tl.int64)
    for r in range(ROUNDS):
        o_v = (i_c * ROUNDS + r) * BV + tl.arange(0, BV)
        b_x = tl.load(p_logits + i_b * V + o_v, mask=o_v < V, other=-float("inf")).to(tl.float32)
        b_sum += mass(weight(b_x, top, 1.0), SCALE)
    tl.store(p_total + i_b * tl.num_programs(0) + i_c, tl.sum(b_sum))


@triton.jit
def _logprob_kernel(p_logits, p_top, p_total, p_ids, p_out, V, C, SCALE: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """log(exp(logit - largest) / total) of the chosen token; NaN if the largest logit is not finite."""
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)
    total = tl.sum(tl.load(p_total + i_b * C + o_c, mask=o_c < C, other=0)).to(tl.float64) * (1.0 / SCALE)
    top = tl.load(p_top + i_b).to(tl.float64)
    x = tl.load(p_logits + i_b * V + tl.load(p_ids + i_b)).to(tl.float64)
    total = tl.where((top < float("inf")) & (top > -float("inf")), total, float("nan"))
    tl.store(p_out + i_b, ((x - top) - tl.log(total)).to(tl.float32))


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    edits: LogitEdits | None = None,
    logprobs: bool = False,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `moeyard_kernels.ops.sample`. Raises ValueError for what its grid cannot hold."""
    num_rows, vocab = logits.shape
    if num_rows > MAX_GRID_Y or vocab > 2**30:
        raise ValueError(f"sample: logits [{num_rows}, {vocab}] exceed the grid of a GPU")
    check_layout(
        "sample", logits=logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds,
        positions=positions,
    )  # fmt: skip
    ids = logits.new_empty(num_rows, dtype=torch.int64)
    chosen = logits.new_empty(num_rows, dtype=torch.float32) if logprobs else None
    if not num_rows:
        return ids, chosen
    config = config or tuning.choose(
        "sample", shape_class(num_rows, vocab), logits, lambda: default_config(num_rows, vocab)
    )
    if edits is not None:
        check_layout("sample", words=edits.words, bias=edits.bias, slots=edits.slots, penalties=edits.penalties)
        check_indices("sample", low=-1, high=edits.words.shape[0], slots=edits.slots)
    if top_k is not None and temperature is not None:
        num_groups = _GROUPS * triton.cdiv(vocab, config["BLOCK"] * config["ROUNDS"])
    else:
        num_groups = 0
    rows = _largest(logits, edits, config, temperature=temperature, num_groups=num_groups, ids=ids)
    if temperature is not None:
        assert seeds is not None, "the door demands seeds"
        assert positions is not None, "the door demands positions"
        _draw(
            rows, config, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds,
            positions=positions, ids=ids,
        )  # fmt: skip
    if chosen is not None:
        raw = rows if edits is None else _largest(logits, None, config, temperature=None, num_groups=0, ids=None)
        _logprobs(raw, config, ids=ids, chosen=chosen)
    return ids, chosen


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows whose largest logit is known.

    inputs: pointers that every kernel begins with: logits and their edits. sizes: V and L. top: [B] as X. open: [B]
    int32, 1 where a token is still to be drawn. groups: [B, G] keys of group maxima. scale: of masses.
    """

    inputs: tuple[torch.Tensor, ...]
    sizes: tuple[int, int]
    edit: bool
    top: torch.Tensor
    open: torch.Tensor
    groups: torch.Tensor
    scale: float


def _largest(
    logits: torch.Tensor,
    edits: LogitEdits | None,
    config: Config,
    *,
    temperature: torch.Tensor | None,
    num_groups: int,
    ids: torch.Tensor | None,
) -> _Rows:
    """The largest logit of each row, and its id into `ids`."""
    num_rows, vocab = logits.shape
    if edits is None:
        inputs, width = (logits,) * 5, 0
    else:
        inputs, width = (logits, edits.words, edits.bias, edits.slots, edits.penalties), edits.bias.shape[1]
    num_parts = triton.cdiv(vocab, config["BLOCK"] * config["ROUNDS"])
    keys, values_ = (torch.int32, torch.float32) if edits is None else (torch.int64, torch.float64)
    key = logits.new_empty(num_rows, num_parts, dtype=keys)
    part_id = logits.new_empty(num_rows, num_parts, dtype=torch.int32)
    rows = _Rows(
        inputs=inputs,
        sizes=(vocab, width),
        edit=edits is not None,
        top=logits.new_empty(num_rows, dtype=values_),
        open=logits.new_empty(num_rows, dtype=torch.int32),
        groups=logits.new_empty(num_rows, num_groups, dtype=keys),
        # The mass of a row is below 2^62, a weight below 2^53.
        scale=2.0 ** min(52, 62 - (vocab - 1).bit_length()),
    )
    _max_kernel[num_parts, num_rows](
        *inputs, key, part_id, rows.groups, vocab, width,
        EDIT=rows.edit, GROUPS=num_groups // num_parts, ROUNDS=config["ROUNDS"], BV=config["BLOCK"],
        num_warps=config["num_warps"], enable_fp_fusion=False,
    )  # fmt: skip
    ids = logits.new_empty(num_rows, dtype=torch.int64) if ids is None else ids
    _top_kernel[num_rows,](
        key, part_id, ids if temperature is None else temperature, rows.top, rows.open, ids, num_parts,
        SAMPLED=temperature is not None, BC=triton.next_power_of_2(num_parts), num_warps=1,
    )  # fmt: skip
    return rows


def _draw(
    rows: _Rows,
    config: Config,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Overwrite the ids of open rows by tokens drawn from them."""
    num_rows, vocab = len(ids), rows.sizes[0]
    new = rows.top.new_empty
    cut_x, cut_id = new(num_rows), new(num_rows, dtype=torch.int32)
    of = {"EDIT": rows.edit, "MIN_P": min_p is not None, "enable_fp_fusion": False}
    # Where an argument is off, no kernel reads its pointer.
    min_p_, top_p_ = (temperature if x is None else x for x in (min_p, top_p))
    if top_k is not None:
        num_groups = rows.groups.shape[1]
        cut_kernel[num_rows,](
            *rows.inputs, rows.top, rows.open, temperature, top_k, top_p_, min_p_, seeds, positions, rows.groups,
            new(num_rows, config["LIST"], dtype=torch.int32), cut_x, cut_id, ids, *rows.sizes, num_groups,
            TOP_P=top_p is not None, SCALE=rows.scale, BG=triton.next_power_of_2(num_groups),
            BV=min(8192, triton.next_power_of_2(vocab)), BL=config["LIST"], num_warps=16, **of,
        )  # fmt: skip
    num_parts = triton.cdiv(vocab, config["RACE"])
    score = new(num_rows, num_parts * _PER_PART, dtype=torch.float32)
    candidate = new(score.shape, dtype=torch.int32)
    race_kernel[num_parts, num_rows](
        *rows.inputs, rows.top, rows.open, temperature, min_p_, seeds, positions, cut_x, cut_id, score, candidate,
        *rows.sizes, TOP_K=top_k is not None, J=_PER_PART, BV=config["RACE"], num_warps=8, **of,
    )  # fmt: skip
    best_x, best_id, sure = (new(num_rows, _TESTED, dtype=t) for t in (rows.top.dtype, torch.int32, torch.int32))
    rank_kernel[num_rows,](
        *rows.inputs, rows.top, rows.open, temperature, top_p_, min_p_, seeds, positions, score, candidate, best_x,
        best_id, sure, ids, *rows.sizes, score.shape[1], TOP_P=top_p is not None, J=_PER_PART, P=_TESTED,
        BN=triton.next_power_of_2(score.shape[1]), num_warps=4, **of,
    )  # fmt: skip
    num_parts = triton.cdiv(vocab, config["BLOCK"] * config["ROUNDS"])
    masses = new(num_rows, num_parts, _TESTED + 1, dtype=torch.int64)
    if top_p is not None:
        mass_kernel[num_parts, num_rows](
            *rows.inputs, rows.top, rows.open, temperature, top_p_, min_p_, cut_x, cut_id, best_x, best_id, masses,
            *rows.sizes, TOP_K=top_k is not None, SCALE=rows.scale, P=_TESTED,
            ROUNDS=config["BLOCK"] * config["ROUNDS"] // config["MASS"], BV=config["MASS"], num_warps=4, **of,
        )  # fmt: skip
    settle_kernel[num_rows,](
        *rows.inputs, rows.top, rows.open, temperature, top_p_, min_p_, seeds, positions, cut_x, cut_id, best_x,
        best_id, sure, masses, ids, *rows.sizes, num_parts, TOP_K=top_k is not None, TOP_P=top_p is not None,
        SCALE=rows.scale, P=_TESTED, BC=triton.next_power_of_2(num_parts), BV=min(2048, triton.next_power_of_2(vocab)),
        num_warps=16, **of,
    )  # fmt: skip


def _logprobs(rows: _Rows, config: Config, *, ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """Log-probabilities of `ids` under rows without edits."""
    logits, vocab = rows.inputs[0], rows.sizes[0]
    num_parts = triton.cdiv(vocab, config["BLOCK"] * config["ROUNDS"])
    total = logits.new_empty(len(ids), num_parts, dtype=torch.int64)
    _total_kernel[num_parts, len(ids)](
        logits, rows.top, total, vocab, SCALE=rows.scale, ROUNDS=config["ROUNDS"], BV=config["BLOCK"],
        num_warps=config["num_warps"], enable_fp_fusion=False,
    )  # fmt: skip
    _logprob_kernel[len(ids),](
        logits, rows.top, total, ids, chosen, vocab, num_parts, SCALE=rows.scale,
        BC=triton.next_power_of_2(num_parts), num_warps=1,
    )  # fmt: skip
