"""Send buffers that are reused only when the transport has let go of them."""

import numpy as np
import zmq

from moeyard_worker.exchange.mesh import Mesh

# pyzmq copies anything smaller even when told not to (zmq.COPY_THRESHOLD), so there is nothing to track.
COPY_BELOW_BYTES = 1 << 16


class Outbox:
    """Two buffers for one peer, in turns: one for each phase of a layer."""

    def __init__(self) -> None:
        self._buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._trackers: list[zmq.MessageTracker | None] = [None, None]
        self._turn = 0

    def frame(self, num_bytes: int) -> np.ndarray:
        """A buffer of exactly `num_bytes` bytes to fill and `send`. Never one that is still being sent."""
        self._turn = turn = 1 - self._turn
        tracker = self._trackers[turn]
        if self._buffers[turn].size < num_bytes or (tracker is not None and not tracker.done):
            # The old buffer, if it is still being sent, is kept alive by the message.
            self._buffers[turn] = np.empty(num_bytes, np.uint8)
        self._trackers[turn] = None
        return self._buffers[turn][:num_bytes]

    def send(self, mesh: Mesh, peer: int, frame: np.ndarray) -> None:
        """Send the buffer that `frame` returned last."""
        if frame.size < COPY_BELOW_BYTES:
            mesh.send(peer, frame.data)
        else:
            self._trackers[self._turn] = mesh.send_in_place(peer, frame.data)
