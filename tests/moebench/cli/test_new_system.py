"""`moebench new-system`: the package that it writes is found and right as it is; what can't be written is refused."""

import os
import subprocess
import sys

import pytest

from moebench.cli import group as commands
from moebench.new_system import contents, module_of, write_package
from moebench.systems import registry
from moebench.workloads.errors import InputError


@pytest.mark.slow
def test_a_new_package_passes_its_own_tests_and_is_listed(tmp_path, site):
    """By pytest, in a process that finds it as pip would have installed it."""
    folder = write_package("my_moe", tmp_path / "out")
    site.install_written(folder)
    environment = os.environ | {"PYTHONPATH": str(site.folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert registry.get("my_moe").title == "My moe"
    assert registry.package_of("my_moe") == "moebench-my-moe 1.0"
    with pytest.raises(InputError, match=r"taken by a system of package moebench-my-moe 1\.0"):
        write_package("my_moe", tmp_path / "again")


@pytest.mark.parametrize("name", ["a", "group", "routing", "expert_parallel", "class", "x_2"])
def test_any_name_gives_a_package_that_can_be_imported(site, tmp_path, name):
    """Names of Python's, and of what the module itself imports."""
    site.install_written(write_package(name, tmp_path / name))
    assert registry.get(name).name == name
    assert registry.get(name).build.__doc__


def test_what_is_written(tmp_path):
    """Every file, nothing left to fill in, and the README's commands exist."""
    files = contents("grouped_moe")
    assert set(files) == {
        "pyproject.toml", "README.md", "moebench_grouped_moe/__init__.py", "moebench_grouped_moe/system.py",
        "tests/test_system.py",
    }  # fmt: skip
    assert not [path for path, text in files.items() if "$" in text or "class_name" in text]
    verbs = {line.split()[1] for line in files["README.md"].splitlines() if line.startswith("moebench ")}
    assert verbs == {"list", "run"}
    assert verbs <= set(commands.list_commands(None))
    assert module_of("grouped_moe") in files["pyproject.toml"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My-MoE", "can't name a system"),
        ("3d", "can't name a system"),
        ("a__b", "can't name a system"),
        ("", "can't name a system"),
        ("../x", "can't name a system"),
        ("reference", "taken by a system of moebench's own; taken are: "),
        ("raf", "taken by a system of moebench's own"),
        ("x" * 300, "can't write: File name too long"),
    ],
)
def test_a_name_that_can_not_be_is_refused(moebench, in_folder, name, words):
    """One line, exit status 2, nothing written."""
    assert words in moebench.refused("new-system", name)
    assert list(in_folder.iterdir()) == []


def test_a_folder_that_is_there_is_left_as_it_is(moebench, in_folder):
    """An empty one too; another folder may be named, below folders that don't exist yet."""
    (in_folder / "moebench-mine").mkdir()
    assert "moebench-mine: is there already; choose another folder with --out" in moebench.refused("new-system", "mine")
    said = moebench("new-system", "mine", "--out", "some/where")
    assert said.status == 0
    assert "some/where: a package with the system mine" in said.out
    assert (in_folder / "some/where/moebench_mine/system.py").is_file()
    (in_folder / "file").write_text("")
    assert "can't write: File exists" in moebench.refused("new-system", "other", "--out", "file/x")
