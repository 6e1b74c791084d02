"""Write docs/rooms.md: each room of the four packages with its files, lines and imports.

Run `python -m tests.rooms` when files, imports or first sentences of docstrings change. `tests/test_rooms.py` fails if
the page is out of date. It ignores counts of lines, which are rounded to hundreds.
"""

import ast
from collections import defaultdict
from pathlib import Path

from tests.test_house import MODULES, PACKAGES, Source

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/rooms.md"
HEAD = """# Rooms

`python -m tests.rooms` writes this page. A room is a folder of one of the four packages. "Imports" lists the rooms that
its files import. "Imported by" lists the rooms whose files import it. [Architecture](architecture.md) describes each
room, and `tests/test_house.py` has the allowed imports.
"""


def room_of(module: str) -> str:
    """Return the room of a module: its folder, or its package if the file is in no room."""
    return module if MODULES[module].path.name == "__init__.py" else module.rpartition(".")[0]


def imported_rooms(source: Source) -> set[str]:
    """Return the rooms of all modules that a file imports."""
    found = set()
    for name, _ in source.imports():
        # `from a import b` gives a.b, where b may be a name in a.
        for candidate in (name, name.rpartition(".")[0]):
            if candidate in MODULES:
                found.add(room_of(candidate))
                break
    return found


def summary(source: Source) -> str:
    """Return the first sentence of a file's docstring."""
    first = (ast.get_docstring(source.tree) or "").split("\n\n")[0].replace("\n", " ")
    return first.split(". ")[0].rstrip(".")


def rounded(sources: list[Source]) -> str:
    """Return the number of lines of these files, rounded to hundreds."""
    lines = sum(len(source.text.splitlines()) for source in sources)
    return f"{round(lines, -2):,}" if lines >= 50 else "below 50"


def page() -> str:
    """Return the whole page as Markdown."""
    files = defaultdict[str, list[Source]](list)
    imports, importers = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for module, source in MODULES.items():
        room = room_of(module)
        if source.text.strip():
            files[room].append(source)
        for other in imported_rooms(source) - {room}:
            imports[room].add(other)
            importers[other].add(room)
    parts = [HEAD]
    for package in PACKAGES:
        rooms = sorted(room for room in files if room.split(".")[0] == package)
        parts.append(f"\n## {package}: {rounded([s for room in rooms for s in files[room]])} lines\n")
        for room in rooms:
            parts += [
                f"\n### {room}\n\n",
                f"{rounded(files[room])} lines. ",
                f"Imports: {', '.join(sorted(imports[room])) or 'nothing'}. ",
                f"Imported by: {', '.join(sorted(importers[room])) or 'nothing'}.\n\n",
                "| file | contents |\n|---|---|\n",
                *(f"| `{s.path.name}` | {summary(s)} |\n" for s in files[room]),
            ]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
