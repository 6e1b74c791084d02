"""Train the bundled demo model by GRPO on a CPU, against a running server: `python examples/grpo.py --out DIR`.

Each step samples several answers per prompt from `moeyard serve`, rewards them, takes one step of AdamW, and puts the
new weights into service. GRPO (DeepSeekMath, arXiv 2402.03300) compares an answer with the others of its prompt. Its
loss has the ratio of a token's probability under the trained model to that under the server's. In the first update of
a batch both have the same weights, so the ratio should be 1. The script prints for how many tokens it is exactly 1:
with `moeyard.torch` and with transformers in the same dtype.

The reward is the share of an answer's letters that are "e", which a few steps raise visibly.
"""

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moeyard_worker.config.cpu_config import set_cpu_environment

# Before torch is loaded: without it, a CPU may have other bits than the server (moeyard_worker/config/cpu_config.py).
set_cpu_environment()

import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from moeyard.torch import Sample, TrainableModel  # noqa: E402
from moeyard_worker.engine.assembly.verify import reference_model  # noqa: E402

DEMO = Path(__file__).resolve().parents[1] / "deploy" / "demo"
PROMPTS = ("<|begin|>In the beginning", "<|begin|>The sea was", "<|begin|>My dear friend,", "<|begin|>It is a truth")
CLIP = 0.2
GROUP_SEEDS = 1000  # seeds of a prompt in a step; answer i of a request has its seed plus i
START_SECONDS, REQUEST_SECONDS = 300.0, 120.0


class Server(Protocol):
    """A server whose weights can be replaced."""

    @property
    def url(self) -> str: ...

    def update(self, directory: Path) -> None:
        """Serve the checkpoint in `directory` from now on."""


