"""Which captured steps there are where peers take part, and which one a step runs in. Pure.

A rank's own rows and those that its peers may send it are two sizes: ranks replay different graphs in one step, each by
its own rows and by the most that one of them brings, with padding, which all know from the plan frames. Of the second
there are few sizes, as room for a row that no peer has costs an id that says so: the own size, if nobody brings more,
and a few above it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from moeyard_kernels.cuda.graph_inputs import Bucket
from moeyard_kernels.cuda.verify_inputs import VerifySize

# Rows of a peer that a step without prompts has room for, beside as many as its own.
_DECODING = (16, 64)
# The same where a peer has prompts, beside the most that any captured step with and without output brings.
_PROMPTS_OF_PEERS = (512,)

_Size = TypeVar("_Size", Bucket, VerifySize)


def with_peers(buckets: Sequence[Bucket]) -> Iterator[Bucket]:
    """These buckets, of ranks by themselves, with room for what peers bring; and those of a rank without rows.

    Beside more rows than its own a decode step needs only the wider tables: a narrow one fits them, and waits anyway.
    """
    decoding = [bucket for bucket in buckets if not bucket.prompt]
    widths, wide = _widths(decoding)
    most_decoding, most = (max(bucket.rows for bucket in some) for some in (decoding, buckets))
    above = rooms(most_decoding)
    mixed = (bucket.rows for bucket in buckets if bucket.prompt and bucket.decode)
    prompts = sorted(
        {rows for rows in (*_PROMPTS_OF_PEERS, max(mixed, default=0), most) if most_decoding < rows <= most}
    )
    for bucket in buckets:
        yield replace(bucket, peers=bucket.rows)
        if bucket.prompt:
            more = [most] if bucket.rows < most else []
        else:
            more = [rows for rows in above if rows > bucket.rows and bucket.width in wide]
            more += [rows for rows in prompts if bucket.width == widths[-1]]
        for rows in more:
            yield replace(bucket, peers=rows)
    for rows in sorted({1, *above, *prompts}):
        yield Bucket(width=widths[0], peers=rows)


def with_rooms(buckets: Sequence[Bucket], sizes: Sequence[int]) -> Iterator[Bucket]:
    """These buckets, of ranks by themselves, with each of the rooms that ranks agree on; and of a rank without rows."""
    for rows in sizes:
        yield Bucket(width=min(bucket.width for bucket in buckets), peers=rows)
    for bucket in buckets:
        for rows in sizes:
            if rows >= bucket.rows:
                yield replace(bucket, peers=rows)


def verifying_with_peers(sizes: Sequence[VerifySize]) -> Iterator[VerifySize]:
    """The same of steps that verify drafts; of a rank without rows there is one for each of `rooms`."""
    above, wide = rooms(max(size.rows for size in sizes)), _widths(sizes)[1]
    for size in sizes:
        yield replace(size, peers=size.rows)
        for rows in above:
            if rows > size.rows and size.width in wide:
                yield replace(size, peers=rows)


def rooms(most: int) -> list[int]:
    """For how many rows of a peer a decode step has room, beside its own number; none brings more than `most`."""
    return [*(rows for rows in _DECODING if rows < most), most]


def _widths(sizes: Sequence[Bucket] | Sequence[VerifySize]) -> tuple[list[int], set[int]]:
    """All widths, and those that there are beside more rows than a step's own."""
    widths = sorted({size.width for size in sizes})
    return widths, {*widths[1::2], widths[-1]}


def smallest(sizes: Iterable[_Size], size: _Size, most: int) -> _Size | None:
    """The first of these that holds a step of that size beside peers who bring at most `most` rows; None: none does.

    It brings no more itself: that was agreed on. Without peers `most` is 0.
    """
    for each in sizes:
        if each.holds(size) and each.peers >= most and (not most or each.rows <= most):
            return each
    return None
