"""The rules of the house (docs/architecture.md), checked on the syntax trees of all our files."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from tests.mutants.run import read_faults

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("worker", "router", "kernels", "deploy")
PACKAGES = ("moeyard_worker", "moeyard_router", "moeyard_kernels", "moeyard")

# The worker's files that a router may import: messages, frames, keys, sockets, flags of fields, a checkpoint's tokens.
BOUNDARY = ("protocol", "wire", "keys", "options", "refusals", "sockets", "tokenizer")
# Allowed imports.
MAY_IMPORT = {
    "moeyard": ("moeyard", "moeyard_router", "moeyard_worker", "moeyard_kernels.cpu.footprint"),
    "moeyard_router": ("moeyard_router", *(f"moeyard_worker.{name}" for name in BOUNDARY)),
    "moeyard_worker": ("moeyard_worker", "moeyard_kernels.backend", "moeyard_kernels.types"),
    "moeyard_kernels": ("moeyard_kernels",),
}
# The rooms of the worker, and the other rooms that each may import.
ROOMS = {
    "config": (),
    "state": ("config",),
    "scheduling": ("config", "state"),
    "exchange": ("config",),
    "experts": ("config", "exchange"),
    "layers": ("config", "state", "exchange"),
    "checkpoint.formats": ("config", "layers"),
    # Headers of files, which show the scales of fp8 codes.
    "checkpoint.index": ("config",),
    "models": ("config", "state", "exchange", "layers", "checkpoint.formats", "checkpoint.index"),
    "checkpoint": ("config", "layers", "models", "checkpoint.formats", "checkpoint.index"),
    "engine": ("config", "state", "scheduling", "exchange", "experts", "layers", "models", "checkpoint"),
}
# The same for the rooms of the engine.
ENGINE_ROOMS = {
    "memory": (),
    "sampling": ("memory",),
    "steps": ("sampling", "memory"),
    "loop": ("steps", "sampling"),
    "assembly": ("loop", "steps", "sampling", "memory"),
}
# Tools that read a fleet's records. Serving code must not import them; only these commands do.
OFFLINE = "moeyard_worker.experts.offline"
OFFLINE_COMMANDS = ("moeyard.clients.offline",)
# The rooms of the exchange; every room may also import files outside the rooms. `factory` imports all of them.
EXCHANGE_ROOMS = {"membership": (), "transports": ("membership",)}
EXCHANGE_FILES = ("base", "shape")
# Folders of transports, and the modules that know them. The topology also plans the memory for shared expert fetch.
PRIVATE_TRANSPORTS = {
    "moeyard_worker.exchange.transports.nccl": ("moeyard_worker.exchange.factory",),
    "moeyard_worker.exchange.transports.nvlink": (
        "moeyard_worker.exchange.factory",
        "moeyard_worker.engine.assembly.topology",
        "moeyard_worker.engine.assembly.worker",
    ),
}
# The rooms of the router; every room may also import files outside the rooms.
ROUTER_ROOMS = {
    "text": (),
    "fleet": (),
    "api": ("text", "fleet"),
    "http": ("text", "fleet", "api"),
}
ROUTER_FILES = ("config", "errors", "metrics")
# The rooms of the launcher; every room may also import files outside the rooms.
LAUNCHER_ROOMS = {
    "fleet": (),
    "local": ("fleet",),
    "clients": ("fleet", "local"),
    "cli": ("fleet", "local", "clients"),
    "torch": (),
}
LAUNCHER_FILES = ("__main__", "entry", "last_resort", "listen", "logs", "options", "signals")
# The backend is the worker's only way to the kernels, with these exceptions.
BEYOND_BACKEND = {
    # A trainer assembles a decoder outside the engine, over a server's backend or over its own.
    **dict.fromkeys(
        ("moeyard.torch.formula", "moeyard.torch.model", "moeyard.torch.served"),
        ("moeyard_kernels.backend", "moeyard_kernels.types"),
    ),
    # This module chooses the backend.
    "moeyard_worker.engine.assembly.device": ("moeyard_kernels.cpu", "moeyard_kernels.cuda"),
    # An exchange is built before a layer needs a backend; `Backend.peers` has the same function.
    "moeyard_worker.exchange.transports.nvlink.exchange": ("moeyard_kernels.ops",),
    "moeyard_worker.exchange.transports.nvlink.memory": ("moeyard_kernels.peers",),
    "moeyard_worker.exchange.transports.nvlink.expert_fetch": ("moeyard_kernels.host_memory",),
    "moeyard_worker.exchange.transports.nccl.group": ("moeyard_kernels.host_memory",),
}
# Inside the kernels a folder may import itself and earlier ones; `ops` may import only types and the checks.
SUBJECTS = ("attention", "linear", "linear_attention", "experts", "sampling", "elementwise")
KERNEL_ORDER = (
    *("types", "common", "backend", "ops", SUBJECTS),
    *("host_memory", "peers", ("cpu", "cuda")),
)
# Late imports by name, with their reasons. No other function hides an import.
IMPORT_LATE = {
    "moeyard.entry": "a command pays for Ray, torch and transformers only if it uses them",
    "moeyard_kernels.ops.op": "Triton is loaded where there is a GPU to run it",
    "moeyard_router.api.tracing": "OpenTelemetry is an extra, and loading it takes time and memory",
}
# Modules that run text as code, and which text.
MAY_COMPILE = {"moeyard_kernels.ops.op": "the checks of ops, written in their declarations"}
# Modules that a pure file must not import: devices, sockets, other processes, clocks, random numbers, the machine.
IMPURE = frozenset(
    (
        *("torch", "triton", "transformers", "numpy", "ray", "zmq", "psutil", "ctypes"),
        *("asyncio", "threading", "multiprocessing", "subprocess", "socket", "select", "signal", "mmap"),
        *("time", "datetime", "random", "secrets", "uuid", "os", "io", "shutil", "tempfile"),
    )
)
MUTABLE_CALLS = frozenset(
    ("list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "deque", "Counter", "ChainMap")
)


@dataclass(frozen=True)
class Source:
    """One Python file. `module` is its import name, or None for a script."""

    path: Path
    module: str | None

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def where(self, node: ast.stmt | ast.expr | ast.excepthandler) -> str:
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"

    @cached_property
    def for_types(self) -> set[ast.AST]:
        """Nodes under `if TYPE_CHECKING`, which never run and load nothing."""
        blocks = (n for n in self.tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
        return {node for block in blocks for node in ast.walk(block)}

    def imports(self) -> Iterator[tuple[str, ast.stmt]]:
        """Absolute names of all imports at any depth; `from a import b` gives a.b, whether or not b is a module."""
        package = (self.module or "").split(".")
        if self.path.name != "__init__.py":
            package = package[:-1]
        for node in ast.walk(self.tree):
            if node in self.for_types:
                continue
            if isinstance(node, ast.Import):
                yield from ((alias.name, node) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parts = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*parts, *([node.module] if node.module else [])])
                yield from ((f"{base}.{alias.name}", node) for alias in node.names)


def module_name(path: Path) -> str | None:
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    if not parts or parts[0] not in PACKAGES:
        return None
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = tuple(Source(path, module_name(path)) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
MODULES = {source.module: source for source in SOURCES if source.module}


def pure_modules() -> list[str]:
    """Return the list of pure files, on which mypy is strict, from pyproject.toml."""
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    [strict] = [table for table in overrides if table.get("disallow_untyped_defs")]
    return list(strict["module"])


def inside(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def run_python(code: str) -> str:
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(ROOT / f) for f in FOLDERS]}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def test_files_are_found() -> None:
    assert {name.split(".")[0] for name in MODULES} == set(PACKAGES)


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_is_not_a_package(folder: str) -> None:
    assert list((ROOT / folder).glob("*.py")) == []
    code = "from importlib.util import find_spec; s = find_spec(sys.argv[1]); print(s.origin if s else None)"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = ['']; {code}", folder]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    assert found == "None", f"`import {folder}` at the root finds {found}"


def test_packages_import_in_one_direction() -> None:
    wrong = [
        f"{source.where(node)} imports {name}"
        for module, source in MODULES.items()
        for name, node in source.imports()
        if name.split(".")[0] in PACKAGES
        and not any(
            inside(name, allowed) for allowed in (*MAY_IMPORT[module.split(".")[0]], *BEYOND_BACKEND.get(module, ()))
        )
    ]
    assert wrong == []


def room_of(name: str) -> str:
    """Return the rest of a module's name after its package: a room of the worker, a folder or file of the kernels."""
    return name.split(".")[1] if "." in name else ""


