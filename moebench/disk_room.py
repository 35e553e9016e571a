"""Whether the disk has room for what parts keep in files while they are measured; said before anything is written."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from moebench.cases.case import Case
from moebench.cases.parts import part_of, refusal
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology
from moebench.workloads.part import PartWorkload
from moebench.workloads.places import ON_THIS_MACHINE


def keep_files_in(folder: Path | None) -> None:
    """Where the files of this process and those that it starts are to lie.

    Raises:
        InputError: no folder, or one that can't be written.
    """
    from moebench.systems.scratch import VARIABLE

    if folder is None:
        return
    if not folder.is_dir():
        raise InputError(f"--scratch {folder}: no such folder")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"--scratch {folder}: {error.strerror}") from error
    os.environ[VARIABLE] = str(folder.absolute())


def check_room(cases: Sequence[Case], topologies: Mapping[str, Topology]) -> None:
    """Refuse measurements whose files don't fit; the systems of a point are measured in turn, with the files of all.

    Raises:
        InputError: how much is needed, and how much is free.
    """
    needed: dict[str, int] = {}
    for case in cases:
        if case.engine in ("local", "cluster") and isinstance(case.workload, PartWorkload):
            needed[case.point] = needed.get(case.point, 0) + _bytes_of(case, topologies[case.topology])
    point = max(needed, key=needed.__getitem__, default="")
    if not point or not needed[point]:
        return
    from moebench.systems.scratch import remove_left, scratch

    remove_left()
    free = shutil.disk_usage(scratch()).free
    if needed[point] > free:
        raise InputError(
            f"{point} keeps files of {needed[point]:,} bytes in {scratch()}, where {free:,} are free: choose another "
            "folder with --scratch"
        )


def _bytes_of(case: Case, topology: Topology) -> int:
    """Of the ranks on this machine; none of a case that isn't run."""
    from moebench.systems.part_registry import disk_bytes

    if refusal(case, topology) is not None:
        return 0
    here = topology.ranks if topology.node_type in ON_THIS_MACHINE else topology.gpus_per_node
    return disk_bytes(part_of(case), topology.ranks) * here // topology.ranks
