"""Triton: one token per row of logits, in a fixed chain of launches; `ref.sample` has the formulas.

    max      largest logit of each part of a row, lowest id first; for top-k also of many groups of tokens
    top      largest logit of the row: the token of a greedy row, the zero point of the weights of other rows
    gather   (top-k) the tokens that reach a bound below the k-th largest                        -> sample_cut
    cut      (top-k) the token if they were few, else where top-k ends
    race     best few of each part by log(weight / E) in fp32                                    -> sample_race
    rank     their exact scores in fp64: the token unless there is a top-p
    mass     (top-p) the mass before each of the best, in fixed point
    settle   (top-p) the best within the nucleus; else a second race, rank, mass and settle; at last a search of the row

The arguments that are None determine the launches. Each launch exits at once for rows that already have a token. Rows
are independent, and every combination across programs is exact (maxima, integer sums). fp64 follows the formulas of the
reference, without contraction to fma. So no tile, batch or order of programs changes a token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moeyard_kernels.common import tuning
from moeyard_kernels.common.dependent import dependent, wait_for_previous
from moeyard_kernels.common.launch import MAX_GRID_Y, check_indices, check_layout
from moeyard_kernels.sampling.sample_blocks import NO_ID, from_key, to_key, values
from moeyard_kernels.sampling.sample_configs import CONFIGS as CONFIGS
from moeyard_kernels.sampling.sample_configs import SampleConfig, default_config, mass_bits
from moeyard_kernels.sampling.sample_configs import shape_class as shape_class
from moeyard_kernels.sampling.sample_cut import cut_kernel, gather_kernel, group_bound
from moeyard_kernels.sampling.sample_logprob import token_logprobs
from moeyard_kernels.sampling.sample_race import mass_kernel, race_kernel, rank_kernel, settle_kernel
from moeyard_kernels.types.sampling import LogitEdits, SampledTokens

# Quads kept per part of a row; candidates per row that are tested against top-p, in the first round and in the last.
_PER_PART = 4
_TESTED = (3, 8)
# The least number of token groups per row for top-k. Half of it is the largest k that a list can find.
_GROUPS = 2048


@triton.jit
def _max_kernel(
    p_logits, p_words, p_bias, p_slots, p_penalties, p_key, p_id, p_groups, V, L,
    EDIT: tl.constexpr, GROUPS: tl.constexpr, ROUNDS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Key and lowest id of the largest of ROUNDS * BV logits, and the keys of GROUPS group maxima. Grid: (C, B)."""
    wait_for_previous()
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b_id = i_c * ROUNDS * BV + tl.arange(0, BV)
    b_best = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, b_id, b_id < V, V, L, EDIT)
    if EDIT:
        # Unrolling would need too many registers.
        for r in range(1, ROUNDS):
            o_v = (i_c * ROUNDS + r) * BV + tl.arange(0, BV)
            b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
            b_best, b_id = _larger(b_best, b_id, b_x, o_v)
    else:
        for r in tl.static_range(1, ROUNDS):
            o_v = (i_c * ROUNDS + r) * BV + tl.arange(0, BV)
            b_x = values(p_logits, p_words, p_bias, p_slots, p_penalties, i_b, o_v, o_v < V, V, L, EDIT)
            b_best, b_id = _larger(b_best, b_id, b_x, o_v)
    b_key = to_key(b_best)
    best = tl.max(b_key)
    o_c = i_b * tl.num_programs(0) + i_c
    tl.store(p_key + o_c, best)
    tl.store(p_id + o_c, tl.min(tl.where(b_key == best, b_id, NO_ID)))
    if GROUPS > 0:
        b_group = tl.max(tl.reshape(b_key, [GROUPS, BV // GROUPS]), 1)
        tl.store(p_groups + o_c * GROUPS + tl.arange(0, GROUPS), b_group)


@triton.jit
def _larger(b_best, b_id, b_x, o_v):
    """Return the larger of two values with its id. A NaN wins; of equal values, the first."""
    m_v = (b_x > b_best) | ((b_x != b_x) & (b_best == b_best))
    return tl.where(m_v, b_x, b_best), tl.where(m_v, o_v, b_id)


@triton.jit
def _top_kernel(
    p_key, p_id, p_groups, p_temperature, p_top_k, p_top, p_open, p_bound, p_count, p_ids, V, C, G,
    SAMPLED: tl.constexpr, TOP_K: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Find the largest logit of row i_b, its token, and the bound for top-k. open: the row is still to be sampled."""
    wait_for_previous()
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)
    # Missing parts repeat the first one.
    o_c = i_b * C + tl.where(o_c < C, o_c, 0)
    b_key = tl.load(p_key + o_c)
    best = tl.max(b_key)
    tl.store(p_ids + i_b, tl.min(tl.where(b_key == best, tl.load(p_id + o_c), NO_ID)))
    top = from_key(best)
    tl.store(p_top + i_b, top)
    if SAMPLED:
        is_open = (top < float("inf")) & (top > -float("inf")) & (tl.load(p_temperature + i_b) > 0)
        tl.store(p_open + i_b, is_open.to(tl.int32))
        if TOP_K:
            k = tl.load(p_top_k + i_b)
            count = BL + 1
            if is_open & (k > 0) & (k < V):
                bound, useful = group_bound(p_groups, i_b, k, best, V, G, BG, BL)
                tl.store(p_bound + i_b, bound)
                count = (1 - useful) * (BL + 1)
            tl.store(p_count + i_b, count)


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
    logprobs: int | None = None,
    config: SampleConfig | None = None,
) -> SampledTokens:
    """See `moeyard_kernels.ops.sample`. Raises ValueError for what its grid cannot hold."""
    num_rows, vocab = logits.shape
    if num_rows > MAX_GRID_Y or vocab >= 2**21:
        raise ValueError(f"sample: logits [{num_rows}, {vocab}] exceed the grid of a GPU")
    check_layout(
        "sample",
        logits=logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
        **({} if edits is None else edits.named()),
    )
    ids = logits.new_empty(num_rows, dtype=torch.int64)
    out = SampledTokens(ids=ids) if logprobs is None else SampledTokens.room(ids, min(logprobs, vocab))
    if not num_rows:
        return out
    config = config or tuning.choose(
        "sample", shape_class(num_rows, vocab), logits, (SampleConfig,), lambda: default_config(num_rows, vocab)
    )
    if edits is not None:
        edits = edits.folded()
        check_indices("sample", low=-1, high=edits.words.shape[0], slots=edits.slots)
    rows = _largest(logits, edits, config, temperature=temperature, top_k=top_k, ids=ids)
    if temperature is not None:
        assert seeds is not None, "seeds are checked"
        assert positions is not None, "positions are checked"
        _draw(
            rows,
            config,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=seeds,
            positions=positions,
            ids=ids,
        )
    if logprobs is not None:
        raw = rows if edits is None else _largest(logits, None, config, temperature=None, top_k=None, ids=None)
        token_logprobs(logits, raw.top, out, part=config.PART, block=config.MASS, bits=raw.bits)
    return out


@dataclass(frozen=True, slots=True)
class _OpenRows:
    """Rows whose largest logit is known.

    inputs: the first pointers of every kernel: logits and their edits. sizes: V and L. top: [B] as X. open: [B] int32,
    1 while a token is still to be drawn. bound: [B] keys for top-k, and count: [B] int32, 0 where the bound is useful.
    bits: of a mass, such that the mass of a row is below 2^62.
    """

    inputs: tuple[torch.Tensor, ...]
    sizes: tuple[int, int]
    edit: bool
    top: torch.Tensor
    open: torch.Tensor
    bound: torch.Tensor
    count: torch.Tensor
    bits: int


def _largest(
    logits: torch.Tensor,
    edits: LogitEdits | None,
    config: SampleConfig,
    *,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    ids: torch.Tensor | None,
) -> _OpenRows:
    """Find the largest logit of each row, and write its id to `ids`."""
    num_rows, vocab = logits.shape
    if edits is None:
        inputs, width = (logits,) * 5, 0
    else:
        inputs, width = (logits, edits.words, edits.bias, edits.slots, edits.penalties), edits.bias.shape[1]
    num_parts = triton.cdiv(vocab, config.BLOCK * config.ROUNDS)
    per_part = min(config.BLOCK, triton.next_power_of_2(triton.cdiv(_GROUPS, num_parts)))
    num_groups = 0 if top_k is None else per_part * num_parts
    keys, values_ = (torch.int32, torch.float32) if edits is None else (torch.int64, torch.float64)
    key = logits.new_empty(num_rows, num_parts, dtype=keys)
    part_id = logits.new_empty(num_rows, num_parts, dtype=torch.int32)
    groups = logits.new_empty(num_rows, num_groups, dtype=keys)
    rows = _OpenRows(
        inputs=inputs,
        sizes=(vocab, width),
        edit=edits is not None,
        top=logits.new_empty(num_rows, dtype=values_),
        open=logits.new_empty(num_rows, dtype=torch.int32),
        bound=logits.new_empty(num_rows, dtype=keys),
        count=logits.new_empty(num_rows, dtype=torch.int32),
        bits=mass_bits(vocab),
    )
    _max_kernel[num_parts, num_rows](
        *inputs,
        key,
        part_id,
        groups,
        vocab,
        width,
        EDIT=rows.edit,
        GROUPS=num_groups // num_parts,
        ROUNDS=config.ROUNDS,
        BV=config.BLOCK,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **dependent(logits),
    )
    ids = logits.new_empty(num_rows, dtype=torch.int64) if ids is None else ids
    # Kernels do not read the pointers of arguments that are off.
    _top_kernel[num_rows,](
        key,
        part_id,
        groups,
        ids if temperature is None else temperature,
        ids if top_k is None else top_k,
        rows.top,
        rows.open,
        rows.bound,
        rows.count,
        ids,
        vocab,
        num_parts,
        num_groups,
        SAMPLED=temperature is not None,
        TOP_K=top_k is not None,
        BC=triton.next_power_of_2(num_parts),
        BG=triton.next_power_of_2(max(1, num_groups)),
        BL=config.LIST,
        num_warps=1 if top_k is None else 8,
        **dependent(logits),
    )
    return rows


def _draw(
    rows: _OpenRows,
    config: SampleConfig,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """Overwrite the ids of open rows with sampled tokens."""
    num_rows, vocab = len(ids), rows.sizes[0]
    new = rows.top.new_empty
    # The end of top-k; the second round covers what comes before `end`.
    cut, end = ((new(num_rows), new(num_rows, dtype=torch.int32)) for _ in range(2))
    state = (*rows.inputs, rows.top, rows.open, temperature)
    min_p_, top_p_ = (temperature if x is None else x for x in (min_p, top_p))
    draw = (min_p_, seeds, positions)
    of = {"EDIT": rows.edit, "MIN_P": min_p is not None, "enable_fp_fusion": False, **dependent(ids)}
    # Edited logits need twice the registers.
    race = config.RACE // (2 if rows.edit else 1)
    num_race = triton.cdiv(vocab, race)
    if top_k is not None:
        some = new(num_rows, config.LIST, dtype=torch.int32)
        gather_kernel[num_race, num_rows](
            *rows.inputs,
            rows.open,
            rows.bound,
            rows.count,
            some,
            *rows.sizes,
            EDIT=rows.edit,
            BV=race,
            BL=config.LIST,
            num_warps=8,
            enable_fp_fusion=False,
            **dependent(ids),
        )
        cut_kernel[num_rows,](
            *state,
            top_k,
            top_p_,
            *draw,
            rows.bound,
            rows.count,
            some,
            *cut,
            ids,
            *rows.sizes,
            TOP_P=top_p is not None,
            BITS=rows.bits,
            BV=min(8192, triton.next_power_of_2(vocab)),
            BL=config.LIST,
            num_warps=8,
            **of,
        )
    score = new(num_rows, num_race * _PER_PART, dtype=torch.float32)
    quad = new(score.shape, dtype=torch.int32)
    num_parts = triton.cdiv(vocab, config.PART)
    rounds = _TESTED if top_p is not None else _TESTED[:1]
    for i, tested in enumerate(rounds):
        ends, where = top_k is not None or i > 0, cut if i == 0 else end
        race_kernel[num_race, num_rows](
            *state,
            *draw,
            *where,
            score,
            quad,
            *rows.sizes,
            ENDS=ends,
            J=_PER_PART,
            BV=race,
            num_warps=8,
            **of,
        )
        best = [new(num_rows, tested, dtype=t) for t in (rows.top.dtype, torch.int32, torch.int32)]
        rank_kernel[num_rows,](
            *state,
            top_p_,
            *draw,
            *where,
            score,
            quad,
            *best,
            ids,
            *rows.sizes,
            score.shape[1],
            ENDS=ends,
            TOP_P=top_p is not None,
            J=_PER_PART,
            P=tested,
            BN=triton.next_power_of_2(score.shape[1]),
            num_warps=8,
            **of,
        )
        masses = new(num_rows, num_parts, tested + 1, dtype=torch.int64)
        if top_p is not None:
            mass_kernel[num_parts, num_rows](
                *state,
                top_p_,
                min_p_,
                *cut,
                *best[:2],
                masses,
                *rows.sizes,
                TOP_K=top_k is not None,
                BITS=rows.bits,
                P=tested,
                PART=config.PART,
                BV=config.MASS,
                num_warps=4,
                **of,
            )
        settle_kernel[num_rows,](
            *state,
            top_p_,
            *draw,
            *where,
            *end,
            *best,
            masses,
            ids,
            *rows.sizes,
            num_parts,
            ENDS=ends,
            TOP_P=top_p is not None,
            BITS=rows.bits,
            P=tested,
            SEARCH=i == len(rounds) - 1,
            BC=triton.next_power_of_2(num_parts),
            BV=min(2048, triton.next_power_of_2(vocab)),
            num_warps=8,
            **of,
        )