def test_worker_has_rooms_and_one_boundary() -> None:
    found = {room_of(name) for name in MODULES if name.startswith("moeyard_worker.")}
    assert found == {*(name for name in ROOMS if "." not in name), *BOUNDARY}, "a new part of the worker needs a room"
    loose = sorted(path.name for path in (ROOT / "worker/moeyard_worker").glob("*.py"))
    assert loose == sorted(["__init__.py", *(f"{name}.py" for name in BOUNDARY)])


def worker_room(name: str) -> str:
    """Return the room of a module of the worker: a folder, or one inside a folder that ROOMS lists separately."""
    inner = ".".join(name.split(".")[1:3])
    return inner if inner in ROOMS else room_of(name)


def test_rooms_of_the_worker_import_along_allowed_edges() -> None:
    wrong = []
    for module, source in MODULES.items():
        if not module.startswith("moeyard_worker."):
            continue
        own = worker_room(module)
        allowed = {own, *BOUNDARY, *ROOMS.get(own, ())}
        wrong += [
            f"{source.where(node)}: {own} imports {name}"
            for name, node in source.imports()
            if name.startswith("moeyard_worker.") and worker_room(name) not in allowed
        ]
    assert wrong == []


def test_serving_code_imports_no_offline_tool() -> None:
    wrong = [
        f"{source.where(node)} imports {name}"
        for module, source in MODULES.items()
        if not inside(module, OFFLINE) and module not in OFFLINE_COMMANDS
        for name, node in source.imports()
        if inside(name, OFFLINE)
    ]
    assert wrong == []


