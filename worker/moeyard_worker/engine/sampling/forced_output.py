"""An output that a request fixes in advance, as a grammar that allows one token at each position.

Samplers compute log-probabilities before masks, so these are the model's own. Drafts, fed rows and recovery treat the
output like that of any grammar. With `as_decoded` the scheduler knows the output and needs no mask (`Request.forced`).
"""

from collections.abc import Sequence

from moeyard_worker.protocol import SamplingParams
from moeyard_worker.scheduling.request import Mask


class ForcedOutput:
    """The `Constraint` of a request with the output `token_ids`. Behind these it allows every token."""

    def __init__(self, token_ids: Sequence[int], *, vocab_size: int) -> None:
        self._token_ids, self._num_words = token_ids, -(-vocab_size // 32)

    def mask(self, output: Sequence[int]) -> Mask:
        """Return the mask of the token after `output`, which may have drafts: only its length counts."""
        if len(output) >= len(self._token_ids):
            return Mask()
        word, bit = divmod(self._token_ids[len(output)], 32)
        words = bytearray(4 * self._num_words)
        words[4 * word : 4 * word + 4] = (1 << bit).to_bytes(4, "little")
        return Mask(words=bytes(words))

    def expect(self, output: Sequence[int]) -> None:
        """Do nothing: a mask takes microseconds."""


def forced_output(params: SamplingParams, *, vocab_size: int) -> ForcedOutput | None:
    """Return the constraint of a request whose output is forced one token per step, or None."""
    trace = params.trace_decode_token_ids
    return ForcedOutput(trace, vocab_size=vocab_size) if trace and not params.as_decoded else None
