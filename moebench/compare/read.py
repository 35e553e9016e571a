"""Opens what a user names: a run folder, a file of pytest-benchmark, or a folder of such files."""

import json
from pathlib import Path
from typing import Any

from moebench.compare.read_pytest import is_pytest, read_pytest
from moebench.compare.read_run import read_run
from moebench.compare.side import Side
from moebench.results.store import RUN_FILE
from moebench.workloads.errors import InputError

MOST_BYTES = 1 << 30  # of a file that is read in one piece


def read_side(path: Path) -> Side:
    """One side of a comparison.

    Raises:
        InputError: nothing is there, or something else than a run.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir() and (path / RUN_FILE).exists():
        return read_run(path)
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    documents = {file: read_json(file) for file in files}
    strangers = [file for file, document in documents.items() if not is_pytest(document)]
    if not files or strangers:
        what = f"{strangers[0]} is not a file of pytest-benchmark" if strangers else "no run here"
        raise InputError(f"{path}: {what}; give a run folder (with {RUN_FILE}) or what pytest-benchmark saved")
    return read_pytest(str(path), documents)


def read_json(path: Path) -> Any:
    """The document of a JSON file; NaN and Infinity, which Python writes, are numbers that are not finite.

    Raises:
        InputError: it can't be read.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path}: larger than {MOST_BYTES >> 20} MiB")
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a JSON document: it is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a JSON document: {error}") from None
