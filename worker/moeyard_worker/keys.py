"""The keys of one fleet: CURVE key pairs that a launcher makes at start and distributes through Ray. Pure.

Ranks share one pair and routers another, so a router's secret does not give access to the ranks' exchange. A stranger
without either can neither send nor read. Keys are in Z85, 40 characters each (ZeroMQ's RFC 32). `repr` shows no key.
"""

from dataclasses import dataclass, field

KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """One CURVE key pair."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError for a key of wrong length. The message holds no key."""
        if {len(self.public), len(self.secret)} != {KEY_CHARACTERS}:
            raise ValueError(f"a key has {KEY_CHARACTERS} characters, got {len(self.public)} and {len(self.secret)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKeys:
    """The keys of a rank: the ranks' pair, and the public key of the routers that it admits."""

    own: KeyPair
    router: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterKeys:
    """The keys of a router: the routers' pair, and the public key of the ranks."""

    own: KeyPair
    worker: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKeys:
    """The keys of a launcher."""

    workers: KeyPair
    routers: KeyPair

    def of_worker(self) -> WorkerKeys:
        """Return the keys of every rank."""
        return WorkerKeys(own=self.workers, router=self.routers.public)

    def of_router(self) -> RouterKeys:
        """Return the keys of every router."""
        return RouterKeys(own=self.routers, worker=self.workers.public)
