"""Whole runs on real ranks, as a person starts them: under torchrun, and on an emulated cluster without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.moebench.cli.support import Moebench

pytestmark = pytest.mark.slow

# A system of somebody else's package: right on every check, and unable to run batches of two on rank 1.
FAULTY = """
import sys

from moebench.systems.registry import reference

class Faulty:
    name, title, source = "faulty", "Fails on rank 1", "a test"

    def supports(self, workload, conventions):
        return reference().supports(workload, conventions)

    def as_shipped(self, gate):
        return reference().as_shipped(gate)

    def build(self, workload, group, conventions, device, dtype):
        worker = sys.modules.get("moebench.cluster.worker")
        if worker is not None:
            worker.SAMPLE_S = 0.0  # this test is about who measures, and short samples will do
        layer = reference().build(workload, group, conventions, device, dtype)
        if workload.batch_size == 2 and group.rank == 1:
            layer.register_forward_pre_hook(fail)
        return layer

def fail(*_):
    raise RuntimeError("no luck here")

SYSTEM = Faulty()
"""


@pytest.fixture
def environment(calibrated, site):
    """A calibrated machine on which the faulty system is installed, for this process and for others."""
    site.install("faulty", {"faulty": "faulty:SYSTEM"}, {"faulty.py": FAULTY})
    return os.environ | {"PYTHONPATH": str(site.folder)}


def ran(arguments, environment, launcher=("-m", "moebench")):
    """A command's output on standard error; it must end well."""
    command = [sys.executable, *launcher, "run", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def rows_of(folder):
    """The rows of a run."""
    return [json.loads(line) for line in Path(folder, "results.jsonl").read_text().splitlines()]


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "moebench")


def test_two_ranks_of_torchrun(environment, tmp_path):
    """Rank 0 writes; a rank that fails ends its case, named, and the next case is measured; a stopped run goes on."""
    out = tmp_path / "run"
    chosen = ("--suite", "smoke", "--gate", "switch", "--system", "faulty", "--batch-size", 1, "--batch-size", 2)
    said = ran((*chosen, "--engine", "cluster", "--out", out), environment, TORCHRUN)
    assert said.count("2 cases into") == 1
    rows = rows_of(out)
    assert {row["topology"] for row in rows} == {"1x2-this-machine"}
    [failed] = [row for row in rows if row["status"] == "failed"]
    assert failed["reason"] == "package faulty 1.0: rank 1: RuntimeError: no luck here"
    assert "in fail\n" in failed["detail"]["report"]
    samples = [row for row in rows if row["batch_size"] == 1 and "sample" in row]
    assert {row["detail"]["process"] for row in samples} == {0, 1}
    assert len(samples) == 28
    assert all(len(row["detail"]["ranks_s"]) == 2 for row in samples)

    kept = [row for row in rows if row["batch_size"] == 1]
    out.joinpath("results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    ran(("--resume", out), environment, TORCHRUN)
    *again, last = rows_of(out)
    assert again == kept
    assert (last["case_hash"], last["reason"]) == (failed["case_hash"], failed["reason"])


def test_an_unshaped_cluster(environment, tmp_path, capsys):
    """Plain ranks; the topology says that no network was emulated, and the same name is predicted by sim."""
    chosen = ("--suite", "smoke", "--gate", "switch", "--batch-size", 1, "--system", "faulty")
    chosen = (*chosen, "--emulate", "2x1", "--unshaped")
    ran((*chosen, "--out", tmp_path / "real"), environment)
    assert Moebench(capsys)("run", *chosen, "--engine", "sim", "--out", tmp_path / "predicted").status == 0
    real, predicted = rows_of(tmp_path / "real"), rows_of(tmp_path / "predicted")
    assert {row["engine"] for row in real} == {"cluster"}
    assert {row["topology"] for row in real + predicted} == {"2x1-unshaped"}
    assert {row["case"] for row in real} == {row["case"] for row in predicted}
    assert not any("nics" in row.get("detail", {}) for row in real)
