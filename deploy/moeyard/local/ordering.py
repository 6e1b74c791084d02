"""Orders to routers, from a thread that waits for their answer."""

import queue
from collections.abc import Callable
from typing import Protocol

from moeyard_router.fleet.orders import UNKNOWN, Drain

# For routers to take an order; one that is busy for longer is asked again.
ORDER_SECONDS = 5.0


class Ordered(Protocol):
    """What is used of the routers."""

    def drain(self, order: Drain, answer: Callable[[int], None]) -> None:
        """Have all take an order; `answer` gets, from any thread, what they say together."""
        ...


def ordered(server: Ordered, order: Drain) -> int:
    """What all routers answer to an order, waited for from another thread than theirs."""
    answers: queue.SimpleQueue[int] = queue.SimpleQueue()
    server.drain(order, answers.put)
    try:
        return answers.get(timeout=ORDER_SECONDS)
    except queue.Empty:
        return UNKNOWN
