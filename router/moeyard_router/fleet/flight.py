"""What is known of a sequence while it is at a worker."""

from dataclasses import dataclass

from moeyard_router.fleet.ticket import Ticket


@dataclass(slots=True)
class Flight:
    """A sequence at a worker. `ticket` is None once nobody listens any more; then only its end is awaited.

    `prompt` counts its prompt's tokens, and `pending` those that no cache was thought to hold, until it has an output.
    `charged` are the output tokens that `key` was charged for (fleet/fair.py); it was sent at `sent`, after `waited`.
    """

    rank: int
    prompt: int
    pending: int
    index: int
    ticket: Ticket | None
    key: str | None
    charged: float
    sent: float
    waited: float
    received: int = 0
