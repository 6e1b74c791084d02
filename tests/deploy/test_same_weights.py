"""A checkpoint replaced while it is served: no rank continues with other weights in the middle of answers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import make_checkpoint
from tests.deploy.fleet_world import World
from tests.deploy.test_serve import Command, command, post
from tests.limits import HANG_SECONDS

__all__ = ["command"]  # the fixture

ONE, EDITED, OTHER = ({"m": ("a", "1")}, {"m": ("a", "2")}, {"m": ("b", "1")})


@pytest.mark.parametrize(
    ("node", "found", "same"),
    [
        *(("x", ONE, True), ("y", EDITED, True), ("z", EDITED, True), ("z", ONE, True)),
        *(("x", EDITED, False), ("y", ONE, False), ("x", OTHER, False), ("z", OTHER, False)),
    ],
)
def test_times_count_on_one_host_and_content_everywhere(node: str, found: dict[str, Any], same: bool) -> None:
    world = World(2, takeover="never", launch=False)
    world.facts = {0: {"node": "x", "weights": ONE}, 1: {"node": "y", "weights": EDITED}}
    world.turns(2)
    assert world.serving == [0, 1]
    world.facts[1] = {"node": node, "weights": found}
    world.kill(1)
    world.turns(2)
    assert ("m of rank 1 differs from the fleet's: " in str(world.given_up)) != same
    assert (world.given_up == []) == same


@pytest.mark.slow
@pytest.mark.parametrize("takeover", ["auto", "never"])
def test_lost_rank_is_not_replaced_with_other_weights(
    command: Callable[..., Command], tmp_path: Path, takeover: str
) -> None:
    """A restart that would load them is refused and the rank stays; a loss ends the fleet and names the file."""
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", tokenizer=True)
    words = ("--workers", "2", "--port", "0", "--served-model-name", "demo", "--expert-takeover", takeover)
    served = command("serve", str(model), *words, "--restart-limit", "2")
    served.wait_ready()
    body = {"prompt": [5, 6, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def answer() -> str:
        return json.dumps(post(f"{served.url}/v1/completions", json=body).json()["choices"])

    before = answer()
    # Rename, as docs/upgrades.md says.
    weights = {key: x + 0.1 * torch.randn_like(x) for key, x in load_file(model / "model.safetensors").items()}
    save_file(weights, tmp_path / "new", metadata={"format": "pt"})
    os.replace(tmp_path / "new", model / "model.safetensors")
    assert answer() == before
    result = served.run("restart", "--worker", "1")
    assert result.returncode == 1
    named = "model.safetensors of rank 1 differs from the fleet's"
    assert f"the next process of rank 1 does not start: {named}" in result.stderr
    assert answer() == before
    served.workers()[1].kill()
    assert served.process.wait(HANG_SECONDS) == 1, served.report("wrong message")
    last = served.err.read_text().strip().splitlines()[-1]
    assert "model.safetensors of rank" in last, served.report("the file is not named")
