"""A run as a folder: run.json says what was run and where, results.jsonl holds the rows, one JSON object a line.

results.jsonl only ever grows. What a killed process left incomplete at its end is left out by readers, and cut off by a
resumed run, which runs that case again.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from moebench.cases.plan import Filters
from moebench.results import lines
from moebench.results.plain import from_plain, to_plain
from moebench.results.record import check_record
from moebench.results.rows import Row
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Hardware, Topology
from moebench.workloads.suite import Suite

RUN_FILE, RESULTS_FILE, TRACES_FOLDER, REPORT_FILE = "run.json", "results.jsonl", "traces", "report.html"
REPORTED_FOLDER = "reported"

DISK_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM)


class StorageError(InputError):
    """The run folder can't be written; what was written before is whole."""


class FolderTaken(InputError):
    """There is something where a new run was to be."""


def default_folder(suite: str, now: datetime | None = None) -> Path:
    """runs/<suite>-<local time>, not yet there."""
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    path = Path("runs") / f"{suite}-{stamp}"
    for counter in range(2, 1000):
        if not path.exists():
            break
        path = Path("runs") / f"{suite}-{stamp}-{counter}"
    return path


def new_record(
    suite: Suite,
    filters: Filters,
    engine: str,
    machines: Iterable[Topology],
    environment: Mapping[str, Any],
    cases: int,
) -> dict[str, Any]:
    """The contents of run.json for a run that starts now."""
    return {
        "schema_version": lines.SCHEMA_VERSION,
        "created": _now(),
        "finished": None,
        "cases": cases,
        "engine": engine,
        "suite": to_plain(suite),
        "filters": to_plain(filters),
        "environment": dict(environment),
        "resumed": [],
        **_machines_to_plain(machines),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


State = tuple[int, int] | None


class RunFolder:
    """One run on disk. `create` starts one, `open` finds one; `writing` gives the only way to add rows."""

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path = path
        self.record = record
        self._own: tuple[State, list[Row]] = None, []  # all rows of the file, if they were appended here

    @classmethod
    def create(cls, path: Path, record: dict[str, Any]) -> "RunFolder":
        """A new folder with its run.json; `record` comes from `new_record`.

        Raises:
            StorageError: it can't be made. FolderTaken: it holds something, or another run began there just now.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            hint = f"; continue it with --resume {path}" if (path / RUN_FILE).exists() else ""
            if not path.is_dir():
                raise FolderTaken(f"{path}: is a file, and a run needs a folder; choose another with --out")
            raise FolderTaken(f"{path}: the output folder is not empty{hint}; choose another with --out")
        folder = cls(path, record)
        made, file, is_own = [p for p in (path, *path.parents) if not p.exists()], path / RUN_FILE, False
        with storage(path):
            try:
                path.mkdir(parents=True, exist_ok=True)
                os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                is_own = True
                folder.save()
            except FileExistsError:
                raise FolderTaken(f"{path}: another run began there just now; choose another with --out") from None
            except OSError:
                if is_own:
                    file.unlink(missing_ok=True)
                _remove_empty(made)
                raise
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """An existing run.

        Raises:
            InputError: there is none, it isn't what moebench writes, or of a version that this one doesn't know.
        """
        file = path / RUN_FILE
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(f"{path}: no run here (no {RUN_FILE})") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{file}: not a JSON document: {error}") from None
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from None
        lines.check_version(record.get("schema_version") if isinstance(record, dict) else None, file)
        check_record(record, str(file))
        return cls(path, record)

    @cached_property
    def suite(self) -> Suite:
        """The suite as it was run, every default filled in; reported numbers of the user's are the run's copy."""
        suite: Suite = self._part(Suite, "suite")
        copies = sorted((self.path / REPORTED_FOLDER).glob("*.csv"))
        return replace(suite, reported=str(copies[0])) if copies else suite

    @cached_property
    def filters(self) -> Filters:
        """The filters of the run."""
        return self._part(Filters, "filters")

    @cached_property
    def topologies(self) -> dict[str, Topology]:
        """The machines of the run by name, overrides applied."""
        try:
            hardware = {name: from_plain(Hardware, part) for name, part in self.record["hardware"].items()}
            return {
                name: from_plain(Topology, part | {"hardware": to_plain(hardware[part["hardware"]])})
                for name, part in self.record["topologies"].items()
            }
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{self.path / RUN_FILE}: topologies: {error}") from None

    def _part(self, kind: type, key: str) -> Any:
        try:
            return from_plain(kind, self.record[key])
        except (KeyError, ValueError) as error:
            raise InputError(f"{self.path / RUN_FILE}: {key}: {error}") from None

    def keep_reported(self, file: Path) -> None:
        """Copy the user's reported numbers into the run, so that it is judged by them wherever it goes."""
        with storage(self.path):
            (self.path / REPORTED_FOLDER).mkdir(exist_ok=True)
            write_atomically(self.path / REPORTED_FOLDER / file.name, file.read_text(encoding="utf-8"))

    @property
    def results(self) -> Path:
        """The file of rows."""
        return self.path / RESULTS_FILE

    @property
    def state(self) -> State:
        """Changes with the file of rows: when it was written last, and its size; None where there is none."""
        if not self.results.exists():
            return None
        found = self.results.stat()
        return found.st_mtime_ns, found.st_size

    @property
    def traces(self) -> Path:
        """Where the recorded programs of the run lie."""
        return self.path / TRACES_FOLDER

    @property
    def report(self) -> Path:
        """The HTML report of the run."""
        return self.path / REPORT_FILE

    def save(self) -> None:
        """Write run.json in one piece: a reader sees the old one or the new one."""
        write_atomically(self.path / RUN_FILE, json.dumps(self.record, indent=1, default=str) + "\n")

    def finish(self) -> None:
        """Note in run.json that every case has its rows."""
        self.record["finished"] = _now()
        with storage(self.path):
            self.save()

    def note_resumed(self, environment: Mapping[str, Any]) -> None:
        """Note in run.json that the run goes on, and where."""
        self.record["resumed"].append(dict(environment))
        self.record["finished"] = None
        with storage(self.path):
            self.save()

    def rows(self, *metrics: str, with_samples: bool = True) -> list[Row]:
        """The rows of every whole case; of the given metrics, or all; with measured samples, or their summaries only.

        Raises:
            InputError: a line is not a row; the text names it.
        """
        state, own = self._own
        if state is None or state != self.state:
            return [lines.decode(item) for _, item in lines.objects(self.results, metrics, with_samples)]
        return [
            row for row in own if (not metrics or row.metric in metrics) and (with_samples or row.sample is None)
        ]

    def done(self) -> set[str]:
        """Hashes of the cases that have their rows."""
        return {item["case_hash"] for _, item in lines.objects(self.results)}

    @contextmanager
    def writing(self) -> Iterator[Callable[[Sequence[Row]], None]]:
        """Yield `append(rows of one case)`; cuts off an incomplete end first, refuses a second writer.

        Raises:
            StorageError: the disk is full or read-only; the file then ends with the last whole case.
            InputError: another process writes there, or the file is not what moebench wrote; it is left as it is.
        """
        file = self.results
        with storage(self.path):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _lock(descriptor, self.path)
            self.done()  # refuses what it can't read, before anything is cut off
            data = lines.read(file)
            whole = lines.whole_bytes(data, file)
            with storage(self.path):
                os.ftruncate(descriptor, whole)
                if whole and data[whole - 1 : whole] != b"\n":  # an editor took the last one away
                    _append(descriptor, b"\n")

            known: list[Row] | None = None if whole else []

            def append(rows: Sequence[Row]) -> None:
                with storage(self.path):
                    _append(descriptor, lines.encode(rows))
                if known is not None:
                    known.extend(rows)
                    self._own = self.state, known

            yield append
            with storage(self.path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file by `content` in one step."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        # A path that is not UTF-8 comes from the system as surrogates, which go back to the same bytes.
        data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        with open(scratch, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException as error:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        if isinstance(error, OSError) and str(error.filename) == str(scratch):
            error.filename = str(path)  # the only name that anybody gave
        raise


def _append(descriptor: int, data: bytes) -> None:
    before = os.fstat(descriptor).st_size
    try:
        written = 0
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except BaseException:
        os.ftruncate(descriptor, before)
        raise


@contextmanager
def storage(path: Path, only: Sequence[int] = ()) -> Iterator[None]:
    """Turn the operating system's refusal to write into one clear error.

    Args:
        only: error numbers to take; empty takes every OSError.

    Raises:
        StorageError: naming the folder and the system's reason.
    """
    try:
        yield
    except OSError as error:
        if only and error.errno not in only:
            raise
        place = error.filename or path  # an engine's own file may lie elsewhere
        raise StorageError(f"{place}: can't write: {error.strerror or error}") from error


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no advisory locks on this platform
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another moebench is writing here") from None


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _machines_to_plain(machines: Iterable[Topology]) -> dict[str, Any]:
    """Each hardware once, each topology with the key of its hardware."""
    hardware: dict[str, Any] = {}
    topologies: dict[str, Any] = {}
    for machine in machines:
        item = to_plain(machine.hardware)
        key = machine.hardware.name
        while hardware.setdefault(key, item) != item:
            key += "'"
        topologies[machine.name] = to_plain(machine) | {"hardware": key}
    return {"hardware": hardware, "topologies": topologies}
