"""How many rows have chosen each expert: counted by the launches that choose, told without waiting for them."""

import torch


class CudaChoices:
    """The counts of a backend's gates, in the order in which they were made. See `Choices`."""

    # Whether what is launched, or captured, from now on counts. Off only to compare steps without (`bench/choices.py`).
    on = True

    def __init__(self) -> None:
        self._counts: list[torch.Tensor] = []
        # Pinned, and when the copy into it is complete; None: none is on its way.
        self._seen: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def of_gate(self, num_experts: int, device: torch.device) -> torch.Tensor:
        """[E] int64 for another gate to count in, each like those before. It stays where it is: graphs write to it."""
        # Layers are made in inference mode, and its tensors could not be cleared outside of it.
        with torch.inference_mode(mode=False):
            self._counts.append(torch.zeros(num_experts, dtype=torch.int64, device=device))
        return self._counts[-1]

    def clear(self) -> None:
        """See `Choices.clear`."""
        for counts in self._counts:
            counts.zero_()

    def read(self) -> list[list[int]] | None:
        """See `Choices.read`."""
        if not self.on:
            return []
        if self._copied is None:
            # Behind whole steps: in every layer as many rows have been counted.
            now = torch.stack(self._counts)
            if not now.is_cuda:
                return self._told(now)
            if self._seen is None:
                self._seen = torch.empty_like(now, device="cpu", pin_memory=True)
            self._seen.copy_(now, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        if self._seen is None or not self._copied.query():
            return None
        self._copied = None
        return self._told(self._seen)

    def _told(self, counts: torch.Tensor) -> list[list[int]]:
        told: list[list[int]] = counts.tolist()
        return told
