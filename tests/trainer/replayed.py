"""Samples with the experts that a model chose for them."""

from collections.abc import Sequence

import torch

from moeyard.torch import Sample, TrainableModel


def with_experts(model: TrainableModel, sample: Sample, routed: torch.Tensor) -> Sample:
    """Return the sample with experts [rows, MoE layers, top_k], in the form of a server's answers."""
    every = torch.zeros(len(routed), model.config.num_layers, model.config.top_k, dtype=torch.int64)
    every[:, list(model.config.routed_layers)] = routed.cpu()
    return Sample(prompt=sample.prompt, output=sample.output, routed_experts=every)


def with_own_experts(model: TrainableModel, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the experts that the model chooses."""
    routed = model._served(tuple(samples))[1]
    return [with_experts(model, sample, ids) for sample, ids in zip(samples, routed, strict=True)]
