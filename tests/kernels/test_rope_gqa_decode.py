"""A decode step's rotation, cache write and attention in one launch: results and caches of two launches."""

import dataclasses

import pytest
import torch
from kernel_cases.case import assert_bits
from tests.kernels.decode_cases import DEVICE, Paged, paged
from tests.kernels.graphs import assert_replays

from moeyard_kernels import ops
from moeyard_kernels.attention import rope_gqa_decode as kernel
from moeyard_kernels.attention.rope_gqa_decode import CHAIN, StepConfig
from moeyard_kernels.common.launch import checked
from moeyard_kernels.types.decode_tables import DecodeTables

GPU = DEVICE == "cuda"
PAGE = 64
ONE = [config for config in kernel.CONFIGS if config != CHAIN]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LENS = [1, 64, 65, 200, 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step of rows whose sequences have `lens` keys. The caches lack each row's own key."""

    held: Paged
    lens: list[int]
    args: tuple[torch.Tensor, ...]
    named: dict[str, object]
    window: int | None

    def tables(self, rows: list[int] | None = None) -> DecodeTables:
        lens = self.lens if rows is None else [self.lens[row] for row in rows]
        return self.held.tables(torch.tensor(lens), rows, window=self.window)

    def configs(self) -> list[StepConfig]:
        """Return the configs of one launch. The interpreter gets one kind of warps."""
        q, k, _, cos, *_ = self.args
        group = q.shape[1] // k.shape[1]
        fitting = [
            config
            for config in ONE
            if kernel.in_one_launch(q, cos, self.tables(), config, group=group, normed="eps" in self.named, split=512)
        ]
        return fitting if GPU else list({config.TAIL: config for config in fitting}.values())

    def run(self, config: StepConfig | None, rows: list[int] | None = None, **options: object) -> list[torch.Tensor]:
        """Return out, lse and caches of the kernel. The original caches stay unchanged."""
        caches = [cache.clone() for cache in self.held.caches]
        args = [x if rows is None else x[rows] for x in self.args]
        found = kernel.rope_gqa_decode(
            *args,
            *caches,
            tables=self.tables(rows),
            scale=args[0].shape[2] ** -0.5,
            config=config,
            **{"static_tables": True, "lone_rows": True, **self.named, **options},  # type: ignore[arg-type]
        )
        return [*found, *caches]


def case(
    lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    *,
    turned: int | None = None,
    interleaved: bool = False,
    norm: torch.dtype | None = None,
    angle: torch.dtype = torch.float32,
    window: int | None = None,
    longest: int = 512,
) -> Case:
    """Return a step's inputs: keys are NaN from each row's own on (and below its window). Rows vary in magnitude."""
    held = paged(
        [max(0, n - 1) for n in lens],
        PAGE,
        heads=kv_heads,
        dims=(dim, dim),
        dtype=dtype,
        slack=longest // PAGE - (-(-max(0, max(lens) - 1) // PAGE)),
        window=window,
    )
    count = len(lens)
    qkv = torch.randn(count, heads + 2 * kv_heads, dim) * torch.exp2(torch.randint(-9, 9, (count, 1, 1)).float())
    rows = qkv.to(DEVICE, dtype).split((heads, kv_heads, kv_heads), 1)
    angles = torch.randn(count, turned or dim).to(DEVICE, angle).chunk(2, 1)
    places = torch.tensor([max(0, n - 1) for n in lens], device=DEVICE)
    slots = held.table[torch.arange(count, device=DEVICE), places // PAGE].long() * PAGE + places % PAGE
    slots[torch.tensor(lens, device=DEVICE) == 0] = -1
    named: dict[str, object] = {"interleaved": interleaved}
    if norm is not None:
        norms = (torch.randn(2, dim) + 0.01).to(DEVICE, norm)
        named |= {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6}
    return Case(held=held, lens=lens, args=(*rows, *angles, slots), named=named, window=window)


@DTYPES
def test_one_launch_gives_the_bits_of_two(dtype: torch.dtype) -> None:
    found = case(LENS, 3, 1, 128, dtype, norm=dtype)
    wanted = found.run(CHAIN)
    assert wanted[0][:-1].isfinite().all()
    assert (wanted[0][-1] == 0).all()
    for config in found.configs():
        assert_bits(str(config), found.run(config), wanted)
        if GPU or config == found.configs()[0]:
            assert_bits(f"{config}, tables of the launch ahead", found.run(config, static_tables=False), wanted)


SHAPES = (
    (8, 1, 64, {"norm": torch.bfloat16}),
    (4, 2, 32, {"interleaved": True}),
    (4, 2, 64, {"interleaved": True, "norm": torch.bfloat16, "angle": torch.bfloat16}),
    (3, 3, 128, {"norm": torch.float32, "window": 70}),
    (4, 1, 32, {"window": 64, "angle": torch.bfloat16, "interleaved": True}),
    (16, 1, 128, {"norm": torch.bfloat16}),
)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "options"), SHAPES, ids=str)
def test_model_options(heads: int, kv_heads: int, dim: int, options: dict[str, object]) -> None:
    """Layout of pairs, width, dtype of angles and weights, windows. Nothing below a window is read."""
    found = case([1, 65, 130, 0], heads, kv_heads, dim, torch.bfloat16, **options)  # type: ignore[arg-type]
    wanted = found.run(CHAIN)
    assert found.configs()
    for config in found.configs():
        assert_bits(str(config), found.run(config), wanted)


