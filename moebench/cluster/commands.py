"""The exact lines that start a suite on a cluster: torchrun on each node, or one batch job."""

import shlex
from dataclasses import dataclass

from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology
from moebench.workloads.places import EMULATED, ON_THIS_MACHINE, UNSHAPED

PORT = 29500
_HEAD = "$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)"


@dataclass(frozen=True)
class Start:
    """One way to start a suite.

    Attributes:
        name: `torchrun`, `sbatch`, or `here`.
        where: on which machine a person types it.
    """

    name: str
    where: str
    line: str


def starts(suite: str, topology: Topology, asked: str) -> list[Start]:
    """Every way to start a suite on a topology.

    Args:
        suite: as the user names it; asked: the topology, likewise (a file's path, or a name).

    Raises:
        InputError: a topology of one rank, which no launcher is needed for.
    """
    if topology.ranks == 1:
        raise InputError(f"topology {topology.name} is one rank: moebench run --suite {suite} --topology {asked}")
    run = ["moebench", "run", "--suite", suite]
    if topology.node_type in (EMULATED, UNSHAPED):
        size = f"{topology.nodes}x{topology.gpus_per_node}"
        unshaped = ["--unshaped"] if topology.node_type == UNSHAPED else []
        return [Start("here", "on this machine", shlex.join([*run, "--emulate", size, *unshaped]))]
    run = ["-m", *run, "--topology", asked]
    where = "on this machine" if topology.nodes == 1 else "on every node; FIRST_NODE is the name of one of them"
    found = [Start("torchrun", where, _torchrun(topology, run))]
    if topology.node_type not in ON_THIS_MACHINE:
        where = "where jobs are submitted; your site may ask for --partition, --account, --time"
        found.append(Start("sbatch", where, _sbatch(suite, topology, run)))
    return found


def _torchrun(topology: Topology, run: list[str]) -> str:
    meeting = ["--standalone"]
    if topology.nodes > 1:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"FIRST_NODE:{PORT}", "--rdzv-id", "moebench"]
    counts = ["--nnodes", str(topology.nodes), "--nproc-per-node", str(topology.gpus_per_node)]
    return shlex.join(["torchrun", *counts, *meeting, *run])


def _sbatch(suite: str, topology: Topology, run: list[str]) -> str:
    """A job whose ranks srun starts, one a GPU; rank 0's node is where they meet.

    Nodes are taken whole: who else works there is measured too. Else a task has one core, on which torch's backward
    pass and NCCL's threads would take turns, and a share of the memory by its cores; torchrun's ranks have all.
    """
    srun = shlex.join(["srun", "--kill-on-bad-exit=1", "--cpu-bind=none", "python", *run])
    job = f"export MASTER_ADDR={_HEAD} MASTER_PORT={PORT}; {srun}"
    options = [f"--nodes={topology.nodes}", f"--ntasks-per-node={topology.gpus_per_node}", "--exclusive", "--mem=0"]
    if topology.hardware.kind == "gpu":
        options.append(f"--gpus-per-node={topology.gpus_per_node}")
    name = suite.rpartition("/")[2].removesuffix(".toml")
    return shlex.join(["sbatch", *options, f"--job-name=moebench-{name}", f"--wrap={job}"])