def test_rooms_of_the_engine_import_along_allowed_edges() -> None:
    engine = "moeyard_worker.engine."
    wrong, rooms = [], set()
    for module, source in MODULES.items():
        if not module.startswith(engine):
            continue
        own = module.removeprefix(engine).split(".")[0]
        rooms.add(own)
        allowed = {own, *ENGINE_ROOMS.get(own, ())}
        wrong += [
            f"{source.where(node)}: {own} imports {name}"
            for name, node in source.imports()
            if name.startswith(engine) and name.removeprefix(engine).split(".")[0] not in allowed
        ]
    assert wrong == []
    assert rooms == set(ENGINE_ROOMS), "a new file of the engine needs a room"


def test_rooms_of_the_exchange_import_along_allowed_edges() -> None:
    package, wrong = "moeyard_worker.exchange.", []
    for module, source in MODULES.items():
        own = module.removeprefix(package).split(".")[0]
        if not module.startswith(package) or own == "factory":
            continue
        assert own in (*EXCHANGE_ROOMS, *EXCHANGE_FILES, ""), f"{module}: a new file of the exchange needs a room"
        allowed = {own, *EXCHANGE_ROOMS.get(own, ()), *EXCHANGE_FILES}
        wrong += [
            f"{source.where(node)}: {own} imports {name}"
            for name, node in source.imports()
            if name.startswith(package) and name.removeprefix(package).split(".")[0] not in allowed
        ]
    assert wrong == []


def test_transports_with_a_folder_are_known_to_the_factory_only() -> None:
    wrong = [
        f"{source.where(node)} imports {name}"
        for folder, known in PRIVATE_TRANSPORTS.items()
        for module, source in MODULES.items()
        if not inside(module, (folder,)) and module not in known
        for name, node in source.imports()
        if inside(name, (folder,))
    ]
    assert wrong == []


