"""A control group with almost no memory, for a process that is to be killed by the kernel: version 1 or 2, as root."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# What a process may take beyond what it has: moved here, it brings none of its memory along.
LIMIT_BYTES = 256 * 1024


def controller() -> tuple[Path, str] | None:
    """(where groups are made, the name of a group's limit); None where this user cannot limit memory."""
    for folder, limit in ((ROOT / "memory", "memory.limit_in_bytes"), (ROOT, "memory.max")):
        enabled = folder / "cgroup.subtree_control"
        usable = limit != "memory.max" or (enabled.exists() and "memory" in enabled.read_text().split())
        if usable and (folder / "cgroup.procs").exists() and os.access(folder, os.W_OK):
            return folder, limit
    return None


@contextlib.contextmanager
def short_of_memory(pid: int) -> Iterator[None]:
    """Process `pid` gets no more than LIMIT_BYTES. It has to have ended at the end of the block."""
    found = controller()
    assert found is not None, "this drill needs root and control groups with memory"
    folder, limit = found
    group = folder / f"moeyard-drill-{os.getpid()}-{pid}"
    group.mkdir()
    try:
        (group / limit).write_text(str(LIMIT_BYTES))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):  # it lives after all, and keeps its group
            group.rmdir()
