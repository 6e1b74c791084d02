"""All functions but kernels have type annotations, because mypy skips the kernels' files (pyproject.toml)."""

import ast
from pathlib import Path

import moeyard_kernels

FOLDER = Path(moeyard_kernels.__path__[0])


def is_kernel(function: ast.FunctionDef) -> bool:
    names = [ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list]
    return bool({"triton.jit", "gluon.jit", "gluon.constexpr_function"} & set(names))


def is_annotated(function: ast.FunctionDef) -> bool:
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    named = [a for a in every if a is not None and a.arg not in ("self", "cls")]
    return function.returns is not None and all(a.annotation is not None for a in named)


def test_all_but_kernels_are_annotated() -> None:
    found, bare = 0, []
    for file in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and is_kernel(node):
                found += 1
            elif isinstance(node, ast.FunctionDef) and not is_annotated(node):
                bare.append(f"{file.relative_to(FOLDER)}:{node.lineno} {node.name}")
    assert found > 100
    assert bare == []
