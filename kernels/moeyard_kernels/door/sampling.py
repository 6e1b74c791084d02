"""The door to the sampler: one token per row of logits, or what is to be said of a given one. See `ops`."""

import torch

from moeyard_kernels.common.checks import FLOATS, check_devices, show
from moeyard_kernels.door.load import kernel
from moeyard_kernels.types.logit_edits import MAX_BIASES, LogitEdits
from moeyard_kernels.types.sampled_tokens import MAX_TOP, SampledTokens


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
) -> SampledTokens:
    """Choose a token per row of logits [B, V] (fp32 or bf16); see `SampledTokens`.

    logprobs: None computes nothing of the kind, n from 0 to 20 the chosen tokens' log-probabilities and ranks, and the
    n likeliest tokens (all of them, if V is less), under the unmodified logits.

    Order: edits (bias, repetition, frequency and presence penalties, in fp64; then what is not allowed is held back),
    temperature, min-p, top-k, top-p, then the argmax of exp((x - max) / temperature) / E over what is left, E ~ Exp(1)
    from (seed, position, token id). All ties go to the lowest id.

    temperature, top_p in (0, 1] (1 is off) and min_p in [0, 1] (0 is off) are fp64 [B], top_k (0 or V is off), seeds
    (64 bits) and positions int64 [B]; None is off for all rows, and saves time. Rows of temperature 0 take the largest
    logit, as do rows whose largest is infinite; of rows with a NaN the lowest id of one is taken. Seeds and positions
    are needed with a temperature. A row's token depends on that row's arguments alone. Slots must lie in [-1, S):
    checked on a CPU, and on a GPU within `launch.checked()`. A top_k of thousands, or one that cuts through thousands
    of equal logits, is exact too but slow on a GPU (half a millisecond).
    """
    if logits.dim() != 2 or logits.dtype not in FLOATS or not logits.shape[1]:
        raise ValueError(f"sample: logits must be fp32 or bf16 [B, V], got {show(logits)}")
    num_rows = logits.shape[0]
    for name, x, dtype in (
        ("temperature", temperature, torch.float64),
        ("top_p", top_p, torch.float64),
        ("min_p", min_p, torch.float64),
        ("top_k", top_k, torch.int64),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
    ):
        if x is None:
            continue
        if x.shape != (num_rows,) or x.dtype != dtype:
            raise ValueError(f"sample: {name} {show(x)}, expected {dtype} [{num_rows}] for logits {show(logits)}")
        check_devices("sample", logits=logits, **{name: x})
        if temperature is None:
            raise ValueError(f"sample: {name} {show(x)} without temperature, which is None (greedy)")
    if temperature is not None and (seeds is None or positions is None):
        raise ValueError(f"sample: temperature {show(temperature)} needs seeds and positions")
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP:
        raise ValueError(f"sample: logprobs {logprobs}, expected None or 0 to {MAX_TOP}")
    if edits is not None:
        _check_edits(edits, logits)
    return kernel("sampling.sample", logits).sample(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
        edits=edits,
        logprobs=logprobs,
    )


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> SampledTokens:
    """Log-probability and rank of token ids[b] under each row of logits [B, V], and the num_top likeliest (0 to 20).

    logits are fp32 or bf16, ids int64 [B] in [0, V), which is the caller's to see to. As `sample` says of tokens that
    it chose, bit for bit: see `SampledTokens`.
    """
    if logits.dim() != 2 or logits.dtype not in FLOATS or not logits.shape[1]:
        raise ValueError(f"token_logprobs: logits must be fp32 or bf16 [B, V], got {show(logits)}")
    if ids.shape != logits.shape[:1] or ids.dtype != torch.int64:
        raise ValueError(f"token_logprobs: ids {show(ids)}, expected int64 [{logits.shape[0]}]")
    if not 0 <= num_top <= MAX_TOP:
        raise ValueError(f"token_logprobs: num_top {num_top}, expected 0 to {MAX_TOP}")
    check_devices("token_logprobs", logits=logits, ids=ids)
    return kernel("sampling.token_logprobs", logits).token_logprobs(logits, ids, num_top)


def _check_edits(edits: LogitEdits, logits: torch.Tensor) -> None:
    num_rows, vocab = logits.shape
    if edits.words.dim() != 2 or edits.words.dtype != torch.int32 or edits.words.shape[1] != vocab:
        raise ValueError(f"sample: edits.words {show(edits.words)}, expected int32 [S, {vocab}]")
    num_slots = edits.words.shape[0]
    if edits.bias.dim() != 2 or edits.bias.dtype != torch.float64 or edits.bias.shape[0] != num_slots:
        raise ValueError(f"sample: edits.bias {show(edits.bias)}, expected fp64 [{num_slots}, L]")
    if edits.bias.shape[1] > MAX_BIASES:
        raise ValueError(f"sample: edits.bias {show(edits.bias)} has more than {MAX_BIASES} entries per slot")
    if edits.allowed is not None:
        width = -(-vocab // 32)
        if edits.allowed.dtype != torch.int32 or edits.allowed.shape != (num_slots, width):
            raise ValueError(f"sample: edits.allowed {show(edits.allowed)}, expected int32 [{num_slots}, {width}]")
        if edits.bias.shape[1] == MAX_BIASES:
            raise ValueError(f"sample: edits.bias {show(edits.bias)} leaves no entry for what is not allowed")
    if edits.slots.shape != (num_rows,) or edits.slots.dtype != torch.int64:
        raise ValueError(f"sample: edits.slots {show(edits.slots)}, expected int64 [{num_rows}]")
    if edits.penalties.shape != (num_rows, 3) or edits.penalties.dtype != torch.float64:
        raise ValueError(f"sample: edits.penalties {show(edits.penalties)}, expected fp64 [{num_rows}, 3]")
    check_devices("sample", logits=logits, **edits.named())
