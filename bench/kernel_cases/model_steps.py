"""What the launches of a model's step are given: the sizes that the bench's rows of models are made of.

From the configs on the hub, as `moeyard_worker.models.shapes` has them, which kernels may not import:
tests/kernels/test_model_steps.py derives the same from there, and fails where a launch of a step has no row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from moeyard_kernels.types.gate import GateRule

# Rows of a step: of output, and of a prompt.
DECODE_ROWS, PROMPT_ROWS = (1, 8, 64), (256, 512, 1024, 8192)
ROWS = (*DECODE_ROWS, *PROMPT_ROWS)
# Every latent attention here has these: the latent, a head's key without and with its rotated part, its value.
RANK, NOPE, ROPE, DIM_V = 512, 128, 64, 128
# Heads of linear attention.
DELTA_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """x [M, dim] @ [num_out, dim].T; `of` says in which steps, `fp32` that sums stay unrounded (a gate's logits)."""

    dim: int
    num_out: int
    of: Literal["all", "decode", "prompts"] = "all"
    fp32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Attention with grouped heads, of which `rotated` values are turned; `gated`: its output goes through a gate."""

    heads: int
    kv_heads: int
    dim: int = 128
    rotated: int = 128
    normed: bool
    gated: bool = False

    def products(self, hidden: int) -> Iterator[Product]:
        """Of queries, keys, values and gates; of the output."""
        width = self.heads * self.dim
        yield Product(dim=hidden, num_out=width * (1 + self.gated) + 2 * self.kv_heads * self.dim)
        yield Product(dim=width, num_out=hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention; without a query rank (0) the latent's norm is part of the cache write."""

    heads: int
    query_rank: int = 0
    interleaved: bool = True

    def products(self, hidden: int) -> Iterator[Product]:
        """Down, the query's up, the decompression of prompts' keys and values; of the output."""
        queries = self.heads * (NOPE + ROPE)
        yield Product(dim=hidden, num_out=(self.query_rank or queries) + RANK + ROPE)
        if self.query_rank:
            yield Product(dim=self.query_rank, num_out=queries)
        yield Product(dim=RANK, num_out=self.heads * (NOPE + DIM_V), of="prompts")
        yield Product(dim=self.heads * DIM_V, num_out=hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Linear attention by the delta rule. Its prompts are in the bench's own table (`linear_attention`)."""

    op: Literal["gdn_step", "kda_step"]
    key_heads: int
    heads: int

    @property
    def channels(self) -> int:
        """Queries, keys and values, which are convolved."""
        return (2 * self.key_heads + self.heads) * DELTA_DIM

    def products(self, hidden: int) -> Iterator[Product]:
        """Of all that the rule reads; of the output."""
        width = self.heads * DELTA_DIM
        beside = 2 * DELTA_DIM + self.heads if self.op == "kda_step" else width + 2 * self.heads
        yield Product(dim=hidden, num_out=self.channels + beside)
        yield Product(dim=width, num_out=hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """A model, as far as its launches tell it.

    `inner`, `shared`, `dense`: widths of a routed expert, of all shared experts and of layers without experts (0:
    none). `bias`: a gate's correction. `shared_gate` is a row of the router's product. `fp32_norms`: norms are stored
    less one. `drafts`: there is a layer that drafts. `ranks`: among how many GPUs the experts of a layer are spread
    here, for two copies of them all beside one would not fit a GPU of 80 GB.
    """

    name: str
    hidden: int
    vocabulary: int
    attention: tuple[Grouped | Latent | Delta, ...]
    rule: GateRule
    num_experts: int
    inner: int
    shared: int = 0
    dense: int = 0
    bias: bool = False
    fp32_logits: bool = False
    shared_gate: bool = False
    fp32_norms: bool = False
    drafts: bool = False
    ranks: int = 1

    @property
    def num_logits(self) -> int:
        """Columns of the router's product: with a shared expert's gate behind the experts, padded to 16."""
        return -(-(self.num_experts + 1) // 16) * 16 if self.shared_gate else self.num_experts

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the MLPs that every row goes through."""
        return tuple(width for width in (self.shared, self.dense) if width)

    def products(self) -> Iterator[Product]:
        """Of `linear`, each once."""
        found = [product for kind in self.attention for product in kind.products(self.hidden)]
        found.append(Product(dim=self.hidden, num_out=self.num_logits, fp32=self.fp32_logits))
        for width in self.widths:
            found += [Product(dim=self.hidden, num_out=2 * width), Product(dim=width, num_out=self.hidden)]
        if self.drafts:
            found.append(Product(dim=2 * self.hidden, num_out=self.hidden))
        found.append(Product(dim=self.hidden, num_out=self.vocabulary, of="decode"))
        yield from dict.fromkeys(found)


_SOFTMAX = GateRule(top_k=8, scoring="softmax", renormalize=True)


def _sigmoid(scaling: float, num_groups: int = 1, topk_groups: int = 1) -> GateRule:
    return GateRule(
        top_k=8, scoring="sigmoid", renormalize=True, num_groups=num_groups, topk_groups=topk_groups,
        group_score="top2sum", scaling=scaling,
    )  # fmt: skip


_MODELS = (
    ModelStep(
        name="Qwen3-30B-A3B", hidden=2048, vocabulary=151936, num_experts=128, inner=768, rule=_SOFTMAX,
        attention=(Grouped(heads=32, kv_heads=4, normed=True),),
    ),
    ModelStep(
        name="Qwen3-235B-A22B", hidden=4096, vocabulary=151936, num_experts=128, inner=1536, rule=_SOFTMAX,
        attention=(Grouped(heads=64, kv_heads=4, normed=True),),
    ),
    ModelStep(
        name="Mixtral-8x7B", hidden=4096, vocabulary=32000, num_experts=8, inner=14336,
        rule=GateRule(top_k=2, scoring="softmax", renormalize=True),
        attention=(Grouped(heads=32, kv_heads=8, normed=False),),
    ),
    ModelStep(
        name="DeepSeek-V2-Lite", hidden=2048, vocabulary=102400, num_experts=64, inner=1408, shared=2816, dense=10944,
        fp32_logits=True, rule=GateRule(top_k=6, scoring="softmax", renormalize=False), attention=(Latent(heads=16),),
    ),
    ModelStep(
        name="DeepSeek-V3", hidden=7168, vocabulary=129280, num_experts=256, inner=2048, shared=2048, dense=18432,
        bias=True, fp32_logits=True, drafts=True, ranks=8, rule=_sigmoid(2.5, 8, 4),
        attention=(Latent(heads=128, query_rank=1536),),
    ),
    ModelStep(
        name="Kimi-K2", hidden=7168, vocabulary=163840, num_experts=384, inner=2048, shared=2048, dense=18432,
        bias=True, fp32_logits=True, ranks=8, rule=_sigmoid(2.827), attention=(Latent(heads=64, query_rank=1536),),
    ),
    ModelStep(
        name="Kimi-Linear-48B-A3B", hidden=2304, vocabulary=163840, num_experts=256, inner=1024, shared=1024,
        dense=9216, bias=True, fp32_logits=True, rule=_sigmoid(2.446),
        attention=(Delta(op="kda_step", key_heads=32, heads=32), Latent(heads=32, interleaved=False)),
    ),
    ModelStep(
        name="Qwen3.5-35B-A3B", hidden=2048, vocabulary=248320, num_experts=256, inner=512, shared=512,
        shared_gate=True, fp32_norms=True, drafts=True, rule=_SOFTMAX,
        attention=(
            Delta(op="gdn_step", key_heads=16, heads=32),
            Grouped(heads=16, kv_heads=2, dim=256, rotated=64, normed=True, gated=True),
        ),
    ),
)  # fmt: skip
MODELS: Mapping[str, ModelStep] = MappingProxyType({model.name: model for model in _MODELS})
