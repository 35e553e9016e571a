"""Pages and comparisons of large runs and long histories: 100,000 rows a side and 1,000 runs, each 10 s and 500 MB.

    python -m pytest benchmarks/bench_compare.py --benchmark-enable

Each round is a process of its own, as at a terminal. Beside the times stand the peak of its memory and its processor
time (a single thread's: what it takes on an idle machine), which the aims are held against.
"""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from benchmarks.large_runs import write_large

ROWS, RUNS, RUN_ROWS = 100_000, 1_000, 2_520
MOST_S, MOST_BYTES = 10.0, 500e6


def run(folder, *arguments):
    """moebench in a process of its own; its peak memory in bytes, and its processor time."""
    with (folder / "out").open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "moebench", *map(str, arguments)], cwd=folder, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 1)
    return usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def measure(benchmark, folder, *arguments):
    """Time a command, and hold it against the aims."""
    seen = []
    benchmark.pedantic(lambda: seen.append(run(folder, *arguments)), rounds=2)
    peak, cpu_s = max(peak for peak, _ in seen), max(cpu_s for _, cpu_s in seen)
    benchmark.extra_info |= {"peak_MB": round(peak / 1e6), "cpu_s": round(cpu_s, 2)}
    print(f"\nmoebench {arguments[0]}: {cpu_s:.1f} s of processor time, at most {peak / 1e6:.0f} MB")
    assert peak < MOST_BYTES
    assert cpu_s < MOST_S


@pytest.fixture(scope="module", params=["sim", "local"])
def pair(request, tmp_path_factory):
    """Two runs of 100,000 rows, simulated or measured."""
    folder = tmp_path_factory.mktemp(request.param)
    for seed, name in enumerate(("base", "head")):
        write_large(folder / name, ROWS, request.param, seed)
    return folder


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """1,000 runs of 72 cases, 2,520 rows each (1.5 GB in all)."""
    folder, start = tmp_path_factory.mktemp("many"), datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(RUNS):
        created = (start + timedelta(hours=number)).isoformat()
        write_large(folder / "runs" / f"{number:04}", RUN_ROWS, "sim", number, created=created)
    return folder


def test_compare(benchmark, pair):
    """Both sides read, every quantity judged, the table printed."""
    measure(benchmark, pair, "compare", "base", "head")


def test_compare_page(benchmark, pair):
    """The same, and a page of it."""
    measure(benchmark, pair, "compare", "base", "head", "--html", "page.html")


def test_report(benchmark, pair):
    """The report of one run."""
    measure(benchmark, pair, "report", "base")


def test_trend(benchmark, many):
    """The changes of all series."""
    measure(benchmark, many, "trend", "runs")


def test_index(benchmark, many):
    """The page of all runs."""
    measure(benchmark, many, "index", "runs")