def test_copy_of_a_row_is_not_written_and_gives_its_bits() -> None:
    """Padding is such a copy. It uses its own key, because the other's program may write later."""
    found = case([70, 200], 4, 2, 128, torch.bfloat16, norm=torch.bfloat16)
    for config in found.configs():
        wanted = found.run(config)
        rows = [0, 1, 0, 0]
        slots = found.args[5][rows].clone()
        slots[2:] = -1
        padded = dataclasses.replace(
            found,
            args=(*(x[rows] for x in found.args[:5]), slots),
            lens=[70, 200, 70, 70],
            held=dataclasses.replace(found.held, table=found.held.table[rows]),
        )
        out, lse, *caches = padded.run(config)
        assert_bits("caches", caches, wanted[2:])
        assert_bits("rows", (out, lse), (wanted[0][rows], wanted[1][rows]))
        assert_bits("the chain", padded.run(CHAIN), (out, lse, *caches))


@pytest.mark.gpu  # too slow for the interpreter
@pytest.mark.parametrize(("heads", "kv_heads", "normed"), [(32, 4, True), (64, 4, True), (32, 8, False)], ids=str)
def test_rows_alone_and_among_others(heads: int, kv_heads: int, normed: bool) -> None:
    """All lengths of a table of one split, at the widths of models, in every config."""
    lens = [1 + i for i in range(512)]
    found = case(lens, heads, kv_heads, 128, torch.bfloat16, norm=torch.bfloat16 if normed else None)
    wanted = found.run(CHAIN)
    for config in kernel.configs_for(heads // kv_heads):
        whole = found.run(config)
        assert_bits(str(config), whole, wanted)
        for row in (0, 63, 64, 200, 511):
            alone = found.run(config, [row])
            assert_bits(f"row {row}", alone[:2], [x[row : row + 1] for x in whole[:2]])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("config", ONE, ids=str)
def test_in_a_chain_of_early_launches(config: StepConfig, rows: int) -> None:
    """A product before it writes its rows, and one after it reads its results. Keys are the last step's."""
    found = case([1 + 67 * i % 500 for i in range(rows)], 32, 4, 128, torch.bfloat16, norm=torch.bfloat16)
    first, second = (torch.randn(*shape, device=DEVICE).bfloat16() / 64 for shape in ((5120, 2048), (2048, 4096)))
    x = torch.randn(rows, 2048, device=DEVICE).bfloat16()
    tables, (cos, sin, slots) = found.tables(), found.args[3:]
    ends = found.args[5].clone()

    def step() -> tuple[torch.Tensor, ...]:
        hidden, kept = x, []
        for _ in range(3):
            qkv = ops.linear(hidden, first, static_weight=True).view(rows, 40, 128).split((32, 4, 4), 1)
            out, lse = kernel.rope_gqa_decode(
                *qkv,
                cos,
                sin,
                slots,
                *found.held.caches,
                tables=tables,
                scale=128**-0.5,
                static_tables=True,
                lone_rows=True,
                config=config,
                **found.named,  # type: ignore[arg-type]
            )
            hidden = ops.linear(out.flatten(1), second, static_weight=True)
            kept += [out, lse, hidden]
        return (*kept, *(cache.flatten(1, 2)[:, ends] for cache in found.held.caches))

    assert_replays(step, lambda: x.copy_(torch.randn_like(x)))


def test_op_runs_the_chain_without_a_stored_config() -> None:
    found = case([70, 9], 4, 2, 32, torch.float32, norm=torch.float32)
    named = {"tables": found.tables(), "scale": 0.2, **found.named}
    caches, others = ([cache.clone() for cache in found.held.caches] for _ in range(2))
    out = ops.rope_gqa_decode(*found.args, *caches, **named, lone_rows=True)  # type: ignore[arg-type]
    norms = {name: value for name, value in found.named.items() if name != "interleaved"}
    q = ops.rope_cache_write_gqa(*found.args, *others, interleaved=False, **norms)  # type: ignore[arg-type]
    assert_bits("chain", (*out, *caches), (*ops.gqa_decode(q, *others, tables=found.tables(), scale=0.2), *others))
    none = DecodeTables(page_table=found.held.table[:0], kv_lens=torch.zeros(0, device=DEVICE).int(), page_size=PAGE)
    for config in (CHAIN, ONE[0]):
        nothing = kernel.rope_gqa_decode(
            *(x[:0] for x in found.args),
            *caches,
            interleaved=False,
            tables=none,
            scale=0.2,
            lone_rows=True,
            config=config,
        )
        assert nothing[0].shape == (0, 4, 32)


def test_unsupported_steps_use_the_chain_by_default() -> None:
    """Rows that read each other's keys, splits, parts of heads, other widths, large groups, small tiles."""
    found = case([70, 9], 4, 2, 64, torch.bfloat16, norm=torch.bfloat16)
    for message, given, options in (
        ("rows of one sequence", found, {"lone_rows": False}),
        ("splits", found, {"split": 128}),
        ("part of a head", case([70, 9], 4, 2, 64, torch.bfloat16, turned=16), {}),
        ("width", case([70, 9], 4, 2, 48, torch.bfloat16), {}),
        ("group", case([9], 17, 1, 64, torch.bfloat16), {}),
        ("sums", case([9], 4, 1, 32, torch.bfloat16, norm=torch.bfloat16), {}),
    ):
        with pytest.raises(ValueError, match=r"StepConfig\(.*\) cannot run \d+ heads of \d+ with these tables"):
            given.run(ONE[0], **options)
        assert given.run(None, **options)[0].isfinite().all(), message


def test_bad_arguments_are_named() -> None:
    found = case([70, 9], 4, 2, 64, torch.bfloat16)
    q, k, v, cos, sin, slots = found.args
    rest = {"tables": found.tables(), "scale": 1.0, "interleaved": False}
    with pytest.raises(
        ValueError,
        match=r"rope_gqa_decode: v bfloat16 \[2, 2, 32\], expected bfloat16 \[2, 2, 64\] for k bfloat16 \[2, 2, 64\]",
    ):
        ops.rope_gqa_decode(q, k, v[..., :32], cos, sin, slots, *found.held.caches, **rest)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"rope_gqa_decode: tables\.num_rows 2, T 1 of q bfloat16 \[1, 4, 64\], expected tables\.num_rows == T",
    ):
        ops.rope_gqa_decode(*(x[:1] for x in found.args), *found.held.caches, **rest)  # type: ignore[arg-type]
    with checked():
        slots = torch.tensor([-2, 0], device=DEVICE)
        with pytest.raises(ValueError, match=r"rope_gqa_decode: slot_mapping int64 \[2\] holds -2 to 0, outside -1"):
            dataclasses.replace(found, args=(*found.args[:5], slots)).run(ONE[0])