class Serve:
    """`moeyard serve` in a process of its own. New weights replace the old ones while it runs."""

    def __init__(self, directory: Path, port: int) -> None:
        self.url, self._control = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
        self._key, self._folder = secrets.token_hex(16), tempfile.TemporaryDirectory()
        keys = Path(self._folder.name) / "keys"
        keys.write_text(self._key)
        command = [sys.executable, "-m", "moeyard", "serve", str(directory), "--port", str(port), "--device", "cpu"]
        command += ["--enable-return-routed-experts", "--log-level", "warning"]
        command += ["--control-listen", f"127.0.0.1:{port + 1}", "--control-key-file", str(keys)]
        self._process = subprocess.Popen(command)
        begun = time.monotonic()
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() - begun > START_SECONDS:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.2)

    def update(self, directory: Path) -> None:
        body = json.dumps({"model_path": str(directory.resolve()), "weight_version": directory.name}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        request = urllib.request.Request(f"{self._control}/update_weights_from_disk", body, headers)
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
            answer.read()

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=REQUEST_SECONDS):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A sampled answer: its log-probabilities as the server reported them, fp32 [tokens], and its advantage."""

    sample: Sample
    logprobs: torch.Tensor
    advantage: float
    reward: float


def generate(url: str, prompt: Sequence[int], *, count: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` choices of `/inference/v1/generate`. The sampling defaults are those of the plain model."""
    sampling = {"n": count, "max_tokens": max_tokens, "seed": seed, "logprobs": 0}
    body = json.dumps({"token_ids": prompt, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{url}/inference/v1/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
        choices: list[dict[str, Any]] = json.load(answer)["choices"]
    return choices


def share_of_e(text: str) -> float:
    """Return the reward of an answer."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return letters.count("e") / max(len(letters), 1)


def roll_out(url: str, tokenizer: Tokenizer, *, group: int, max_tokens: int, seed: int) -> list[Rollout]:
    """Return `group` answers to each prompt. Advantages are rewards relative to the group's mean and deviation."""
    found = []
    for number, text in enumerate(PROMPTS):
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        choices = generate(url, prompt, count=group, max_tokens=max_tokens, seed=seed + GROUP_SEEDS * number)
        rewards = torch.tensor([share_of_e(tokenizer.decode(choice["token_ids"])) for choice in choices])
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        for choice, reward, advantage in zip(choices, rewards.tolist(), advantages.tolist(), strict=True):
            logprobs = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
            sample = Sample.of_choice(prompt, choice)
            found.append(Rollout(sample=sample, logprobs=logprobs, advantage=advantage, reward=reward))
    return found


def loss_of(logprobs: Sequence[torch.Tensor], rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return the clipped loss of GRPO without a term for a reference model, a mean over all tokens."""
    parts = []
    for new, rollout in zip(logprobs, rollouts, strict=True):
        ratio, advantage = (new - rollout.logprobs).exp(), rollout.advantage
        parts.append(torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
    return -torch.cat(parts).mean()


@torch.no_grad()
def transformers_logprobs(directory: Path, dtype: torch.dtype, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
    """Return the log-probabilities [tokens] of each answer by transformers, from logits in `dtype`."""
    model = reference_model(directory, "deepseek_v3", dtype=dtype)
    found = []
    for prompt, output in ((rollout.sample.prompt, rollout.sample.output) for rollout in rollouts):
        ids = torch.tensor([[*prompt, *output]])
        logits = model(ids[:, :-1]).logits[0, len(prompt) - 1 :].float()
        found.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1))
    return found


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of probabilities, the trainer's to the server's: how many are exactly 1, and their range."""

    exact: int
    count: int
    least: float
    most: float

    @staticmethod
    def of(logprobs: Sequence[torch.Tensor], rollouts: Sequence[Rollout]) -> "Ratios":
        ratios = (torch.cat(tuple(logprobs)) - torch.cat([rollout.logprobs for rollout in rollouts])).exp()
        exact = int((ratios == 1).sum())
        return Ratios(exact, len(ratios), float(ratios.min()), float(ratios.max()))

    def __str__(self) -> str:
        return f"exactly 1 for {self.exact} of {self.count} tokens, from {self.least:.4f} to {self.most:.4f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step: the mean reward of its answers, and the ratios of both trainers before the update."""

    reward: float
    ours: Ratios
    transformers: Ratios


def train(
    server: Server,
    directory: Path,
    out: Path,
    *,
    steps: int,
    group: int,
    max_tokens: int,
    lr: float,
    show: Callable[[str], None] = print,
) -> list[StepReport]:
    """Train the checkpoint that `server` serves. The weights after step i are in out/step-i."""
    tokenizer, model = Tokenizer.from_file(str(directory / "tokenizer.json")), TrainableModel(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    dtype = getattr(torch, model.config.dtype)
    reports = []
    for step in range(steps):
        rollouts = roll_out(
            server.url, tokenizer, group=group, max_tokens=max_tokens, seed=step * len(PROMPTS) * GROUP_SEEDS
        )
        logprobs = model([rollout.sample for rollout in rollouts])
        report = StepReport(
            reward=sum(rollout.reward for rollout in rollouts) / len(rollouts),
            ours=Ratios.of([each.detach() for each in logprobs], rollouts),
            transformers=Ratios.of(transformers_logprobs(directory, dtype, rollouts), rollouts),
        )
        reports.append(report)
        show(f"step {step}: mean reward {report.reward:.4f}")
        show(f"  ratio, moeyard.torch: {report.ours}")
        show(f"  ratio, transformers:  {report.transformers}")
        optimizer.zero_grad()
        loss_of(logprobs, rollouts).backward()
        optimizer.step()
        directory = out / f"step-{step}"
        model.save(directory)
        if step + 1 < steps:
            server.update(directory)
    return reports


def main() -> None:
    """Run the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the weights of each step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--group", type=int, default=16, help="answers per prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--port", type=int, default=8011)
    args = parser.parse_args()
    server = Serve(DEMO, args.port)
    try:
        train(server, DEMO, args.out, steps=args.steps, group=args.group, max_tokens=args.max_tokens, lr=args.lr)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
