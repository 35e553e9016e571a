"""Rules of the house that a reader of one file cannot see broken: names, directions of imports, sizes of files."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("kernels", "workloads", "systems", "moebench")  # each may import itself and what stands before it
SOURCES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
HARNESS = ROOT / "moebench"
TEXTS = [path for path in sorted(HARNESS.rglob("*")) if path.suffix in {".py", ".html", ".j2", ".js", ".css", ".svg"}]
# Names that the harness must not know besides those of the registry: systems to come, and papers.
OTHERS = ("deepspeed", "hetu", "tutel", "fastmoe", "megatron", "lancet", "megascale", "moesys", "raf")
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MOST_LINES = 400


def relative(path):
    """A path from the repository's root."""
    return str(path.relative_to(ROOT))


def imported(path):
    """Every module that a file imports, at the top or inside a function, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def layer_of(module):
    """The layer of a module of this project by its import name, or None."""
    parts = module.split(".")
    if parts[0] != "moebench":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS[:-1] else "moebench"


def test_imports_run_one_way():
    """kernels <- workloads <- systems <- moebench, and never by a bare name."""
    wrong = []
    for path in SOURCES:
        own = LAYERS.index(path.relative_to(ROOT).parts[0])
        for module, line in imported(path):
            found = layer_of(module)
            is_bare = module.split(".")[0] in LAYERS[:-1]
            if is_bare or (found is not None and LAYERS.index(found) > own):
                wrong.append(f"{relative(path)}:{line}: imports {module}")
    assert not wrong, "\n".join(wrong)


def test_only_the_file_boundary_knows_pydantic():
    """Some modules of workloads have the models of files; nothing else needs the package."""
    knows = {relative(path) for path in SOURCES for module, _ in imported(path) if module.startswith("pydantic")}
    names = ("", "suite_", "figure_", "experiment_", "job_", "part_", "planner_")
    assert knows == {f"workloads/{name}schema.py" for name in names}


def test_kernels_gates_and_systems_run_without_pydantic():
    """They are imported with the package blocked, as on machines that lack it."""
    code = """
import importlib, pkgutil, sys
sys.modules["pydantic"] = sys.modules["pydantic_core"] = None
for package in ("moebench.kernels", "moebench.workloads.gates", "moebench.systems"):
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        importlib.import_module(found.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def system_names():
    """Names of the registry; `reference` is an ordinary word, and the harness gets it from the registry."""
    from moebench.systems.registry import systems

    return sorted({*systems(), *OTHERS} - {"reference"}, key=len, reverse=True)


def test_the_harness_names_no_system():
    """The cost model, the report and the command line see operators, bytes and hardware, nothing else."""
    pattern = re.compile(r"(?<![a-z])(" + "|".join(map(re.escape, system_names())) + r")(?![a-z])", re.IGNORECASE)
    hits = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not hits, "\n".join(hits)


def test_files_stay_readable_in_one_sitting():
    """No file is longer than 400 lines."""
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES + TESTS}
    assert not {path: lines for path, lines in lengths.items() if lines > MOST_LINES}


def test_every_file_says_what_lives_in_it():
    """The first docstring of each module."""
    silent = [relative(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert not silent


def test_every_test_states_its_behaviour():
    """Each test function has a docstring."""
    silent = [
        f"{relative(path)}:{node.lineno}: {node.name}"
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert not silent, "\n".join(silent)
