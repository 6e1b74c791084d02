"""DeepSeek-V2, DeepSeek-V3 and Kimi-K2: latent attention; dense layers first, then MoE with shared experts.

The sigmoid gate of V3 carries a correction bias, V2's softmax gate does not; both are settings of the gate, not of the
assembly. Multi-token-prediction layers sit behind the last layer under the same names.
"""

from moeyard_worker.models.names import Names

NAMES = Names()
