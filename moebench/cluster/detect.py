"""Whether this process is one of many that a launcher started, and which: read from the environment, nothing else."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from moebench.workloads.errors import InputError

# Of a launcher that works as torch's own does.
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """This process among those of a launcher.

    Attributes:
        launcher: `torchrun` or `srun`.
        rank, world: of all; local_rank, local_world: on this node.
        address, port: where the ranks meet.
        has_store: whether the launcher itself holds a key-value store there; else rank 0 does.
        attempt: how often the launcher has started them anew; its store may hold what an earlier attempt left.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    has_store: bool = False
    attempt: int = 0

    @property
    def prefix(self) -> str:
        """Of this attempt's keys in the store."""
        return f"moebench/{self.attempt}"

    @property
    def nodes(self) -> int:
        """Nodes, where all hold as many ranks as this one."""
        return self.world // self.local_world

    @property
    def size(self) -> str:
        """`4x8`."""
        return f"{self.nodes}x{self.local_world}"


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """The launcher's word on this process; None where nobody launched it among others.

    Raises:
        InputError: the environment is incomplete, says what is no number, or the nodes hold different numbers of ranks.
    """
    if all(name in environ for name in _TORCH):
        found = _by_torchrun(environ)
    elif _number(environ, "SLURM_STEP_NUM_TASKS", 1, 1) > 1 and "SLURM_PROCID" in environ:
        found = _by_srun(environ)
    else:
        return None
    if found.rank >= found.world:
        raise InputError(f"{found.launcher} says that this is rank {found.rank}, of {found.world}")
    if found.world % found.local_world:
        raise InputError(
            f"{found.launcher} started {found.world} ranks, {found.local_world} of them here: "
            "every node must hold the same number"
        )
    return found


def _number(environ: Mapping[str, str], name: str, least: int = 0, default: int | None = None) -> int:
    """What a launcher says in one variable.

    Raises:
        InputError: no whole number of at least `least`.
    """
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{name}={text}, as of a launcher, is no whole number of at least {least}")
    return int(text)


def _by_torchrun(environ: Mapping[str, str]) -> Launched:
    world, rank = _number(environ, "WORLD_SIZE", 1), _number(environ, "RANK")
    return Launched(
        launcher="torchrun",
        rank=rank,
        world=world,
        local_rank=_number(environ, "LOCAL_RANK", 0, rank),
        local_world=_number(environ, "LOCAL_WORLD_SIZE", 1, world),
        address=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT"),
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0, 0),
    )


def _by_srun(environ: Mapping[str, str]) -> Launched:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise InputError(
            f"srun started this, and {' and '.join(missing)} must say where the ranks meet; "
            "`moebench launch` prints a batch job that sets them"
        )
    world = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    return Launched(
        launcher="srun",
        rank=_number(environ, "SLURM_PROCID"),
        world=world,
        local_rank=_number(environ, "SLURM_LOCALID", 0, 0),
        local_world=_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(world))),
        address=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT"),
    )


def _tasks_per_node(text: str) -> int:
    """The number in SLURM's `8(x4)`.

    Raises:
        InputError: the nodes differ, as in `8(x3),4`.
    """
    counts = {int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", text)}
    if len(counts) != 1:
        raise InputError(f"srun started {text} tasks a node: every node must hold the same number")
    return counts.pop()
