"""Which file of this checkout imports which, read from syntax trees."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("worker", "router", "kernels", "deploy")


@cache
def modules() -> dict[str, Path]:
    """The files of all packages, of `bench` and of the tests, by dotted name."""
    folders = {ROOT / name: ROOT / name for name in (*PACKAGES, "bench")} | {ROOT / "tests": ROOT}
    found = {}
    for folder, base in folders.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imported(file: Path) -> frozenset[Path]:
    """The files that a file imports itself, at any level of it."""
    return frozenset(modules()[name] for name in _names(ast.parse(file.read_text())) if name in modules())


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def closure(file: Path) -> set[Path]:
    """A file and all that it imports directly or through others."""
    seen: set[Path] = set()
    left = [file]
    while left:
        current = left.pop()
        if current not in seen:
            seen.add(current)
            left += imported(current)
    return seen


@cache
def importers() -> dict[Path, set[Path]]:
    """The files that import a file themselves, for every file."""
    found: dict[Path, set[Path]] = {}
    for file in modules().values():
        for other in imported(file):
            found.setdefault(other, set()).add(file)
    return found
