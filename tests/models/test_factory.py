from pathlib import Path

import pytest
from tests.checkpoints import FAMILIES, make_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_bytes(tmp_path: Path, family: str) -> None:
    one, two, other = (
        make_checkpoint(tmp_path / name, family, seed=seed) for name, seed in (("one", 1), ("two", 1), ("other", 2))
    )
    file = "model.safetensors"
    assert (one / file).read_bytes() == (two / file).read_bytes()
    assert (one / file).read_bytes() != (other / file).read_bytes()