def check_rooms(package: str, rooms: dict[str, tuple[str, ...]], files: tuple[str, ...], other: str | None) -> None:
    """Assert that a package's rooms import along allowed edges. `other` is the room of modules outside all rooms."""

    def place(name: str) -> str | None:
        part = room_of(name)
        return part if part in rooms or part in files else other

    wrong = []
    for module, source in MODULES.items():
        if not module.startswith(f"{package}."):
            continue
        own = place(module)
        assert own is not None, f"{module} is in no room"
        allowed = {own, *files, *rooms.get(own, ())}
        wrong += [
            f"{source.where(node)}: {own} imports {name}"
            for name, node in source.imports()
            if name.startswith(f"{package}.") and name != f"{package}.__version__" and place(name) not in allowed
        ]
    assert wrong == []


def test_rooms_of_the_router_import_along_allowed_edges() -> None:
    check_rooms("moeyard_router", ROUTER_ROOMS, ROUTER_FILES, None)


def test_rooms_of_the_launcher_import_along_allowed_edges() -> None:
    check_rooms("moeyard", LAUNCHER_ROOMS, LAUNCHER_FILES, None)


def kernel_rank(name: str) -> int | None:
    """Return the index of a module of the kernels in KERNEL_ORDER."""
    part = room_of(name)
    return next((i for i, each in enumerate(KERNEL_ORDER) if part == each or (part in each and each != part)), None)


def test_kernels_import_in_one_direction() -> None:
    wrong = []
    for module, source in MODULES.items():
        own = kernel_rank(module) if module.startswith("moeyard_kernels.") else None
        if own is None:
            continue
        for name, node in source.imports():
            other = kernel_rank(name) if name.startswith("moeyard_kernels.") else None
            apart = other == own and room_of(name) != room_of(module) and room_of(module) not in SUBJECTS
            if other is not None and (other > own or apart):
                wrong.append(f"{source.where(node)} imports {name}")
    assert wrong == []


def test_layers_know_no_device() -> None:
    """Code above the seam never asks for a tensor's device, and no description of a layer loads torch."""
    wrong = [
        f"{source.where(node)}: {node.attr}"
        for module, source in MODULES.items()
        if inside(module, "moeyard_worker.layers") or inside(module, "moeyard_worker.models")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "is_mkldnn", "cuda", "numpy")
    ]
    assert wrong == []
    modules = "moeyard_worker.layers.gqa, moeyard_worker.layers.mla, moeyard_worker.models.spec"
    assert run_python(f"import {modules}\nprint('torch' in sys.modules)") == "False"


def test_late_imports_have_a_reason() -> None:
    assert len(IMPORT_LATE) <= 3
    wrong, late = [], set()
    for source in SOURCES:
        for function in ast.walk(source.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = (node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom))
                wrong += [source.where(node) for node in inner]
        calls = (node.func for node in ast.walk(source.tree) if isinstance(node, ast.Call))
        if any(ast.unparse(call).endswith(("import_module", "__import__")) for call in calls):
            late.add(source.module or str(source.path))
    assert wrong == []
    assert late == set(IMPORT_LATE)


def test_no_import_cycles() -> None:
    graph = {
        module: {
            target
            for name, _ in source.imports()
            if (target := name if name in MODULES else name.rpartition(".")[0]) in MODULES and target != module
        }
        for module, source in MODULES.items()
    }
    # Remove leaves until nothing changes; the remaining modules form cycles.
    while leaves := {module for module, targets in graph.items() if not targets & graph.keys()}:
        graph = {module: targets for module, targets in graph.items() if module not in leaves}
    assert graph == {}


def test_kernel_references_import_no_kernel() -> None:
    allowed = ("moeyard_kernels.types", "moeyard_kernels.ops", "moeyard_kernels.common.checks")
    wrong = [
        f"{source.where(node)} imports {name}"
        for module, source in MODULES.items()
        if inside(module, "moeyard_kernels.ops")
        for name, node in source.imports()
        if inside(name, "triton") or (inside(name, "moeyard_kernels") and not any(inside(name, a) for a in allowed))
    ]
    assert wrong == []


