"""The lines that `moebench launch` prints."""

import re
import shlex

import pytest

from moebench.cluster.commands import starts
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_topology


def test_a_cluster_of_gpus():
    """One torchrun a node with a common meeting place, or one job with a rank a GPU."""
    torchrun, sbatch = starts("hetu", load_topology("4x8-titan-rtx"), "4x8-titan-rtx")
    words = shlex.split(torchrun.line)
    assert words[:5] == ["torchrun", "--nnodes", "4", "--nproc-per-node", "8"]
    assert words[-7:] == ["-m", "moebench", "run", "--suite", "hetu", "--topology", "4x8-titan-rtx"]
    assert "--rdzv-endpoint" in words
    words = shlex.split(sbatch.line)
    assert {"--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--exclusive", "--mem=0"} < set(words)
    job = next(word for word in words if word.startswith("--wrap="))
    assert "export MASTER_ADDR=$(" in job
    assert "MASTER_PORT=" in job
    ranks = "srun --kill-on-bad-exit=1 --cpu-bind=none python -m moebench run --suite hetu --topology 4x8-titan-rtx"
    assert job.endswith(f"; {ranks}")


def test_names_with_spaces_stay_one_word():
    """A file's path reaches the command whole, through the batch job's shell too."""
    torchrun, sbatch = starts("my suite.toml", load_topology("2x2-titan-rtx"), "my cluster.toml")
    assert shlex.split(torchrun.line)[-3:] == ["my suite.toml", "--topology", "my cluster.toml"]
    job = next(word for word in shlex.split(sbatch.line) if word.startswith("--wrap="))
    assert shlex.split(job.rpartition("srun ")[2])[-3:] == ["my suite.toml", "--topology", "my cluster.toml"]


def test_ranks_of_this_machine(calibrated):
    """torchrun alone for real ranks, --emulate for emulated ones."""
    [start] = starts("smoke", load_topology("1x2-this-machine"), "1x2-this-machine")
    assert "--standalone" in start.line
    [start] = starts("smoke", load_topology("2x4-emulated"), "2x4-emulated")
    assert start.line == "moebench run --suite smoke --emulate 2x4"
    [start] = starts("smoke", load_topology("2x4-unshaped"), "2x4-unshaped")
    assert start.line == "moebench run --suite smoke --emulate 2x4 --unshaped"


def test_one_rank_needs_no_launcher():
    """The error has the command that does it."""
    with pytest.raises(InputError, match=re.escape("moebench run --suite hetu --topology 1x1-h100")):
        starts("hetu", load_topology("1x1-h100"), "1x1-h100")
