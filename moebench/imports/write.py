"""Imported files are written once they have been read back as the program reads them, and never over another file."""

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from moebench.workloads.errors import InputError


def slug(name: str) -> str:
    """A name as files have it: lower-case letters, digits, - and _."""
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-_") or "imported"


def write_checked(path: Path, write: Callable[[Path], object], check: Callable[[Path], str]) -> str:
    """Write a file beside its place, check it, and put it there; what `check` says of it.

    Raises:
        InputError: there is a file already, it can't be written, or it does not pass.
    """
    if path.exists():
        raise InputError(f"{path}: is there already; choose another file with -o")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".moebench-", dir=path.parent) as folder:
            scratch = Path(folder) / path.name
            write(scratch)
            try:
                said = check(scratch)
            except InputError as error:
                told = str(error).replace(str(scratch.absolute()), str(path)).replace(str(scratch), str(path))
                raise InputError(f"not written, as it would not be valid: {told}") from None
            shutil.move(scratch, path)
    except OSError as error:
        raise InputError(f"{path}: can't write: {error.strerror}") from error
    return said.replace(str(scratch), str(path))
