"""Bench of the sampler: 64 rows of 163840 logits (Kimi-K2's vocabulary), and the torch chain that engines use."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kernel_cases.case import Case, Target, assert_bits
from kernel_cases.model_steps import DECODE_ROWS, ModelStep
from moeyard_kernels import ops
from moeyard_kernels.sampling import sample as triton_kernel
from moeyard_kernels.types.sampling import LogitEdits, SampledTokens

OPS: tuple[str, ...] = ("sample",)

VOCAB = 163840
_EXACT = ("ids", "ranks", "top_ids")
# Rows that are proven against the float64 reference, which takes 20 ms per row.
PROVEN = 6


def _options(num_rows: int, *names: str) -> dict[str, Any]:
    """Return arguments of the op. Each row has its own, around the values of the target."""
    g = torch.Generator().manual_seed(num_rows)

    def around(low: float, high: float) -> torch.Tensor:
        return (torch.rand(num_rows, generator=g, dtype=torch.float64) * (high - low) + low).cuda()

    columns = {
        "temperature": around(0.6, 1.0),
        "seeds": torch.randint(2**62, (num_rows,), generator=g).cuda(),
        "positions": torch.randint(8192, (num_rows,), generator=g).cuda(),
        "top_k": torch.randint(20, 101, (num_rows,), generator=g).cuda(),
        "top_p": around(0.8, 0.95),
        "min_p": around(0.02, 0.1),
    }
    options: dict[str, Any] = {name: columns[name] for name in names if name in columns}
    if "edits" in names:
        words = torch.zeros(num_rows, VOCAB, dtype=torch.int32)
        words.scatter_(1, torch.randint(VOCAB, (num_rows, 4000), generator=g), LogitEdits.IN_PROMPT)
        words.scatter_(
            1, torch.randint(VOCAB, (num_rows, 1000), generator=g), LogitEdits.IN_PROMPT + 2 * LogitEdits.ONCE
        )
        options["edits"] = LogitEdits(
            words=words.cuda(),
            bias=torch.zeros(num_rows, 1, dtype=torch.float64, device="cuda"),
            slots=torch.arange(num_rows).flip(0).cuda(),
            penalties=torch.tensor([[1.1, 0.1, 0.2]], dtype=torch.float64).repeat(num_rows, 1).cuda(),
        )
    if "logprobs" in names:
        options["logprobs"] = 0
    if "top-20" in names:
        options["logprobs"] = 20
    return options


def _rows_of(options: dict[str, Any], rows: slice, device: str) -> dict[str, Any]:
    """Return the arguments of some rows."""
    out: dict[str, Any] = {}
    for name, x in options.items():
        if isinstance(x, LogitEdits):
            out[name] = LogitEdits(
                words=x.words.to(device),
                bias=x.bias.to(device),
                slots=x.slots[rows].to(device),
                penalties=x.penalties[rows].to(device),
            )
        else:
            out[name] = x[rows].to(device) if isinstance(x, torch.Tensor) else x
    return out


def _prove(logits: torch.Tensor, options: dict[str, Any]) -> Callable[[], None]:
    """Return a proof that some rows equal the reference, and that they are equal alone and in the batch."""

    def prove() -> None:
        whole = ops.sample(logits, **options)
        count = min(PROVEN, logits.shape[0])
        wanted = ops.sample.reference(logits[:count].cpu(), **_rows_of(options, slice(count), "cpu"))
        for name in _EXACT:
            assert_bits(f"{name}, against float64", _part(whole, name, slice(count), "cpu"), getattr(wanted, name))
        for name in ("logprobs", "top_logprobs"):
            got = _part(whole, name, slice(count), "cpu")
            torch.testing.assert_close(got, getattr(wanted, name), rtol=3e-7, atol=3e-7)
        for i in range(count):
            row = slice(i, i + 1)
            alone = ops.sample(logits[row], **_rows_of(options, row, "cuda"))
            for name in (*_EXACT, "logprobs", "top_logprobs"):
                assert_bits(f"{name} of row {i} alone", getattr(alone, name), _part(whole, name, row, "cuda"))

    return prove


def _part(tokens: SampledTokens, name: str, rows: slice, device: str) -> torch.Tensor | None:
    x: torch.Tensor | None = getattr(tokens, name)
    return None if x is None else x[rows].to(device)


def _draw_chain(
    logits: torch.Tensor, temperature: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """Run temperature [B, 1], sort, top-k, top-p, softmax and exponential race, with noise of one generator."""
    x = logits.float() / temperature
    if k is not None or p is not None:
        x, order = x.sort(dim=-1)
        if k is not None:
            x = x.masked_fill(x < x.gather(1, x.shape[1] - k[:, None]), -torch.inf)
        if p is not None:
            x = x.masked_fill(x.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None], -torch.inf)
    probabilities = x.softmax(-1)
    token = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
    return token if k is None and p is None else order.gather(1, token)


def _torch_chain(logits: torch.Tensor, options: dict[str, Any]) -> partial[torch.Tensor]:
    """Return the chain that engines run for these options."""
    if not options:
        return partial(torch.argmax, logits, -1)
    temperature = options["temperature"].float()[:, None]
    return partial(_draw_chain, logits, temperature, options.get("top_k"), options.get("top_p"))


_DRAW = ("temperature", "seeds", "positions")
# Name, arguments, target in microseconds for 64 rows.
_KINDS: tuple[tuple[str, tuple[str, ...], float | None], ...] = (
    ("greedy", (), 30),
    ("top-k+top-p", (*_DRAW, "top_k", "top_p"), 150),
    ("plain", _DRAW, None),
    ("top-k", (*_DRAW, "top_k"), None),
    ("top-p", (*_DRAW, "top_p"), None),
    ("min-p", (*_DRAW, "min_p"), None),
    ("all+penalties+logprobs", (*_DRAW, "top_k", "top_p", "min_p", "edits", "logprobs"), None),
    ("plain, 20 likeliest", (*_DRAW, "top-20"), None),
)


def cases() -> Iterator[Case]:
    """Yield all kinds of rows at 64 rows, fp32 and bf16, those with targets at one row, peaked rows for top-p."""
    for num_rows, dtype in ((64, torch.float32), (64, torch.bfloat16), (1, torch.float32)):
        generator = torch.Generator(device="cuda").manual_seed(num_rows)
        logits = torch.randn(num_rows, VOCAB, generator=generator, device="cuda").to(dtype)
        for kind, names, bound in _KINDS:
            if num_rows == 64 or bound:
                yield _case(logits, kind, names, bound if num_rows == 64 else None)
        if num_rows == 64:
            # The spread of a trained model: a few tokens hold most of the mass.
            yield _case(logits * 3.5, "top-p, peaked", (*_DRAW, "top_p"), None)


def model_cases(models: Sequence[ModelStep], rows: Sequence[int]) -> Iterator[Case]:
    """Yield the two kinds of the targets over each vocabulary."""
    for num_rows in rows:
        for vocabulary in dict.fromkeys(model.vocabulary for model in models):
            if num_rows in DECODE_ROWS:
                logits = torch.randn(num_rows, vocabulary, device="cuda")
                for kind, names, _ in _KINDS[:2]:
                    yield _case(logits, kind, names, None)


def _case(logits: torch.Tensor, kind: str, names: tuple[str, ...], bound: float | None) -> Case:
    num_rows, vocabulary = logits.shape
    options = _options(num_rows, *names)
    configs = triton_kernel.CONFIGS if kind == "top-p" or (num_rows == 1 and kind != "greedy") else ()
    has_chain = not {"min_p", "edits", "top-20"} & set(names)
    return Case(
        op="sample",
        shape=f"{num_rows}x{vocabulary} {str(logits.dtype).removeprefix('torch.')} {kind}",
        run=partial(ops.sample, logits, **options),
        prove=_prove(logits, options),
        num_bytes=logits.numel() * (logits.element_size() + (4 if "edits" in names else 0)),
        target=None if bound is None else Target("us", bound),
        baseline=_torch_chain(logits, options) if has_chain else None,
        baseline_name="torch chain" if has_chain else "",
        variants=[(config, partial(triton_kernel.sample, logits, config=config, **options)) for config in configs],
        tune_key=("sample", triton_kernel.shape_class(num_rows, vocabulary)),
    )
