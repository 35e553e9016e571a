"""Correct before fast: no setting is ranked before its system's settings train a small model as one rank does."""

from collections.abc import Sequence

from moebench.case import Case
from moebench.check_jobs import LAYOUT, MODEL, check
from moebench.correctness import Status
from moebench.systems.job_registry import get
from moebench.workloads.job import JobWorkload

SIZE = f"{LAYOUT.world // LAYOUT.node_ranks}x{LAYOUT.node_ranks}"


def trial_names(systems: Sequence[str]) -> list[str]:
    """What is tried of systems: all options that a planner would choose from on nodes as small as the trial's."""
    found: list[str] = []
    for name in systems:
        found += [get(name).name] if "+" in name else get(name).settings(MODEL, LAYOUT.node_ranks)
    return list(dict.fromkeys(found))


def checked(systems: Sequence[str]) -> Status:
    """The first status that is not `passed` of what is tried of systems, with the name; else `passed`."""
    names = trial_names(systems)
    workload = JobWorkload(MODEL.name, MODEL, LAYOUT.stages, LAYOUT.global_batch, LAYOUT.micro_batch)
    cases = [Case("planner", "check", name, workload, SIZE, SIZE, "sim") for name in names]
    for name, status in zip(names, check(cases)):
        if status.status != "passed":
            return Status(status.status, f"{name}: {status.reason}", status.report)
    return Status("passed")
