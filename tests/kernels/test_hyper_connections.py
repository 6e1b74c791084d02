"""Hyper-connections: kernels against references, and row by row."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases.hyper_connections import tensors
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.hyper_connections import hyper_enter, hyper_leave, hyper_write
from moeyard_kernels.hyper_connections.hyper_rows import hyper_rows
from moeyard_kernels.hyper_connections.hyper_sums import CONFIGS, SumsConfig, hyper_sums
from moeyard_kernels.ops.hyper_connections import in_pieces
from moeyard_kernels.types.layers import HyperLayer, HyperMix
from moeyard_kernels.types.matrix import Matrix

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
APART = SumsConfig(BM=16, APART=True, num_stages=1)
TOGETHER = SumsConfig(BM=32, APART=False, num_stages=1)


def make_site(
    hidden: int, streams: int, dtype: torch.dtype, *, head: bool = False, norm: torch.dtype | None = None
) -> HyperLayer:
    num = streams if head else streams * (streams + 2)
    site = in_pieces(
        HyperLayer(
            weight=Matrix.plain(torch.randn(num, streams * hidden) * (streams * hidden) ** -0.5 * 2),
            base=torch.randn(num),
            scale=torch.tensor([1.1] if head else [1.1, 0.7, 1.9]),
            norm=(torch.rand(hidden) + 0.5).to(dtype),
            eps=1e-6,
            rms_eps=1e-5,
            iterations=20,
        )
    )
    return on_device(replace(site, norm=site.norm.to(norm or dtype)))


def on_device(site: HyperLayer, device: str = DEVICE) -> HyperLayer:
    moved = {name: getattr(site, name).to(device) for name in ("base", "scale", "norm")}
    return replace(site, weight=Matrix.plain(site.weight.data.to(device)), **moved)


def make_mix(num_rows: int, streams: int) -> HyperMix:
    post, comb = torch.rand(num_rows, streams) * 2, torch.rand(num_rows, streams, streams)
    return HyperMix(post=post.to(DEVICE), comb=(comb / comb.sum(-1, keepdim=True)).to(DEVICE))


def rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def to_cpu(value: Any) -> Any:
    if isinstance(value, HyperLayer):
        return on_device(value, "cpu")
    if isinstance(value, HyperMix):
        return HyperMix(post=value.post.cpu(), comb=value.comb.cpu())
    return value.cpu() if isinstance(value, torch.Tensor) else value


def assert_near(found: Any, wanted: Any, dtype: torch.dtype) -> None:
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in zip(tensors(found), tensors(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs, rtol=bound, atol=bound / 2)


def assert_same(found: Any, wanted: Any, part: slice = slice(None)) -> None:
    for ours, theirs in zip(tensors(found), tensors(wanted), strict=True):
        assert torch.equal(ours, theirs[part])


@DTYPES
def test_pieces_hold_the_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(24, 4 * 32) * torch.logspace(-6, 6, 128)
    layer = replace(make_site(32, 4, dtype), weight=Matrix.plain(weight), norm=torch.ones(32, dtype=dtype))
    pieces = in_pieces(layer).weight.data
    assert pieces.dtype == dtype
    assert torch.equal(pieces.float().sum(0), weight)


@DTYPES
@pytest.mark.parametrize(("T", "H", "S", "head"), [(1, 16, 4, False), (3, 200, 4, False), (5, 72, 2, True)], ids=str)
def test_enter(T: int, H: int, S: int, head: bool, dtype: torch.dtype) -> None:
    site, streams = make_site(H, S, dtype, head=head), rows(T, S, H, dtype=dtype)
    found = hyper_enter.hyper_enter(streams, site)
    assert (found[1] is None) == head
    assert_near(found, ops.hyper_enter.reference(streams.cpu(), to_cpu(site)), dtype)
    for config in (APART, TOGETHER):
        _, sums = hyper_sums(streams, site, config=config)
        for apart in (False, True):
            assert_same(hyper_rows(streams, sums, site, apart=apart), found)
    last = slice(T - 1, T)
    assert_same(hyper_enter.hyper_enter(streams[last].clone(), site), found, last)
    assert_same(hyper_enter.hyper_enter(streams[:0], site), found, slice(0))


def parts_of(kind: str, T: int, H: int, dtype: torch.dtype) -> dict[str, Any]:
    if kind == "rows":
        return {"result": rows(T, H, dtype=dtype)}
    found: dict[str, Any] = {"result": rows(T, 3, H, dtype=dtype), "weights": torch.rand(T, 3).to(DEVICE)}
    if kind != "parts":
        found["shared"] = rows(T, H, dtype=dtype)
    if kind == "gated":
        # A column of the logits, with their stride.
        found["shared_gate"] = rows(T, 5, dtype=torch.float32)[:, 3]
    return found


@DTYPES
@pytest.mark.parametrize("kind", ["rows", "parts", "shared", "gated"])
def test_leave(kind: str, dtype: torch.dtype) -> None:
    T, H, S = 3, 136, 4
    site, streams, mix = make_site(H, S, dtype), rows(T, S, H, dtype=dtype), make_mix(T, S)
    given = parts_of(kind, T, H, dtype)
    before = streams.clone()
    found = hyper_leave.hyper_leave(streams=streams, mix=mix, site=site, **given)
    assert torch.equal(streams, before)
    wanted = ops.hyper_leave.reference(
        streams=streams.cpu(), mix=to_cpu(mix), site=to_cpu(site), **{name: to_cpu(x) for name, x in given.items()}
    )
    assert_near(found, wanted, dtype)
    # The same as a launch that only writes, and one that enters.
    written = hyper_write.hyper_write(streams=streams, mix=mix, **given)
    assert torch.equal(written, found[0])
    assert_same((written, *hyper_enter.hyper_enter(written, site)), found)
    assert_same(hyper_leave.hyper_leave(streams=streams, mix=mix, site=site, config=TOGETHER, **given), found)
    for part in (slice(2, 3), slice(0)):
        some = {name: x[part].clone() for name, x in given.items()}
        some_mix = HyperMix(post=mix.post[part], comb=mix.comb[part])
        alone = hyper_leave.hyper_leave(streams=streams[part].clone(), mix=some_mix, site=site, **some)
        assert_same(alone, found, part)


@pytest.mark.gpu
def test_a_row_of_nan_stays_alone() -> None:
    """Padding rows may hold anything."""
    site, streams, mix = make_site(72, 4, torch.float32), rows(3, 4, 72, dtype=torch.float32), make_mix(3, 4)
    result = rows(3, 72, dtype=torch.float32)
    found = hyper_leave.hyper_leave(result, streams, mix, site)
    streams[1], result[1] = float("nan"), float("inf")
    for config in (APART, TOGETHER):
        others = hyper_leave.hyper_leave(result, streams, mix, site, config=config)
        for part in (slice(1), slice(2, 3)):
            for ours, theirs in zip(tensors(others), tensors(found), strict=True):
                assert torch.equal(ours[part], theirs[part])


def test_columns_of_comb_are_normalised_last() -> None:
    """Sums of rows converge more slowly."""
    mix = ops.hyper_enter(rows(3, 4, 64, dtype=torch.float32), make_site(64, 4, torch.float32))[1]
    assert mix is not None
    torch.testing.assert_close(mix.comb.sum(1).cpu(), torch.ones(3, 4), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mix.comb.sum(2).cpu(), torch.ones(3, 4), rtol=0.1, atol=0.1)


def test_an_fp32_norm_of_bf16_rows() -> None:
    site, streams = make_site(64, 4, torch.bfloat16, norm=torch.float32), rows(2, 4, 64, dtype=torch.bfloat16)
    found = hyper_enter.hyper_enter(streams, site)
    assert_near(found, ops.hyper_enter.reference(streams.cpu(), to_cpu(site)), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [4096, 7168])
def test_every_config_gives_the_same_bits(hidden: int) -> None:
    bf16 = torch.bfloat16
    site, streams, mix = make_site(hidden, 4, bf16), rows(300, 4, hidden, dtype=bf16), make_mix(300, 4)
    given = parts_of("shared", 300, hidden, bf16)
    found = hyper_leave.hyper_leave(streams=streams, mix=mix, site=site, **given)
    for config in CONFIGS:
        assert_same(hyper_leave.hyper_leave(streams=streams, mix=mix, site=site, config=config, **given), found)
        _, sums = hyper_sums(found[0], site, config=config)
        for apart in (False, True):
            assert_same((found[0], *hyper_rows(found[0], sums, site, apart=apart)), found)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 70])
def test_graph_replay(num_rows: int) -> None:
    bf16 = torch.bfloat16
    site, streams, mix = make_site(1024, 4, bf16), rows(num_rows, 4, 1024, dtype=bf16), make_mix(num_rows, 4)
    result = rows(num_rows, 1024, dtype=bf16)

    def step() -> tuple[torch.Tensor, ...]:
        after, *_, first = ops.hyper_leave(result, streams, mix, site)
        assert first is not None
        return tensors(ops.hyper_leave(result, after, first, site))

    assert_replays(step, lambda: (streams.normal_(), result.normal_()))


def test_bad_arguments_are_named() -> None:
    site, streams, mix = make_site(16, 4, torch.float32), torch.zeros(2, 4, 16, device=DEVICE), make_mix(2, 4)
    with pytest.raises(ValueError, match="a weight of 24 sums and 3 scales for 2 streams"):
        ops.hyper_enter(torch.zeros(2, 2, 32, device=DEVICE), replace(site, norm=torch.zeros(32, device=DEVICE)))
    with pytest.raises(ValueError, match=r"result float32 \[2, 3, 16\] of 2 rows with no weights"):
        ops.hyper_leave(torch.zeros(2, 3, 16, device=DEVICE), streams, mix, site)
    with pytest.raises(ValueError, match=r"mix.post float32 \[3, 4\], expected float32 \[2, 4\]"):
        ops.hyper_write(streams[:, 0], streams, make_mix(3, 4))
    with pytest.raises(ValueError, match=r"streams float32 \[2, 4, 16\] with strides .* is not contiguous"):
        hyper_enter.hyper_enter(torch.zeros(2, 16, 4, device=DEVICE).mT, site)
