"""Hopper GPUs of all kinds give one answer: token ids and log-probability bits of the demo are those of an H200.

`ANSWERS` was recorded on an H200 (torch 2.11, Triton 3.6, 2026-11-30). A change of the arithmetic needs new digests.
"""

import hashlib
import struct

import pytest
import torch
from tests.checkpoints import DEMO
from tests.rank import Rank

from moeyard_worker.protocol import SamplingParams

pytestmark = pytest.mark.gpu
ANSWERS = {
    "bfloat16": "8d7cbf9a658f8c9eae03a37b61f1e41bfb2e7db2108e9d5eac031eb77a6514a5",
    "float32": "260738c748eb0789ee0222cd86f78b1c7d21c3fb07bd049777bd54c0c91c0873",
}


@pytest.mark.parametrize("dtype", ANSWERS)
def test_answers_are_those_of_an_h200(dtype: str) -> None:
    """Prompts of 3 to 900 tokens, greedy and sampled, at once."""
    requests = {
        f"{length}": (
            [(7 * i + length) % 256 + 1 for i in range(length)],
            SamplingParams(max_tokens=48, ignore_eos=True, temperature=float(length % 2), seed=length, logprobs=5),
        )
        for length in (3, 16, 65, 128, 300, 511, 900)
    }
    digest = hashlib.sha256()
    with Rank(DEMO, device="cuda", dtype=dtype, max_num_seqs=8, max_batch_tokens=512, max_model_len=1024) as rank:
        replies, _ = rank.run(requests)
    for name in requests:
        digest.update(struct.pack(f"<{len(replies[name].token_ids)}i", *replies[name].token_ids))
        for each in replies[name].logprobs:
            digest.update(struct.pack("<f", each.logprob))
    assert digest.hexdigest() == ANSWERS[dtype], f"{torch.cuda.get_device_name()} gives {digest.hexdigest()}"
