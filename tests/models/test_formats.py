"""A checkpoint format is one file: here a toy of int8 codes and one scale per row, registered as any other is."""

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import edit_config, make_checkpoint
from tests.rank import Rank

from moeyard_kernels.cpu.backend import CpuBackend
from moeyard_kernels.types.matrix import Matrix, blob_views
from moeyard_kernels.types.weight_form import ExpertForm, FormPart, WeightForm
from moeyard_worker.checkpoint.formats import choose
from moeyard_worker.checkpoint.formats.format import Read, StoredTensor
from moeyard_worker.checkpoint.formats.plain import PlainFormat
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.layers.weights import Part
from moeyard_worker.models.families import load_model_config
from moeyard_worker.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class RowsOfInt8(PlainFormat):
    """`KEY.codes` I8 [N, K] and `KEY.scale` F32 [N, 1]: w = bf16(code * scale). Tensors without codes are plain."""

    def stored(self, part: Part, keys: Container[str]) -> Mapping[str, StoredTensor]:
        if f"{part.key}.codes" not in keys:
            return PlainFormat.stored(self, part, keys)
        assert part.whole is None
        scale = StoredTensor((part.shape[0], 1), ("F32",))
        return {f"{part.key}.codes": StoredTensor(part.shape, ("I8",)), f"{part.key}.scale": scale}

    def fill(self, out: Matrix, part: Part, read: Read) -> None:
        codes, scale = torch.empty(out.shape, dtype=torch.int8), torch.empty(out.shape[0], 1)
        try:
            read(f"{part.key}.codes", codes)
        except KeyError:
            return PlainFormat.fill(self, out, part, read)
        read(f"{part.key}.scale", scale)
        out.data.copy_((codes * scale).bfloat16())
        return None


def quantised(directory: Path, kept: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Quantise the matrices of a checkpoint but those whose name ends in `kept`; returns what they then stand for."""
    path = directory / "model.safetensors"
    plain, stored = {}, {}
    for key, value in load_file(path).items():
        if value.dim() != 2 or key.endswith(kept):
            plain[key] = stored[key] = value
            continue
        scale = value.float().abs().amax(1, keepdim=True) / 127 + 1e-9
        codes = (value / scale).round().to(torch.int8)
        stored |= {f"{key}.codes": codes, f"{key}.scale": scale}
        plain[key] = (codes * scale).bfloat16()
    save_file(stored, path, metadata={"format": "pt"})
    edit_config(directory, quantization_config={"quant_method": "rows_of_int8"})
    return plain


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "FORMATS", MappingProxyType({"rows_of_int8": lambda settings: RowsOfInt8()}))


def answers(directory: Path, **options: Any) -> Any:
    asked = {
        name: (list(range(i, 20 + i)), SamplingParams(max_tokens=8, temperature=0.0))
        for i, name in ((1, "a"), (7, "b"))
    }
    with Rank(directory, **options) as rank:
        return {name: told.token_ids for name, told in rank.run(asked)[0].items()}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("slots", [None, 3], ids=["all resident", "3 slots"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_answers_are_those_of_the_dequantised_checkpoint(family: str, slots: int | None, tmp_path: Path) -> None:
    """Some matrices are quantised and others are not, also within one stacked product (q and k, v)."""
    directory = make_checkpoint(tmp_path / "int8", family, dtype=torch.bfloat16)
    plain = make_checkpoint(tmp_path / "bf16", family, dtype=torch.bfloat16)
    tensors = quantised(directory, ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "q_proj.weight"))
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    assert answers(directory, expert_slots=slots) == answers(plain, expert_slots=slots)


@pytest.mark.usefixtures("registered")
def test_a_format_proves_completeness(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    quantised(directory, ("embed_tokens.weight",))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight.scale"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"no tensor model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight\.scale of"
    ):
        open_checkpoint(directory, load_model_config(directory))


def test_a_quantiser_without_a_format_is_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    quantised(directory, ())
    with pytest.raises(CheckpointError, match="quantised by rows_of_int8"):
        load_model_config(directory)


BLOCKS = WeightForm("blocks", (FormPart("codes", "uint8"), FormPart("scales", "float32", 4, 8)))
NIBBLES = WeightForm(
    "nibbles",
    (FormPart("codes", "int32", 1, 8), FormPart("scales", "bfloat16", 1, 4), FormPart("index", "int32", None, 1)),
)


def test_bytes_of_forms_with_several_parts() -> None:
    """Blocks at the edges are partial; one row of the index stands for all rows."""
    assert [part.shape(6, 20) for part in BLOCKS.parts] == [(6, 20), (2, 3)]
    assert BLOCKS.num_bytes(6, 20) == 6 * 20 + 2 * 3 * 4
    assert [part.shape(6, 20) for part in NIBBLES.parts] == [(6, 3), (6, 5), (1, 20)]
    assert NIBBLES.num_bytes(6, 20) == 6 * 3 * 4 + 6 * 5 * 2 + 20 * 4


def test_views_of_an_expert_share_no_byte_and_are_all_of_it() -> None:
    form = ExpertForm(hidden=20, intermediate=6, gate_up=BLOCKS, down=NIBBLES)
    blob = torch.zeros(form.blob_bytes, dtype=torch.uint8)
    views = blob_views(form, blob)
    matrices = (views.gate, views.up, views.down)
    assert [matrix.shape for matrix in matrices] == [(6, 20), (6, 20), (20, 6)]
    arrays = [array for matrix in matrices for array in matrix.arrays]
    assert [tuple(array.shape) for array in arrays] == [
        *((6, 20), (2, 3)),
        *((6, 20), (2, 3)),
        *((20, 1), (20, 2), (1, 6)),
    ]
    for array in arrays:
        array.add_(1)
    assert all(torch.equal(array, torch.ones_like(array)) for array in arrays)
    spare = form.blob_bytes - sum(array.nbytes for array in arrays)
    assert 0 <= spare < 16 * len(arrays), "rounded up to where the next array may begin"
    assert [len(part) for part in blob.split(form.region_bytes)] == list(form.region_bytes)


def test_rows_of_a_matrix_with_blocks() -> None:
    matrix = Matrix.empty(BLOCKS, 10, 16, torch.device("cpu"))
    rows = matrix.rows(4, 6)
    assert rows.shape == (6, 16)
    assert [tuple(array.shape) for array in rows.arrays] == [(6, 16), (2, 2)]
    with pytest.raises(AssertionError, match="lies inside a block of 4 rows"):
        matrix.rows(3, 2)


def test_a_form_without_products_is_refused() -> None:
    with pytest.raises(ValueError, match="no products of blocks weights"):
        CpuBackend(page_size=16).matrix(Matrix.empty(BLOCKS, 8, 8, torch.device("cpu")))


@pytest.mark.usefixtures("registered")
def test_loaded_values(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "deepseek_v3", dtype=torch.bfloat16)
    tensors = quantised(directory, ("embed_tokens.weight", "norm.weight"))
    checkpoint = open_checkpoint(directory, load_model_config(directory))
    weights = CheckpointWeights(checkpoint, backend=CpuBackend(page_size=16), dtype=torch.bfloat16)
    layer = checkpoint.spec.layers[0].attention
    assert torch.equal(weights.load(layer["kv_b"]).flatten(), tensors[layer["kv_b"].parts[0].key].flatten())
    assert json.loads((directory / "config.json").read_text())["quantization_config"]
