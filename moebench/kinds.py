"""What the harness does differently for each kind of workload: one table, every other module asks here.

A kind is an entry of `KINDS`: functions by `module:name`, imported at their first use, so that planning needs no torch
and judging no report. How its cases are named and which columns they have is the workload's own affair.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Kind:
    """Functions of one kind, as `module:name` in this package.

    Attributes:
        cases: `(experiment, Context) -> cases` of an experiment, see moebench.cases.plan.
        names: `(experiment) -> {filter: names that it knows}`.
        check_key: `(case) -> key`: cases of one key are right or wrong together.
        check: `(cases) -> Status of each`, in their order; one case of each key.
        programs: `(case, topology) -> Programs`, for all topologies of that size; raises moebench.trace.errors.
        refusal: `(case, topology) -> (status, reason) or None`: why the case isn't run on real ranks, as far as that is
            known before any of them is started.
        step: `(case, device, group) -> Step` on real tensors; raises CannotRun or Skipped.
        simulate: `(case, topology, values) -> rows`, of a kind whose programs are not run together: what `sim` does in
            place of one replay. Its rows are finished, and it has no `finish`.
        counted: `(case, hardware) -> rows`: of a case that no clock times, what it does on seeded numbers.
        counting: `(case) -> (seconds, status)`: how long that takes about, and the status, where it is known before.
        apart: `(RecordedCase) -> Breakdown`, of a kind that has `simulate`; timeline: `(RecordedCase) -> a document for
            Perfetto`, likewise.
        finish: `(case, topology, rows of an engine) -> rows`: what means something, and what follows from it.
            A kind that no clock times has neither this nor programs, refusal and step.
        obtain: `(claim, suite, Evidence) -> Obtained`; raises CantAnswer.
        view: `(RunFolder, experiment, frame, scores) -> what the report's template shows`.
        explain: `(case, topology, width, tell) -> lines`: what a case's system planned, if it plans; `tell` hears of
            each stage.
        together: `(case) -> key`, of cases whose programs have parts in common: one process runs them.
        plans_by_machine: whether what a system runs may depend on the machine that it runs on.
        drawn: metrics beside the time whose draws are kept, since claims divide them draw by draw.
    """

    cases: str
    names: str
    check_key: str
    check: str
    obtain: str
    view: str
    programs: str = ""
    refusal: str = ""
    step: str = ""
    simulate: str = ""
    apart: str = ""
    timeline: str = ""
    counted: str = ""
    counting: str = ""
    finish: str = ""
    explain: str = ""
    together: str = ""
    plans_by_machine: bool = False
    drawn: tuple[str, ...] = ()


KINDS = {
    "layer": Kind(
        cases="cases.layers:cases",
        names="cases.layers:names",
        check_key="cases.layers:check_key",
        check="checks.correctness:check_layers",
        programs="trace.layer:programs_of",
        refusal="cases.layers:refusal",
        step="local.step:layer_step",
        finish="sim.rows:unchanged",
        obtain="claims.query:obtain_layers",
        view="report.experiment_view:experiment_view",
    ),
    "kernel": Kind(
        cases="cases.kernels:cases",
        names="cases.kernels:names",
        check_key="cases.kernels:check_key",
        check="checks.kernels:check",
        programs="trace.kernel:programs_of",
        refusal="cases.kernels:refusal",
        step="local.kernel_step:kernel_step",
        finish="rows.kernels:finish",
        obtain="claims.kernel_query:obtain",
        view="report.kernel_view:experiment_view",
    ),
    "exchange": Kind(
        cases="cases.exchanges:cases",
        names="cases.exchanges:names",
        check_key="cases.exchanges:check_key",
        check="checks.exchanges:check",
        programs="trace.alone:programs_of",
        refusal="cases.exchanges:refusal",
        step="local.exchange_step:exchange_step",
        finish="rows.exchanges:finish",
        obtain="claims.exchange_query:obtain",
        view="report.exchange_view:experiment_view",
    ),
    "gate": Kind(
        cases="cases.gates:cases",
        names="cases.gates:names",
        check_key="cases.gates:check_key",
        check="checks.correctness:check_rules",
        counted="gates.engine:rows_of_rule",
        counting="gates.engine:expected",
        obtain="claims.gate_query:obtain",
        view="report.gate_view:experiment_view",
    ),
    "model": Kind(
        cases="cases.models:cases",
        names="cases.models:names",
        check_key="cases.models:check_key",
        check="checks.models:check",
        programs="trace.model:programs_of",
        refusal="cases.models:refusal",
        step="local.model_step:model_step",
        finish="rows.models:finish",
        obtain="claims.model_query:obtain",
        view="report.model_view:experiment_view",
        explain="explain.plan:lines",
        plans_by_machine=True,
        drawn=("exposed_communication",),
    ),
    "job": Kind(
        cases="cases.jobs:cases",
        names="cases.jobs:names",
        check_key="cases.jobs:check_key",
        check="checks.jobs:check",
        programs="trace.job:programs_of",
        refusal="cases.jobs:refusal",
        simulate="rows.jobs:simulated",
        apart="explain.job:apart",
        timeline="explain.job:timeline",
        together="cases.jobs:together",
        obtain="claims.job_query:obtain",
        view="report.job_view:experiment_view",
    ),
    "part": Kind(
        cases="cases.parts:cases",
        names="cases.parts:names",
        check_key="cases.parts:check_key",
        check="checks.parts:check",
        programs="trace.part:programs_of",
        refusal="cases.parts:refusal",
        step="local.part_step:part_step",
        counted="part_study:rows_of",
        counting="part_study:expected",
        finish="rows.parts:finish",
        obtain="claims.part_query:obtain",
        view="report.part_view:experiment_view",
    ),
    "planner": Kind(
        cases="planner.experiment:cases",
        names="planner.experiment:names",
        check_key="planner.experiment:check_key",
        check="planner.experiment:check",
        refusal="planner.experiment:refusal",
        simulate="planner.experiment:simulated",
        counting="planner.experiment:expected",
        obtain="planner.experiment:obtain",
        view="report.planner_view:experiment_view",
        plans_by_machine=True,
    ),
}


@cache
def of(kind: str, what: str) -> Callable[..., Any]:
    """The function of a kind: `of("kernel", "step")`."""
    module, function = getattr(KINDS[kind], what).split(":")
    return getattr(import_module(f"moebench.{module}"), function)
