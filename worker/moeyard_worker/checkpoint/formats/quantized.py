"""The parts that all quantised formats share: which matrices are quantised, and the refusal of contradictions. Pure.

config.json says which modules are quantised, and the stored tensors show it. Inference engines that trusted one of the
two have served garbage (vLLM issues 31872 and 40252, SGLang issue 38443). So both must agree.
"""

import re
from abc import abstractmethod
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, Self

from moeyard_kernels.types.weight_form import ExpertForm, WeightForm, fp8_tiles, int4_tiles, plain_expert, plain_form
from moeyard_worker.checkpoint.formats.format import Scheme
from moeyard_worker.checkpoint.formats.plain import PlainScheme
from moeyard_worker.config.checkpoint_error import CheckpointError
from moeyard_worker.layers.weights import Part, Weight

# Plain tensors of a quantised checkpoint. float16 values are rounded to the served dtype.
_PLAIN = PlainScheme(("F32", "BF16", "F16"))
# Projections that every exporter quantises unless its settings exclude them. Others are quantised if they have scales.
_PROJECTIONS = re.compile(
    r"(?:.*\.)?(?:self_attn|mlp|block_sparse_moe|shared_experts?|experts)\.(?:.*\.)?"
    r"(?:(?:q|k|v|o|gate|up|down|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|w[123])"
    # DeepSeek-V4:
    r"|(?:.*\.)?attn\.(?:wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)"
)
# Modules that no kernel serves from codes: the router's gates and the embedding.
_NEVER = re.compile(r"(?:.*\.)?(?:gate|shared_expert_gate|embed_tokens)")
# Scales of e4m3 codes: any fp32 values, bf16 values, or powers of two.
Scales = Literal["float32", "bfloat16", "ue8m0"]
# Modules that become bfloat16: the output head, whose product has few rows and many columns.
_NO_CODES = re.compile(r"(?:^|\.)(?:lm_head|head)\.weight$")
# Names of Quark and compressed-tensors, and ".kv_scale" of vLLM's first fp8 checkpoints.
_KV_SCALES = re.compile(
    r".*\.(?:[qkv]_scale|kv_scale|prob_output_scale|[kv]_zero_point|[qkv]_proj\.output_(?:scale|zero_point))"
)
_ACTIVATION_SCALES = re.compile(r".*\.(?:(?:input|output)_(?:scale|zero_point)|input_global_scale|activation_scale)")


