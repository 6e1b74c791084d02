"""Free memory for this process: that of the host, or less if a control group has a limit."""

from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def available_memory() -> int:
    """Return the bytes that all processes of our control group can still allocate without swapping or a kill."""
    available = int(psutil.virtual_memory().available)
    limit = cgroup_available(CGROUP_ROOT, OWN_CGROUP.read_text() if OWN_CGROUP.exists() else "")
    return available if limit is None else min(available, limit)


def cgroup_available(root: Path, own: str) -> int | None:
    """Return the bytes left in the tightest control group of this process (version 2), None without a limit.

    root: where the groups are mounted. `own`: the text of /proc/self/cgroup. A group's limit binds its descendants, so
    all groups up to the root are read. Format: docs.kernel.org/admin-guide/cgroup-v2.html. Pages of files count as
    available: `memory.current` includes the page cache, which the kernel frees before it kills a process. A served
    checkpoint is mapped, so the page cache is most of it.
    """
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::/")), "/")
    # In a container's own namespace the path is "/"; one that leads out of it is not visible below `root`.
    group = root if ".." in path else root / path.lstrip("/")
    groups = (group, *(parent for parent in group.parents if parent.is_relative_to(root)))
    left = [room for each in groups if (room := _room(each)) is not None]
    return min(left, default=None)


def _room(group: Path) -> int | None:
    """Return the bytes left in one group, or None if it has no limit (the root has no such file)."""
    limit = group / "memory.max"
    if not limit.is_file() or (text := limit.read_text().strip()) == "max":
        return None
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.current").read_text()) - int(stat["inactive_file"]) - int(stat["active_file"])
    return max(0, int(text) - max(0, used))
