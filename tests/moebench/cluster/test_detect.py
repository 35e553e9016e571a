"""What the environment says of a launcher."""

import pytest

from moebench.cluster.detect import launched
from moebench.workloads.errors import InputError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "MASTER_ADDR": "n0", "MASTER_PORT": "29500",
}  # fmt: skip


def test_nobody_launched_this():
    """An ordinary process, and one inside an allocation that srun did not start."""
    assert launched({}) is None
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) is None
    assert launched({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_a_rank_of_torchrun():
    """Rank 5 of 2 nodes of 4; the launcher has a store, and this is the third attempt in it."""
    place = launched(TORCHRUN)
    assert (place.launcher, place.rank, place.local_rank, place.size) == ("torchrun", 5, 1, "2x4")
    assert (place.address, place.port, place.has_store) == ("n0", 29500, True)
    assert place.prefix.endswith("/2")


def test_a_rank_of_srun():
    """The same place, by SLURM's own names; rank 0 will hold the store."""
    place = launched(SRUN)
    assert (place.launcher, place.rank, place.local_rank, place.size) == ("srun", 5, 1, "2x4")
    assert not place.has_store


def test_torchrun_inside_of_srun_is_torchrun():
    """srun may start one torchrun a node; the innermost launcher counts."""
    assert launched(SRUN | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (SRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR must say where the ranks meet"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2"}, "every node must hold the same number"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "every node must hold the same number"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0, as of a launcher, is no"),
        (TORCHRUN | {"RANK": "-1"}, "RANK=-1, as of a launcher, is no whole number"),
        (TORCHRUN | {"RANK": "8"}, "this is rank 8, of 8"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS=many"),
    ],
)
def test_an_environment_without_a_meaning_is_refused(changed, told):
    """The error says what is missing."""
    with pytest.raises(InputError, match=told):
        launched(changed)