class QuantizedScheme(Scheme, Protocol):
    """How one quantised matrix is stored."""

    def marker(self, key: str) -> str:
        """Return the key of a tensor that exists only if the matrix `key` is quantised."""
        ...

    def refusal(self, part: Part) -> str | None:
        """Return the reason why `part` cannot be stored like this, or None."""
        ...

    def untiled(self, columns: int) -> str | None:
        """Return the reason why no product reads codes of matrices with `columns` columns, or None."""
        ...

    def tiles(self, columns: int) -> WeightForm | None:
        """Return the tiled form of matrices with `columns` columns, or None if no product reads it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedFormat:
    """A `Format` with quantised matrices. Every matrix is served as bfloat16(q * s).

    file: path of the settings, for errors.
    markers: suffixes of keys that only a quantised matrix has. They replace ".weight" or follow the whole key.
    experts: schemes of gate and up, and of down. None if experts do not keep their codes in memory.
    decoded: why codes of experts become bfloat16. None if they stay, and before `with_codes`.
    left_plain: as of `Format`.
    dense: whether other matrices of fp8 codes keep them too, if only `Backend.linear` reads them.
    scales: kind of the scales of e4m3 codes, None if only the stored tensors show it.
    int4_scales: dtype in memory of the scales of int4 codes, None if only the stored tensors show it.

    Two formats that differ in kinds of scales or in `left_plain` alone are equal, because these change no weight.
    """

    file: str
    markers: tuple[str, ...]
    experts: "tuple[QuantizedScheme, QuantizedScheme] | None" = None
    decoded: str | None = None
    dense: bool = False
    left_plain: tuple[str, ...] = field(default=(), compare=False)
    scales: Scales | None = field(default="float32", compare=False)
    int4_scales: Literal["float32", "bfloat16"] | None = field(default="float32", compare=False)

    @abstractmethod
    def promised(self, module: str) -> QuantizedScheme | None:
        """Return the scheme that config.json gives a module, None if it is excluded."""

    def exclusion(self, module: str) -> str:
        """Return why `promised` gives `module` no scheme."""
        return "config.json excludes it"

    def named(self, scheme: QuantizedScheme, part: Part, keys: Container[str]) -> QuantizedScheme:
        """Return the promised scheme of `part` with the names that the stored tensors have."""
        return scheme

    def written(self, part: Part) -> QuantizedScheme | None:
        """Return the scheme to write `part` in, None if it stays plain: only projections are quantised."""
        module = part.key.removesuffix(".weight")
        return self.promised(module) if len(part.shape) == 2 and _PROJECTIONS.fullmatch(module) else None

    def form(self, weight: Weight, dtype: str, keys: Container[str]) -> WeightForm:
        plain = plain_form(weight.kept(dtype))
        if not self.dense or not weight.matrix or weight.fp32 or dtype != "bfloat16":
            return plain
        first, *others = (self._dense_tiles(weight, part, keys) for part in weight.parts)
        return plain if first is None or any(each != first for each in others) else first

    def _dense_tiles(self, weight: Weight, part: Part, keys: Container[str]) -> WeightForm | None:
        """Return the tiled form of a matrix as far as one of its parts decides it, or None if it becomes bfloat16.

        A block of scales must not cover rows of two parts. One scale for a part becomes one for each of its rows.
        """
        scheme = self._scheme(part, keys)
        if isinstance(scheme, PlainScheme) or _NO_CODES.search(part.key):
            return None
        if part.regroup is not None or sum(each.shape[0] for each in weight.parts) < weight.rows:
            return None
        form = self._tiles(scheme, weight.columns)
        if form is None or form.name != "fp8":
            return None
        scales = form.parts[1]
        if scales.rows is None:
            return fp8_tiles(1, None, scales=scales.dtype) if scales.columns is None else None
        return None if part.row % scales.rows else form

    def _tiles(self, scheme: QuantizedScheme, columns: int) -> WeightForm | None:
        """Return the tiled form of matrices with `columns` columns, with the scales of this checkpoint, or None."""
        form = scheme.tiles(columns)
        if form is None:
            return None
        if form.name == "fp8" and self.scales not in ("float32", None):
            return fp8_tiles(form.parts[1].rows, form.parts[1].columns, scales="bfloat16")
        if form.name == "int4" and self.int4_scales is not None:
            return int4_tiles(form.parts[1].columns, scales=self.int4_scales, zeros=len(form.parts) > 2)
        return form

    def expert_form(self, *, hidden: int, intermediate: int, dtype: str) -> ExpertForm:
        plain = plain_expert(hidden=hidden, intermediate=intermediate, dtype=dtype)
        if self.experts is None or dtype != "bfloat16":
            return plain
        gate_up, down = (
            self._tiles(scheme, columns) for scheme, columns in zip(self.experts, (hidden, intermediate), strict=True)
        )
        assert gate_up is not None, "with_codes has checked it"
        assert down is not None, "with_codes has checked it"
        return ExpertForm(hidden=hidden, intermediate=intermediate, gate_up=gate_up, down=down)

    def with_codes(
        self, experts: Iterable[tuple[str, str, str]], *, dense: bool, hidden: int, intermediate: int
    ) -> Self:
        """Return the format that keeps codes in memory. Those of experts become bfloat16 if some differ or no product
        reads them.

        experts: the modules of gate, up and down of an expert of each layer. dense: other matrices keep theirs, too.
        """
        schemes = {tuple(self.promised(module) for module in modules) for modules in experts}
        found = replace(self, dense=dense)
        if schemes == {(None, None, None)}:
            return found
        gate, up, down = schemes.pop()
        if schemes or gate is None or down is None or gate != up:
            return replace(found, decoded="config.json gives some of them another scheme or none")
        why = gate.untiled(hidden) or down.untiled(intermediate)
        return replace(found, decoded=f"no product reads them ({why})") if why else replace(found, experts=(gate, down))

    def scheme(self, part: Part, keys: Container[str]) -> Scheme:
        found = self._scheme(part, keys)
        if self.experts is not None and ".experts." in part.key and found not in self.experts:
            raise CheckpointError(
                f"{self.file}: {part.key} is not stored like the other experts, so their codes cannot stay in GPU "
                "memory; serve the checkpoint with --weights bfloat16"
            )
        return found

    def _scheme(self, part: Part, keys: Container[str]) -> QuantizedScheme | PlainScheme:
        if len(part.shape) != 2:
            return _PLAIN
        module = part.key.removesuffix(".weight")
        found = None if _NEVER.fullmatch(module) else self.promised(module)
        if found is None:
            self._check_plain(module, part.key, keys)
            return _PLAIN
        found = self.named(found, part, keys)
        if found.marker(part.key) not in keys and not _PROJECTIONS.fullmatch(module):
            return _PLAIN
        why = found.refusal(part)
        if why is not None:
            raise CheckpointError(f"{self.file}: {part.key}: {why}")
        return found

    def _check_plain(self, module: str, key: str, keys: Container[str]) -> None:
        for suffix in self.markers:
            if (marker := f"{module}{suffix}") in keys or (marker := f"{key}{suffix}") in keys:
                why = "it is served in bfloat16 only" if _NEVER.fullmatch(module) else self.exclusion(module)
                raise CheckpointError(f"{self.file}: {module} is quantised (the checkpoint holds {marker}), but {why}")

    def skips(self, key: str) -> str | None:
        if _KV_SCALES.fullmatch(key):
            return "a scale of the KV cache, which is not quantised"
        if _ACTIVATION_SCALES.fullmatch(key):
            return "a scale of activations, which are not quantised"
        return None

    def contradicts(self, key: str, keys: Container[str]) -> str | None:
        if key.endswith(".weight_zero_point"):
            return "config.json says that codes have no zero points (symmetric: true)"
        return None
