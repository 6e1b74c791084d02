"""A control group with almost no memory, so that the kernel kills a process (version 1 or 2, as root)."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# Memory beyond the current use. A process that moves into a group keeps its memory charged elsewhere.
LIMIT_BYTES = 256 * 1024


def controller() -> tuple[Path, str] | None:
    """Return (folder of groups, name of a group's limit), or None if this user cannot limit memory."""
    for folder, limit in ((ROOT / "memory", "memory.limit_in_bytes"), (ROOT, "memory.max")):
        enabled = folder / "cgroup.subtree_control"
        usable = limit != "memory.max" or (enabled.exists() and "memory" in enabled.read_text().split())
        if usable and (folder / "cgroup.procs").exists() and os.access(folder, os.W_OK):
            return folder, limit
    return None


@contextlib.contextmanager
def short_of_memory(pid: int) -> Iterator[None]:
    """Limit process `pid` to LIMIT_BYTES more memory. It must have ended at the end of the block."""
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
        with contextlib.suppress(OSError):  # the process lives and keeps its group
            group.rmdir()
