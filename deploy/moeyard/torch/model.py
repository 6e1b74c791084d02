"""A served model as a torch module: log-probabilities with a server's bits, and their gradients.

The forward runs the server's layers over the server's backend (`served.py`). The backward recomputes each sequence by
plain torch operations (`formula.py`) with the experts that the forward chose, and differentiates those.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from moeyard.torch.formula import FormulaBackend, FormulaExperts, SequencePlan
from moeyard.torch.sample import Sample
from moeyard.torch.served import Results, run_samples
from moeyard_kernels.backend import Backend, StepPlan
from moeyard_kernels.types.layers import GRANULE
from moeyard_kernels.types.matrix import Matrix
from moeyard_worker.checkpoint.converting import is_quantized
from moeyard_worker.checkpoint.identity import CONFIG_NAME
from moeyard_worker.checkpoint.loading import CheckpointWeights, open_checkpoint
from moeyard_worker.checkpoint.reading import DTYPES, Reader
from moeyard_worker.checkpoint.writing import NewCheckpoint, Piece
from moeyard_worker.config.cpu_config import missing_cpu_environment
from moeyard_worker.config.engine_config import DEVICE_DEFAULTS, EngineConfig
from moeyard_worker.config.engine_config import DTYPES as DTYPE_NAMES
from moeyard_worker.config.fields import read_json
from moeyard_worker.engine.assembly.device import make_device
from moeyard_worker.exchange.transports.local import LocalExchange
from moeyard_worker.layers.weights import Weight
from moeyard_worker.models.decoder import Decoder
from moeyard_worker.models.families import load_model_config
from moeyard_worker.state.pools import allocate


class TrainableModel(torch.nn.Module):
    """A checkpoint as trainable parameters under their checkpoint names, except layers of multi-token prediction.

    Parameters are float32 on the CPU or on one GPU. Each forward rounds them to the dtype of the stored tensor, as
    `save` does, then to `dtype`, as a server does that loads the saved checkpoint. So a forward always uses the present
    values, at the cost of one copy of all weights. The gradient ignores both roundings.

    dtype: a value of `moeyard serve --dtype`, or "float64" for checks such as `torch.autograd.gradcheck`. Parameters
        are then float64, and the forward uses the formula of the backward.
    max_model_len: the value of `moeyard serve --max-model-len`. It limits samples, and some rotations depend on it.

    DeepSeek-V4: the backward's formula repeats the indexer's choice of entries in its own dtype. Tables of experts by
    token id are no parameters.

    Raises CheckpointError for a bad checkpoint. Raises ValueError for quantised weights, for settings that
    `moeyard serve` refuses, and on a CPU without the environment that keeps bits.
    """

    def __init__(
        self, directory: Path | str, *, device: str = "cpu", dtype: str = "auto", max_model_len: int | None = None
    ) -> None:
        super().__init__()
        if dtype not in (allowed := (*DTYPE_NAMES, "float64")):
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(allowed)}")
        self._exact = dtype == "float64"
        defaults = DEVICE_DEFAULTS["cpu" if device == "cpu" else "cuda"]
        self._engine = EngineConfig(model_path=str(directory), device=device, max_model_len=max_model_len, **defaults)
        self.config = load_model_config(directory, max_model_len)
        self._longest = max_model_len or self.config.max_position
        if self._longest > self.config.max_position:
            raise ValueError(f"max_model_len {max_model_len} exceeds the model's {self.config.max_position}")
        if is_quantized(self.config):
            raise ValueError(f"{directory}: quantised weights cannot be trained; `moeyard dequantize` makes plain ones")
        if device == "cpu" and (missing := missing_cpu_environment()):
            raise ValueError(
                f"bits may differ from a server's without {' '.join(missing)}: call set_cpu_environment of "
                "moeyard_worker.config.cpu_config before torch is imported"
            )
        self._dtype = torch.float32 if self._exact else getattr(torch, self.config.served_dtype(dtype))
        self._checkpoint = open_checkpoint(directory, self.config)
        entries, place = self._checkpoint.index.entries, self._backend().device
        self._reader = Reader(entries)
        # Ids, which are no parameters.
        self._ids: dict[str, torch.Tensor] = {}
        for key in self._checkpoint.spec.expected():
            if not (stored := DTYPES[entries[key].dtype]).is_floating_point:
                self._ids[key] = torch.empty(entries[key].shape, dtype=stored)
                self._reader.copy(key, self._ids[key])
                continue
            value = torch.empty(entries[key].shape, dtype=torch.float64 if self._exact else torch.float32)
            self._reader.copy(key, value)
            self._register(key, value.to(place))

    def _register(self, key: str, value: torch.Tensor) -> None:
        """Make `value` the parameter whose name in `named_parameters` is `key`."""
        *path, name = key.split(".")
        module: torch.nn.Module = self
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, ...]:
        """Return the log-probabilities of each sample's output, fp32 [tokens], under the logits as they are.

        Raises ValueError without samples, and for a sample that no server would have answered.
        """
        if not samples:
            raise ValueError("there are no samples")
        for sample in samples:
            self._check(sample)
        found = _Logprobs.apply(self, tuple(samples), *self.parameters())
        return cast(torch.Tensor, found).split([len(sample.output) for sample in samples])

    def save(self, directory: Path | str) -> None:
        """Write a checkpoint directory that servers load: these parameters, and all other files and tensors as read.

        The directory appears when it is complete. Raises ValueError if it exists.
        """
        entries, source = self._checkpoint.index.entries, self._checkpoint.index.directory
        parameters = dict(self.named_parameters())

        def stored(key: str) -> dict[str, torch.Tensor]:
            if key in parameters:
                return {key: parameters[key].detach().to("cpu", DTYPES[entries[key].dtype]).contiguous()}
            value = torch.empty(entries[key].shape, dtype=DTYPES[entries[key].dtype])
            self._reader.copy(key, value)
            return {key: value}

        pieces = [Piece({key: (DTYPES[e.dtype], e.shape)}, partial(stored, key)) for key, e in entries.items()]
        # The parameters are part of the identity: an interrupted run with other values must not be continued.
        identity = {**self._checkpoint.identity, "parameters": (secrets.token_hex(16), "")}
        new = NewCheckpoint(
            source=source, identity=identity, config=read_json(source / CONFIG_NAME), pieces=tuple(pieces)
        )
        new.write(Path(directory), lambda written: None)

    def _backend(self) -> Backend:
        return make_device(self._engine).backend

    def _check(self, sample: Sample) -> None:
        config, count = self.config, len(sample.prompt) + len(sample.output)
        if not sample.prompt or not sample.output:
            raise ValueError(f"a sample has {len(sample.prompt)} prompt and {len(sample.output)} output tokens")
        if count > self._longest:
            raise ValueError(f"a sample has {count} tokens, the model serves at most {self._longest}")
        outside = [i for i in (*sample.prompt, *sample.output) if not 0 <= i < config.vocab_size]
        if outside:
            raise ValueError(f"a sample has token {outside[0]}, outside the vocabulary of {config.vocab_size}")
        if (routed := sample.routed_experts) is not None:
            shape = (count - 1, config.num_layers, config.top_k)
            if tuple(routed.shape) != shape:
                raise ValueError(f"routed_experts has shape {list(routed.shape)}, this sample needs {list(shape)}")
            if routed.min() < 0 or routed.max() >= config.num_experts:
                raise ValueError(f"routed_experts has ids outside 0 to {config.num_experts - 1}")

    def _weights(
        self, values: Mapping[str, torch.Tensor], backend: Backend | FormulaBackend, dtype: torch.dtype
    ) -> CheckpointWeights:
        """Return the weights of the model, read from `values` instead of the files."""

        def read(key: str, out: torch.Tensor, begin: int = 0) -> None:
            value = self._ids[key] if key in self._ids else values[key]
            out.copy_(value.flatten()[begin : begin + out.numel()].view(out.shape))

        return CheckpointWeights(self._checkpoint, backend=cast(Backend, backend), dtype=dtype, read=read)

    def _stored(self) -> dict[str, torch.Tensor]:
        """Return the parameters with the values that `save` would write."""
        entries = self._checkpoint.index.entries
        return {
            key: value.detach() if self._exact else value.detach().to(DTYPES[entries[key].dtype])
            for key, value in self.named_parameters()
        }

    def _served(self, samples: Sequence[Sample]) -> Results:
        """Return the results of the samples as a server computes them."""
        values = self._stored()
        return run_samples(
            samples,
            self._checkpoint.spec,
            backend=self._backend(),
            weights=lambda backend: self._weights(values, backend, self._dtype),
            dtype=self._dtype,
            max_rows=self._engine.max_batch_tokens,
        )


class _Formula:
    """The model by plain torch operations, over leaves of autograd with the given values by checkpoint key."""

    def __init__(self, model: TrainableModel, values: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        config, spec = model.config, model._checkpoint.spec
        backend = FormulaBackend(next(iter(values.values())).device)
        self._weights = model._weights(values, backend, dtype)
        # Each loaded weight, and the leaf that the model uses in its place.
        self.loaded: list[tuple[torch.Tensor, torch.Tensor]] = []
        sizes = {"num_pages": 1, "page_size": GRANULE, "num_slots": 1}  # the formula keeps no state
        self._decoder = Decoder(
            spec,
            backend=cast(Backend, backend),
            load=self._load,
            exchange=LocalExchange(),
            experts=FormulaExperts(spec, self._load),
            allocate=lambda i: allocate(config.attention[i].state(), **sizes, dtype=dtype, device=backend.device),
        )

    def _load(self, weight: Weight) -> Any:
        # Roundings of the served dtype are not part of the formula.
        found = self._weights.load(replace(weight, fp32=False))
        tensor: torch.Tensor = found.data if isinstance(found, Matrix) else found
        if tensor.requires_grad:
            self.loaded.append((tensor, tensor.detach().requires_grad_()))
            tensor = self.loaded[-1][1]
        return Matrix.plain(tensor) if isinstance(found, Matrix) else tensor

    def logprobs(self, sample: Sample, routed: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities [output tokens] of a sample whose rows use the experts `routed`."""
        ids = torch.tensor([*sample.prompt, *sample.output], device=routed.device)
        hidden = self._decoder.hidden(cast(StepPlan, SequencePlan.of(ids[:-1], routed)))
        logits = self._decoder.head(hidden[len(sample.prompt) - 1 :])
        return logits.log_softmax(-1).gather(1, ids[len(sample.prompt) :, None]).squeeze(1)


