"""Training of the models that moeyard serves: a torch module whose log-probabilities have the bits of a server."""

from moeyard.torch.model import TrainableModel
from moeyard.torch.sample import Sample

__all__ = ["Sample", "TrainableModel"]
