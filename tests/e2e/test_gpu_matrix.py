"""The matrix of one answer (gpu_matrix.py) finds what differs and passes what does not, here on a CPU or a GPU.

All of it is a command of its own: `python -m tests.e2e.gpu_matrix`.
"""

from dataclasses import replace

import pytest
import torch
from tests.e2e.gpu_matrix import Loaded, check, courses, load, references

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_what_differs_is_named(device: str, model: str) -> None:
    """Of pages alone, and of state per sequence, where prefixes begin behind one snapshot at a time."""
    rank = load(Loaded(model), device)
    try:
        expected = references(rank)
        (course,) = [c for c in courses(device) if str(c).endswith("2deep-chunk16-scarce")][:1]
        assert check(rank, course, expected)[0] == []
        a = expected["a"]
        wrong = expected | {"a": replace(a, token_ids=[*a.token_ids[:-1], a.token_ids[-1] ^ 1])}
        assert check(rank, course, wrong)[0] == [f"{course} a mixed"]
    finally:
        rank.worker.stop()
