"""A package for a system of one's own, written from the files in moebench/new_system_files: correct, small, commented.

It is written whole or not at all.
"""

import re
import shutil
import tempfile
from pathlib import Path
from string import Template

from moebench.workloads.errors import InputError

TEMPLATES = Path(__file__).parent / "new_system_files"
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# Template -> where it goes; MODULE stands for the package's import name.
FILES = {
    "pyproject.toml.in": "pyproject.toml",
    "README.md.in": "README.md",
    "init.py.in": "MODULE/__init__.py",
    "system.py.in": "MODULE/system.py",
    "test_system.py.in": "tests/test_system.py",
}


def module_of(name: str) -> str:
    """The import name of the package of a system."""
    return f"moebench_{name}"


def distribution_of(name: str) -> str:
    """The name under which pip knows it."""
    return f"moebench-{name.replace('_', '-')}"


def contents(name: str) -> dict[str, str]:
    """The files of the package by their path in it."""
    words = {
        "name": name,
        "module": module_of(name),
        "distribution": distribution_of(name),
        "class_name": "".join(part.capitalize() for part in name.split("_")),
        "title": name.replace("_", " ").capitalize(),
    }
    return {
        target.replace("MODULE", words["module"]): Template((TEMPLATES / source).read_text("utf-8")).substitute(words)
        for source, target in FILES.items()
    }


def write_package(name: str, out: Path | None = None) -> Path:
    """Write the package of a new system; the folder it is in.

    Args:
        out: the folder, which must not exist yet; default one named as the distribution, here.

    Raises:
        InputError: a name that can't be one or is taken, or a folder that is there or can't be written.
    """
    _check_name(name)
    folder = out or Path(distribution_of(name))
    try:
        if folder.exists() or folder.is_symlink():
            raise InputError(f"{folder}: is there already; choose another folder with --out")
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for path, text in contents(name).items():
                (scratch / path).parent.mkdir(parents=True, exist_ok=True)
                (scratch / path).write_text(text, encoding="utf-8")
            scratch.chmod(0o755)
            scratch.rename(folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    except OSError as error:
        raise InputError(f"{folder}: can't write: {error.strerror}") from error
    return folder


def _check_name(name: str) -> None:
    from moebench.systems.registry import names, own_names, package_of

    if not NAME.fullmatch(name):
        raise InputError(
            f"NAME {name!r} can't name a system: write lower-case letters and digits, a letter first, words joined by "
            "_, such as grouped or my_moe"
        )
    taken = sorted({*names(), *own_names()})
    if name in taken:
        owner = package_of(name)
        whose = "a system of moebench's own" if owner is None else f"a system of package {owner}"
        raise InputError(f"NAME {name!r} is taken by {whose}; taken are: {', '.join(taken)}")
