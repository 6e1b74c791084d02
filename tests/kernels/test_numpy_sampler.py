"""Philox4x32-10 against the known answers published with Random123, and the noise drawn from it."""

import math

import numpy as np
import pytest
from tests.kernels.numpy_sampler import exponential_noise, philox4x32

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    out = philox4x32((np.array([counter[0]], dtype=np.uint64), *counter[1:]), key)
    assert out.dtype == np.uint32
    assert [hex(w) for w in out[0]] == [hex(w) for w in words]


def test_counters_are_independent_of_their_neighbours() -> None:
    blocks = np.arange(1000, dtype=np.uint64)
    whole = philox4x32((blocks, 7, 8, 9), (10, 11))
    parts = [philox4x32((blocks[i : i + 1], 7, 8, 9), (10, 11)) for i in (0, 1, 500, 999)]
    assert np.array_equal(whole[[0, 1, 500, 999]], np.concatenate(parts))


def test_noise_matches_its_docstring() -> None:
    """Word v % 4 of block v // 4, counter (block, position, 0, 0), the seed's halves as key."""
    seed, position = 0x0123456789ABCDEF, 12345
    for token_id in (0, 1, 2, 3, 4, 1_000_003):
        block = np.array([token_id // 4], dtype=np.uint64)
        word = int(philox4x32((block, position, 0, 0), (0x89ABCDEF, 0x01234567))[0, token_id % 4])
        expected = -math.log((word + 0.5) / 2**32)
        assert exponential_noise(seed, position, np.array([token_id]))[0] == pytest.approx(expected, rel=1e-15)


def test_noise_of_a_token_ignores_other_tokens() -> None:
    whole = exponential_noise(5, 6, np.arange(1000))
    some = np.array([999, 3, 3, 500, 0])
    assert np.array_equal(exponential_noise(5, 6, some), whole[some])


@pytest.mark.parametrize("seed", [0, -1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1])
def test_any_seed_gives_finite_positive_noise(seed: int) -> None:
    noise = exponential_noise(seed, 0, np.arange(257))
    assert np.all(np.isfinite(noise))
    assert np.all(noise > 0)
    assert np.array_equal(noise, exponential_noise(seed + 2**64, 0, np.arange(257)))


def test_seed_halves_and_positions_all_matter() -> None:
    ids = np.arange(8)
    draws = [exponential_noise(s, p, ids) for s, p in ((0, 0), (1, 0), (2**32, 0), (0, 1), (0, 2**20))]
    assert len({d.tobytes() for d in draws}) == len(draws)


def test_noise_is_exponential() -> None:
    """The Kolmogorov-Smirnov distance of 200 000 draws to Exp(1): one of 1000 good generators exceeds 1.95 / sqrt(n).
    The seeds are fixed."""
    draws = np.sort(np.concatenate([exponential_noise(s, p, np.arange(10_000)) for s in range(4) for p in range(5)]))
    n = draws.size
    distance = np.abs(1 - np.exp(-draws) - (np.arange(n) + 0.5) / n).max()
    assert distance < 1.95 / math.sqrt(n)
    # Neighbouring words, positions and seeds are uncorrelated.
    grid = np.stack([exponential_noise(s, 3, np.arange(20_000)) for s in (1, 2)]) - 1
    for a, b in ((grid[0, :-1], grid[0, 1:]), (grid[0], grid[1]), (grid[0, :-4], grid[0, 4:])):
        assert abs(float((a * b).mean())) < 4 / math.sqrt(a.size)
