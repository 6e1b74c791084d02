"""The limit of open files, and the connections that it allows.

A process that has no file left for a connection resets it, and libuv tells nobody. So a router serves fewer connections
than it has files for, and answers those beyond.
"""

import resource

# Files that a router keeps open beside its connections: 51 with two workers at rest, and some to refuse with.
FILES, FILES_PER_WORKER = 80, 8
# A container's hard limit may be a thousand times this. No server needs as many, and some libraries make tables of that
# size.
MOST_FILES = 1 << 20


def file_limits() -> tuple[int, int]:
    """How many files this process may have open, and how many if it asks for them."""
    soft, hard = (MOST_FILES if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, max(soft, min(hard, MOST_FILES))


def raise_file_limit() -> int:
    """Let this process, and those that it starts, have as many open files as they may; return how many."""
    soft, most = file_limits()
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return most


def most_connections(files: int, num_workers: int) -> int:
    """Return the connections that one router in front of `num_workers` workers serves at once.

    `files` is its limit of open files. Raises ValueError if that leaves none.
    """
    connections = files - FILES - FILES_PER_WORKER * num_workers
    if connections < 1:
        raise ValueError(f"a limit of {files} open files leaves none for connections; raise it (ulimit -n)")
    return connections
