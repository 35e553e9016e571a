"""The wheel holds what the tree holds, and works where only the dependencies are installed."""

import itertools
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Import name -> folder, as pyproject.toml maps them; `moebench` itself last, so that the longest name is found first.
FOLDERS = {
    "moebench.kernels": "kernels",
    "moebench.workloads": "workloads",
    "moebench.systems": "systems",
    "moebench.reported": "results/reported",
    "moebench": "moebench",
}
IGNORED = {"__pycache__", "build", ".ruff_cache", ".mypy_cache"}

CHECK = """
import importlib, importlib.metadata, pkgutil, sys
from importlib.resources import files
from pathlib import Path

import moebench

here = Path(moebench.__file__)
assert Path(sys.prefix) in here.parents, f"not the installed wheel: {here}"
names = [found.name for found in pkgutil.walk_packages(moebench.__path__, "moebench.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
for name in sys.argv[1:]:
    package, _, path = name.partition(":")
    assert files(package).joinpath(path).read_bytes(), name

from moebench.workloads import load
from moebench.workloads.places import ON_THIS_MACHINE

for name in load.hardware_names():
    load.load_hardware(name)
for name in load.topology_names():
    if not name.endswith(ON_THIS_MACHINE):
        load.load_topology(name)
for name in load.suite_names():
    load.load_suite(name)
[script] = importlib.metadata.entry_points(group="console_scripts", name="moebench")
assert callable(script.load())
print(len(names), "modules")
"""


def pyproject():
    """The project file, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def tree(folder):
    """Files of a folder as they would be packaged, relative to it."""
    base = ROOT / folder
    files = [path.relative_to(base) for path in base.rglob("*") if path.is_file()]
    return sorted(path for path in files if not IGNORED & set(path.parts))


def as_installed():
    """Every file of the tree under the path that it has once installed."""
    found = [(name, path) for name, folder in FOLDERS.items() for path in tree(folder)]
    return {(Path(*name.split(".")) / path).as_posix(): (name, path) for name, path in found}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without network from a copy of the tree, where nothing stale lies about."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns(*IGNORED))
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*build, "--disable-pip-version-check", "-w", out, copy], check=True, cwd=copy)
    [built] = out.glob("*.whl")
    return built


def test_the_package_list_is_the_tree():
    """A package missing from the list works in an editable install and is silently absent from the wheel."""
    found = set()
    for installed in as_installed():
        if installed.endswith(".py"):
            found.add(Path(installed).parent.as_posix().replace("/", "."))
    assert sorted(pyproject()["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_package_has_an_init_with_a_docstring():
    """A folder without `__init__.py` would be a namespace package, and not packaged."""
    for installed, (name, path) in as_installed().items():
        if installed.endswith(".py"):
            assert (ROOT / FOLDERS[name] / path.parent / "__init__.py").is_file(), installed


def test_the_folder_map_is_the_projects():
    """The folders that this file walks are those that setuptools maps."""
    assert pyproject()["tool"]["setuptools"]["package-dir"] == FOLDERS


def test_nothing_that_is_compared_is_a_dependency():
    """The systems compared are re-implemented; none of them is installed to run this."""
    project = pyproject()["project"]
    extras = project["optional-dependencies"].values()
    listed = " ".join([*project["dependencies"], *itertools.chain(*extras)]).lower()
    for name in ("deepspeed", "tutel", "fastmoe", "hetu", "megatron", "transformer-engine", "scattermoe", "megablocks"):
        assert name not in listed


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_tree(wheel):
    """Python and data, under the names that they are imported by, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert sorted(held) == sorted(as_installed())


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    """Every module imports and every data file is read, where only the dependencies are besides."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--disable-pip-version-check", wheel], check=True)
    [site] = venv.glob("lib/python*/site-packages")
    # Only this folder is added, not what its own .pth files name: the editable moebench stays out of sight.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    files = [(name, path) for name, path in as_installed().values() if path.suffix not in (".py", ".typed")]
    data = [f"{name}:{path.as_posix()}" for name, path in files]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for command, expected in (
        ([python, "-I", "-c", CHECK, *data], " modules"),
        ([venv / "bin" / "moebench", "--help"], "run"),
    ):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]
        assert expected in done.stdout
