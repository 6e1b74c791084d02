"""Configs of products over tiled codes fit the shared memory of a Hopper GPU."""

import pytest

from moeyard_kernels.experts.grouped_packed import MAX_SHARED, default_config
from moeyard_kernels.experts.packed_product import shared_bytes
from moeyard_kernels.types.weight_form import WeightForm, fp4_tiles, fp8_tiles, int4_tiles

FORMS = {
    "fp8 blocks": fp8_tiles(128, 128, scales="bfloat16"),
    "fp8 blocks, fp32 scales": fp8_tiles(128, 128),
    "fp8 rows": fp8_tiles(1, None),
    "fp8 rows, bf16 scales": fp8_tiles(1, None, scales="bfloat16"),
    "fp4": fp4_tiles(32),
    "int4 g32": int4_tiles(32, scales="bfloat16", zeros=False),
    "int4 g32, fp32 scales and zeros": int4_tiles(32, scales="float32", zeros=True),
    "int4 g128, fp32 scales and zeros": int4_tiles(128, scales="float32", zeros=True),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dim", [128, 768, 2048, 7168, 8192])
def test_default_configs_fit_shared_memory(form: WeightForm, dim: int) -> None:
    """7168 columns in groups of 32 are those of Kimi-K2. 8192 columns have the most groups."""
    for rows in (1, 8, 16, 32, 64, 128):
        for gated in (True, False):
            config = default_config(form, dim=dim, rows=rows, gated=gated)
            assert shared_bytes(config, form, dim=dim, rows=max(8, rows), gated=gated) <= MAX_SHARED
            assert config.BN * (1 + gated) >= 16 * config.num_warps
            assert dim // form.tile_columns % config.tiles == 0


def test_shared_memory_is_that_of_the_compiled_kernel() -> None:
    """The compiler reports 229944 bytes for Kimi-K2's first product over blocks of 128 rows."""
    form = int4_tiles(32, scales="bfloat16", zeros=False)
    config = default_config(form, dim=7168, rows=128, gated=True)
    assert (config.BN, config.tiles, config.num_stages, config.num_warps) == (128, 1, 2, 8)
    assert shared_bytes(config, form, dim=7168, rows=128, gated=True) == 229944
