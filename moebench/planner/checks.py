"""Correct before fast: no setting is ranked before its system's settings train a small model as one rank does."""

from collections.abc import Sequence

from moebench.cases.case import Case
from moebench.checks.correctness import Status
from moebench.checks.jobs import LAYOUT, MODEL, check
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
    """The first one that is wrong or failed of what is tried of systems, with its name; else `passed`.

    Options that need more ranks than the trial has (experts on eight) are tried on those that it has; where a system
    has nothing that can be tried, it is `unsupported`.
    """
    names = trial_names(systems)
    workload = JobWorkload(MODEL.name, MODEL, LAYOUT.stages, LAYOUT.global_batch, LAYOUT.micro_batch)
    cases = [Case("planner", "check", name, workload, SIZE, SIZE, "sim") for name in names]
    found = dict(zip(names, check(cases), strict=True))
    for name, status in found.items():
        if status.status not in ("passed", "unsupported"):
            return Status(status.status, f"{name}: {status.reason}", status.report)
    for system in systems:
        own = {name: found[name] for name in trial_names([system])}
        if all(status.status == "unsupported" for status in own.values()):
            name, status = next(iter(own.items()))
            return Status("unsupported", f"{name}: {status.reason}")
    return Status("passed")
