"""The command line by the clock: help (aim 0.3 s) and the whole hetu suite (aim 60 s on 2 cores).

    python -m pytest benchmarks/bench_cli.py --benchmark-enable
"""

import shutil
import subprocess
import sys

ROUNDS = {"help": 10, "hetu": 2}


def run(*arguments):
    """moebench in a process of its own, as at a terminal."""
    result = subprocess.run([sys.executable, "-m", "moebench", *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_help(benchmark):
    """What everybody types first."""
    shown = benchmark.pedantic(run, args=("--help",), rounds=ROUNDS["help"], warmup_rounds=1)
    assert "run" in shown


def test_hetu_suite(benchmark, tmp_path):
    """Every case, the correctness gate (remembered after the first round), the claims and the report."""
    folder = tmp_path / "hetu"

    def fresh():
        shutil.rmtree(folder, ignore_errors=True)

    benchmark.pedantic(run, args=("run", "--suite", "hetu", "--out", str(folder)), setup=fresh, rounds=ROUNDS["hetu"])
    assert (folder / "report.html").exists()
