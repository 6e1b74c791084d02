"""Triton: `token_logprobs` of given tokens, by the launches that `sample` uses for chosen tokens."""

import torch

from moeyard_kernels.common import tuning
from moeyard_kernels.common.launch import MAX_GRID_Y, check_layout
from moeyard_kernels.sampling import sample_logprob
from moeyard_kernels.sampling.sample_configs import SampleConfig, default_config, mass_bits, shape_class
from moeyard_kernels.types.sampling import SampledTokens


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, num_top: int, *, config: SampleConfig | None = None
) -> SampledTokens:
    """See `moeyard_kernels.ops.token_logprobs`. Raises ValueError for what its grid cannot hold."""
    num_rows, vocab = logits.shape
    if num_rows > MAX_GRID_Y or vocab >= 2**21:
        raise ValueError(f"token_logprobs: logits [{num_rows}, {vocab}] exceed the grid of a GPU")
    check_layout("token_logprobs", logits=logits, ids=ids)
    out = SampledTokens.room(ids, min(num_top, vocab))
    if not num_rows:
        return out
    config = config or tuning.choose(
        "sample", shape_class(num_rows, vocab), logits, (SampleConfig,), lambda: default_config(num_rows, vocab)
    )
    # torch's maximum is exact too, and propagates a NaN.
    top = logits.amax(1).float()
    sample_logprob.token_logprobs(logits, top, out, part=config.PART, block=config.MASS, bits=mass_bits(vocab))
    return out
