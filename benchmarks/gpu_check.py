"""Everything about the kernels that takes a GPU, in one command: whether they are right there, and how fast they are.

Sections run in order of value, and none starts after five minutes: what was left out is said. It needs torch, Triton
and numpy, and no virtual environment: `make gpu-check`. It writes device.csv, checks.csv, kernels.csv and
environment.csv into results/measured/<gpu>/, after every section. A kernel that takes the device down with it, as one
that writes to an address that there isn't, costs its section: the others run in a new process. Exits 1 where a check
failed, 2 without a GPU that Triton can use.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import CASES, operators_without_case
from benchmarks.gpu_checks import EDGES, LARGE, Check, checks_of, far_checks
from benchmarks.gpu_clock import GpuClock
from benchmarks.gpu_operators import all_operator_checks
from benchmarks.gpu_timing import TIMED, Clock, Rate, Row, Timed, device_rates, floors_of, timed_rows
from benchmarks.rows_csv import read_rows, write_rows

MEASURED = Path(__file__).parent.parent / "results" / "measured"
LAST_START_S = 300.0  # no section starts after this
FAR_MEMORY_BYTES = 20 << 30  # four tensors of far rows at once, and what else lies there
QUERY = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")


@dataclass(frozen=True)
class Fact:
    """A line of environment.csv."""

    name: str
    value: str


@dataclass
class Found:
    """What the sections found so far, and where it goes."""

    folder: Path
    rates: list[Rate] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "Found":
        """What an earlier process wrote."""
        found = cls(folder)
        for kind, lines, path in found._files():
            if path.exists():
                lines.extend(read_rows(kind, path))
        return found

    def clear(self) -> None:
        """Remove the files of another run: none of its lines may stand beside those of this one."""
        for *_, path in self._files():
            path.unlink(missing_ok=True)

    @property
    def failures(self) -> list[Check]:
        """Checks that are not right."""
        return [check for check in self.checks if check.verdict != "right"]

    def write(self) -> None:
        """The files of the lists that are not empty."""
        for _, lines, path in self._files():
            if lines:
                write_rows(lines, path)

    def _files(self) -> Iterator[tuple[type, list[Any], Path]]:
        yield Rate, self.rates, self.folder / "device.csv"
        yield Check, self.checks, self.folder / "checks.csv"
        yield Row, self.rows, self.folder / "kernels.csv"
        yield Fact, self.facts, self.folder / "environment.csv"


@dataclass(frozen=True)
class Section:
    """A piece of work that is started or left out as a whole; it adds to what was found."""

    name: str
    run: Callable[[Found], None]


def sections(device: torch.device, clock: Callable[[], Clock]) -> list[Section]:
    """All of them, the most valuable first; `clock` is made by the first that times something."""
    made: list[Clock] = []

    def the_clock() -> Clock:
        if not made:
            made.append(clock())
        return made[0]

    def checked(name: str, checks: Callable[[], Iterable[Check]]) -> Section:
        return Section(name, lambda found: _add_checks(found, checks()))

    def timed(each: Timed) -> Section:
        return Section(f"time of {each.case} {each.shape}", lambda found: _add_rows(found, each, the_clock(), device))

    return [
        *(checked(f"{case.name}: edge cases", partial(checks_of, case, device, EDGES)) for case in CASES),
        Section("rates of the device", lambda found: found.rates.extend(device_rates(the_clock(), device))),
        *(checked(f"{case.name}: large", partial(checks_of, case, device, LARGE)) for case in CASES),
        checked("operators against the trace", partial(all_operator_checks, device)),
        *(timed(each) for each in TIMED),
        Section("far rows", partial(_far_rows, device=device)),
    ]


def run_sections(
    todo: Iterable[Section], found: Found, say: Callable[[str], None], clock: Callable[[], float] | None = None,
    is_lost: Callable[[], bool] = lambda: False,
) -> int | None:  # fmt: skip
    """Run until the clock shows more than `LAST_START_S`; a section that raises counts as a failed check.

    Args:
        clock: seconds since the run began; from now on where None.
        is_lost: whether the device is of no more use to this process; asked after failures.

    Returns:
        The number of sections that are over when the device is lost, or None at the end.
    """
    clock = clock or stopwatch()
    for place, section in enumerate(todo):
        before, failed = clock(), len(found.failures)
        if before > LAST_START_S:
            found.left_out.append(section.name)
            continue
        try:
            section.run(found)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).strip()[:300]}"
            found.checks.append(Check(section.name, "", "", "error", detail=problem))
        found.write()
        wrong = found.failures[failed:]
        say(f"{clock() - before:6.1f} s  {section.name}{f'  {len(wrong)} WRONG' if wrong else ''}")
        for check in wrong[:3]:
            say(f"          {check.name} {check.shape} {check.dtype}: {check.detail}")
        if wrong and is_lost():
            say("          the device does not answer any more: the rest in a new process")
            return place + 1
    return None


def stopwatch(spent_s: float = 0.0) -> Callable[[], float]:
    """Seconds since now, and those spent before."""
    begun = time.monotonic() - spent_s
    return lambda: time.monotonic() - begun


def _is_lost() -> bool:
    """Whether an error of a kernel has ended this process's work on the GPU, as an illegal access does."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _add_checks(found: Found, checks: Iterable[Check]) -> None:
    for check in checks:  # one by one: what came before an error counts
        found.checks.append(check)