class _Logprobs(torch.autograd.Function):
    """Log-probabilities by the server's steps, gradients by `_Formula`, one sequence at a time."""

    @staticmethod
    def forward(ctx: Any, model: TrainableModel, samples: tuple[Sample, ...], *parameters: torch.Tensor) -> Any:
        found, ctx.routed = model._served(samples)
        ctx.model, ctx.samples = model, samples
        # Saved so that autograd notices if the parameters change before the backward.
        ctx.save_for_backward(*parameters)
        if model._exact:
            formula = _Formula(model, model._stored(), torch.float64)
            found = [formula.logprobs(*each) for each in zip(samples, ctx.routed, strict=True)]
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        model, parameters = ctx.model, ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        dtype = torch.float64 if model._exact else torch.float32
        with torch.enable_grad():
            values = {
                key: value.to(dtype).requires_grad_(needed)
                for (key, value), needed in zip(model._stored().items(), wanted, strict=True)
            }
            formula = _Formula(model, values, dtype)
            parts = grad.to(dtype).split([len(sample.output) for sample in ctx.samples])
            for sample, routed, part in zip(ctx.samples, ctx.routed, parts, strict=True):
                logprobs = formula.logprobs(sample, routed)
                # Frozen parameters may be all that a sample uses.
                if logprobs.requires_grad:
                    logprobs.backward(part)
            for tensor, leaf in formula.loaded:
                if leaf.grad is not None:
                    tensor.backward(leaf.grad)
        grads = [value.grad for value in values.values()]
        return (
            None,
            None,
            *(None if each is None else each.to(value.dtype) for each, value in zip(grads, parameters, strict=True)),
        )
