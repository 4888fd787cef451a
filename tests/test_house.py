"""The house rules: who imports whom, how large things may be, what may fail when, and that level 2 can go."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

from tests.distributed.forkserver import run_islands
from tests.training import train_rank, write_run

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dilocox"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 300, 60, 6
OVER_BUDGET = frozenset(
    {
        "outer/wan/process_group.py WanProcessGroup.configure: 8 parameters",  # torchft calls it
        "outer/codec/triton_int4.py _encode_kernel: 7 parameters",  # a kernel has pointers, no objects
        "outer/codec/triton_int4.py _decode_kernel: 7 parameters",
    }
)
"""What may be over the budget, by the words of the test below."""

ConfigErrorSite = tuple[str, str]
CHECKED_FIRST: frozenset[ConfigErrorSite] = frozenset(
    {("backend.py", "choose_backend"), ("inner/model.py", "check_layers")}
)
"""Functions that `train.check` calls before any process group exists."""
ROOMS_OF_A_RUNNING_ISLAND = ("inner", "outer", "checkpoint", "backend.py", "trainer.py", "step_reports.py")


def sources():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text()


def functions(tree):
    """(qualified name, node) of all functions of a module."""
    stack = [("", tree)]
    while stack:
        prefix, node = stack.pop()
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", None)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
            stack.append((f"{prefix}{name}." if isinstance(name, str) else prefix, child))


def test_imports_keep_the_contracts():
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_module_imports_itself_in_a_circle():
    graph = grimp.build_graph("dilocox", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # names the circle if there is one


def test_the_launcher_starts_without_torch():
    program = "import sys, dilocox.launch.command; print([m for m in sys.modules if m == 'torch'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_budgets_of_files_and_functions():
    over = set()
    for name, text in sources():
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            over.add(f"{name}: {lines} lines")
        for function, node in functions(ast.parse(text)):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                over.add(f"{name} {function}: {length} lines")
            words = [word.arg for word in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            parameters = [word for word in words if word not in ("self", "cls")]
            if len(parameters) > MAX_PARAMETERS:
                over.add(f"{name} {function}: {len(parameters)} parameters")
    assert over - OVER_BUDGET == set()
    assert OVER_BUDGET - over == set(), "no longer over the budget"


def raised_config_errors(text):
    """Functions that raise a `ConfigError` themselves."""
    for function, node in functions(ast.parse(text)):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call):
                called = inner.exc.func
                if isinstance(called, ast.Name) and called.id in ("ConfigError", "DataError"):
                    yield function


def test_no_config_error_is_raised_once_the_process_group_exists():
    found = {
        (name, function)
        for name, text in sources()
        if name.startswith(ROOMS_OF_A_RUNNING_ISLAND)
        for function in raised_config_errors(text)
        if name != "outer/wan/address.py"  # look-ups, which `train.check` makes first
    }
    assert found == CHECKED_FIRST


class NoLevel2:
    """An import hook: there is no `dilocox.outer`."""

    def find_spec(self, name, path=None, target=None):
        if name == "dilocox.outer" or name.startswith("dilocox.outer."):
            raise ImportError(f"{name} was imported")


def _train_without_level_2(island, rank, path):
    assert not any(name.startswith("dilocox.outer") for name in sys.modules)
    sys.meta_path.insert(0, NoLevel2())
    return train_rank(island, rank, path, [], None, False)


def test_without_level_2_a_megatron_trainer_remains(tmp_path):
    path = write_run(tmp_path, outer={"method": "none"})
    ((losses, _),) = run_islands(_train_without_level_2, 1, 1, path)[0]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
