"""The rules of the house that a program can check: budgets, no import circles, no global statements."""

import ast
from pathlib import Path

import grimp
import pytest

PACKAGE = Path(__file__).parents[1] / "dilocox"
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 300, 60, 6
# Signatures that are not ours: triton kernels, and torchft's process group.
FREE_SIGNATURES = {"_encode_kernel", "_decode_kernel", "configure"}


@pytest.fixture(scope="module")
def trees():
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in MODULES}


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def num_parameters(function):
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return len(named) - (bool(named) and named[0].arg in ("self", "cls"))


def test_no_file_is_longer_than_300_lines():
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_no_function_is_longer_than_60_lines(trees):
    found = {
        f"{name}:{function.lineno} {function.name}": function.end_lineno - function.lineno + 1
        for name, tree in trees.items()
        for function in functions(tree)
    }
    assert {where: length for where, length in found.items() if length > MOST_FUNCTION_LINES} == {}


def test_no_function_has_more_than_6_parameters(trees):
    found = {
        f"{name}:{function.lineno} {function.name}": num_parameters(function)
        for name, tree in trees.items()
        for function in functions(tree)
        if function.name not in FREE_SIGNATURES
    }
    assert {where: count for where, count in found.items() if count > MOST_PARAMETERS} == {}


def test_no_global_statement(trees):
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_no_import_circle():
    graph = grimp.build_graph("dilocox", exclude_type_checking_imports=True)
    state: dict[str, str] = {}
    circles = []

    def visit(module, path):
        state[module] = "open"
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            if state.get(imported) == "open":
                circles.append([*path[path.index(imported) :], imported])
            elif imported not in state:
                visit(imported, [*path, imported])
        state[module] = "done"

    for module in sorted(graph.modules):
        if module not in state:
            visit(module, [module])
    assert circles == []
