"""The keys of one fleet: CURVE key pairs that a launcher makes at start and hands out through Ray. Pure.

Ranks share one pair, routers another: a router's secret opens no rank's exchange, and whoever has neither can neither
speak nor read. Keys are in Z85, 40 characters each (ZeroMQ's RFC 32). No key is ever part of a `repr`.
"""

from dataclasses import dataclass, field

KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """One CURVE key pair."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Raise `ValueError` for what is no key; the words hold none."""
        if {len(self.public), len(self.secret)} != {KEY_CHARACTERS}:
            raise ValueError(f"a key has {KEY_CHARACTERS} characters, got {len(self.public)} and {len(self.secret)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKeys:
    """What a rank holds: the ranks' pair, and the public key of the routers that it lets in."""

    own: KeyPair
    router: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterKeys:
    """What a router holds: the routers' pair, and the public key by which it knows ranks."""

    own: KeyPair
    worker: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKeys:
    """What a launcher holds."""

    workers: KeyPair
    routers: KeyPair

    def of_worker(self) -> WorkerKeys:
        """For every rank."""
        return WorkerKeys(own=self.workers, router=self.routers.public)

    def of_router(self) -> RouterKeys:
        """For every router."""
        return RouterKeys(own=self.routers, worker=self.workers.public)