def _add_rows(found: Found, timed: Timed, clock: Clock, device: torch.device) -> None:
    if not found.rates:
        raise RuntimeError("the rates of the device are unknown, and with them every floor")
    for row in timed_rows(timed, clock, floors_of(found.rates), device):
        found.rows.append(row)


def _far_rows(found: Found, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < FAR_MEMORY_BYTES:
        found.left_out.append(f"far rows (they take {FAR_MEMORY_BYTES >> 30} GiB)")
    else:
        _add_checks(found, far_checks(device))


def problem() -> str | None:
    """Why nothing can be checked here, in a sentence, or None."""
    if not torch.cuda.is_available():
        return f"gpu-check needs a GPU, and torch {torch.__version__} finds none on this machine."
    if find_spec("triton") is None:
        return "gpu-check needs Triton, and it is not installed beside this torch: pip install 'triton>=3.6,<3.8'."
    from triton.runtime import driver

    try:
        driver.active.get_current_target()  # builds what launches kernels: that takes a C compiler
    except Exception as error:
        return f"gpu-check needs Triton, which fails on this machine: {str(error).strip()}"
    return None


def folder_name(gpu: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def environment(device: torch.device) -> Iterator[Fact]:
    """What the figures depend on."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    yield Fact("gpu", properties.name)
    yield Fact("capability", f"{properties.major}.{properties.minor}")
    yield Fact("memory_bytes", str(properties.total_memory))
    yield Fact("l2_bytes", str(properties.L2_cache_size))
    yield Fact("processors", str(properties.multi_processor_count))
    yield Fact("torch", torch.__version__)
    yield Fact("cuda", str(torch.version.cuda or torch.version.hip))
    yield Fact("triton", triton.__version__)
    yield Fact("python", platform.python_version())


def clocks(when: str) -> Iterator[Fact]:
    """Clocks, power and why the clocks are what they are, where `nvidia-smi` tells."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return
    gpu = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"  # its number may be another there
    command = [tool, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", f"--id={gpu}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return
    for name, value in zip(QUERY, done.stdout.strip().split(", ")):
        yield Fact(f"{name} {when}", value)


def summary(found: Found) -> str:
    """The table of times, then what is wrong and what was left out."""
    head = f"{'case':24s} {'implementation':20s} {'cold us':>10s} {'hot us':>10s} {'GB/s':>8s} {'TFLOP/s':>8s}"
    lines = [f"{head} x floor  shape"]
    for row in found.rows:
        figures = f"{row.cold_us:10.1f} {row.hot_us:10.1f} {row.gbytes_per_s:8.0f} {row.tflops_per_s:8.1f}"
        lines.append(f"{row.case:24s} {row.implementation:20s} {figures} {row.ratio_to_floor:7.2f}  {row.shape}")
    lines.append(f"{len(found.checks)} checks, {len(found.failures)} failed; written to {found.folder}")
    if found.left_out:
        lines.append(f"left out for want of time or memory: {', '.join(found.left_out)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all sections on the current GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the results (default: results/measured/<gpu>)")
    # How a process goes on where another lost the device.
    parser.add_argument("--over", type=int, default=0, metavar="SECTIONS", help=argparse.SUPPRESS)
    parser.add_argument("--spent", type=float, default=0.0, metavar="SECONDS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    clock = stopwatch(options.spent)
    reason = problem()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    folder = options.out or MEASURED / folder_name(torch.cuda.get_device_name(device))
    found = Found.read(folder) if options.over else _begun(folder, device)
    todo = sections(device, GpuClock)[options.over :]
    over = run_sections(todo, found, lambda line: print(line, flush=True), clock, _is_lost)
    if over is not None:
        _go_on(options.over + over, clock())
    found.facts.extend(clocks("after"))
    found.write()
    print(summary(found))
    return 1 if found.failures else 0


def _begun(folder: Path, device: torch.device) -> Found:
    """The start of a run, in an empty folder."""
    found = Found(folder)
    found.clear()
    found.facts.extend((*environment(device), *clocks("before")))
    for name in operators_without_case():
        found.checks.append(Check(name, "", "", "error", detail="benchmarks/gpu_cases.py never calls it"))
    return found


def _go_on(over: int, spent_s: float) -> None:
    """Become a new process, as this one was called, that takes up what was written after so many sections."""
    command = [sys.executable, *sys.orig_argv[1:], "--over", str(over), "--spent", f"{spent_s:.1f}"]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main())