def test_router_and_protocol_load_no_torch() -> None:
    heavy = "print(sorted({'torch', 'ray', 'numpy', 'transformers'} & sys.modules.keys()))"
    modules = ", ".join(name for name in MODULES if inside(name, "moeyard_router"))
    assert run_python(f"import {modules}\n{heavy}") == "[]"
    code = "before = set(sys.modules); import moeyard_worker.wire; new = set(sys.modules) - before\n"
    code += "print(*sorted({n.split('.')[0] for n in new} - set(sys.stdlib_module_names)))"
    # msgpack is compiled by Cython, which leaves two modules.
    loaded = {name for name in run_python(code).split() if "cython" not in name}
    assert loaded == {"moeyard_worker", "msgpack"}


@pytest.mark.parametrize("module", pure_modules())
def test_pure_file(module: str) -> None:
    assert module in MODULES, f"{module} is in the list of pure files and does not exist"
    source = MODULES[module]
    wrong = [f"{source.where(node)} imports {name}" for name, node in source.imports() if name.split(".")[0] in IMPURE]
    calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    wrong += [
        f"{source.where(node)} calls {node.func.id}" for node in calls if node.func.id in ("open", "print", "input")
    ]
    assert wrong == []


def test_pure_files_load_no_device_and_no_socket() -> None:
    imports = "\n".join(f"import {name}" for name in pure_modules())
    assert run_python(f"{imports}\nprint(sorted({{'torch', 'ray', 'zmq', 'triton'}} & sys.modules.keys()))") == "[]"


def test_environment_is_read_in_config_files_only() -> None:
    wrong = [
        source.where(node)
        for source in SOURCES
        if not source.path.stem.endswith("config")
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"))
        or (isinstance(node, ast.alias) and node.name in ("environ", "getenv"))
    ]
    assert wrong == []


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in MUTABLE_CALLS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def test_no_mutable_state_in_modules() -> None:
    """A constant table is a tuple, a frozenset or a MappingProxyType. (ruff's RUF012 checks classes.)"""
    wrong = []
    for source in SOURCES:
        wrong += [source.where(node) for node in ast.walk(source.tree) if isinstance(node, ast.Global)]
        for node in source.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            name = getattr(targets[0], "id", "")
            # Scripts run once and are never imported, so their tables are ordinary literals.
            if source.module and name != "__all__" and is_mutable(getattr(node, "value", None)):
                wrong.append(source.where(node))
    assert wrong == []


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches everything without raising it again."""
    names = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(name is None or getattr(name, "id", "") in ("Exception", "BaseException") for name in names)
    last = handler.body[-1]
    return broad and not (isinstance(last, ast.Raise) and last.exc is None)


def test_swallowed_errors_have_a_reason() -> None:
    """A broad `except` that does not re-raise, and `suppress`, give their reason on the line: `# boundary: ...`."""
    wrong = []
    for source in SOURCES:
        lines = source.text.splitlines()
        for node in ast.walk(source.tree):
            call = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "suppress"
            if (call or (isinstance(node, ast.ExceptHandler) and is_broad(node))) and not any(
                "# boundary: " in line for line in lines[node.lineno - 1 : node.lineno + 1]
            ):
                wrong.append(source.where(node))
    assert wrong == []


def test_nothing_is_unpickled_and_no_remote_code_runs() -> None:
    wrong = []
    for source in SOURCES:
        wrong += [
            source.where(n) for name, n in source.imports() if name.split(".")[0] in ("pickle", "dill", "marshal")
        ]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                wrong.append(f"{source.path.relative_to(ROOT)}:{node.value.lineno}")
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "torch.load" or (called in ("eval", "exec") and source.module not in MAY_COMPILE):
                wrong.append(source.where(node))
            # pyzmq can unpickle messages from a socket, and multiprocessing has connections between strangers.
            if isinstance(node, ast.Attribute) and node.attr in ("recv_pyobj", "recv_serialized"):
                wrong.append(source.where(node))
        wrong += [
            source.where(n)
            for name, n in source.imports()
            if name.startswith(("multiprocessing.connection.Listener", "multiprocessing.connection.Client"))
            or name.startswith("multiprocessing.managers")
        ]
    assert wrong == []


def test_planted_faults_have_their_old_text() -> None:
    """A change that moves a fault's text moves the fault too: `make mutants` runs too rarely to notice."""
    assert len(read_faults()) >= 60
