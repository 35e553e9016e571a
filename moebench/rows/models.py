"""What follows from a model's step: what exchanges take beside experts, and what a system that plans had expected."""

from collections.abc import Sequence

from moebench.cases.case import Case
from moebench.program import Op
from moebench.results.rows import Row, row_of
from moebench.workloads.machine import Topology

LEFT_OUT = ("flops",)  # by region: a model has as many as operators


def finish(case: Case, topology: Topology, rows: Sequence[Row]) -> list[Row]:
    """The rows of a case: those of an engine, and where it was simulated those that follow.

    All on the nominal machine. `alltoall_time`: all exchanges of the step, each from its start to its end.
    `alltoall_over_expert_time`, `alltoall_share_of_step`: over the experts' computation, over the step.
    `kept_share`: of the routes that tokens ask for, where the system says so, on seeded logits. `lasting_memory`: of
    the peak, what lives from step to step: parameters, masters and moments. Of a system that plans:
    `predicted_step_time` and `prediction_error` of its own cost model, `optimisation_time`, and `best_partition_count`,
    the most parts of any range.
    """
    kept = [row for row in rows if row.metric not in LEFT_OUT or not row.detail]
    step = next((row for row in rows if row.metric == case.workload.metric and row.value), None)
    if case.engine != "sim" or step is None or step.value is None:
        return kept
    from moebench.trace.model import traced

    found = traced(case, topology)
    exchange_s, expert_s = _times(found.program.ops, topology, case)
    derived = [("alltoall_time", "s", exchange_s), ("alltoall_share_of_step", "1", exchange_s / step.value)]
    if found.kept_share is not None:
        derived.append(("kept_share", "1", found.kept_share))
    derived.append(("lasting_memory", "B", float(found.program.persistent_bytes)))
    if expert_s:
        derived.append(("alltoall_over_expert_time", "1", exchange_s / expert_s))
    if found.planned is not None:
        expected_s = found.planned.after.makespan_s
        derived += [
            ("predicted_step_time", "s", expected_s),
            ("prediction_error", "1", abs(expected_s - step.value) / step.value),
            ("optimisation_time", "s", found.planned.seconds),
            ("best_partition_count", "1", float(found.planned.most_parts)),
        ]
    return kept + [row_of(case, step.hardware, metric, unit, value) for metric, unit, value in derived]


def _times(ops: Sequence[Op], topology: Topology, case: Case) -> tuple[float, float]:
    """Seconds in all-to-alls, and in the experts' operators, on the nominal machine."""
    from moebench.sim.replay import replay
    from moebench.sim.uncertainty import nominal
    from moebench.trace.model import programs_of

    done = replay(programs_of(case, topology), topology, nominal(topology.parameters()))
    start_s, end_s = done.start_s[0], done.end_s[0]
    exchange_s = sum(
        float(end_s[op.index] - start_s[op.index])
        for op in ops
        if op.collective is not None and op.collective.algorithm == "all_to_all"
    )
    experts = [time_s for (region, _), time_s in done.compute_time_s.items() if region == "experts"]
    return exchange_s, float(sum(time_s[0] for time_s in experts))
