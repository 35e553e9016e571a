"""Every kind of workload has everything that the harness asks of one."""

from dataclasses import fields

import pytest

from moebench import kinds
from moebench.results.rows import KIND_COLUMNS, SUBJECTS
from moebench.workloads.exchange import ExchangeWorkload
from moebench.workloads.gate import GateWorkload
from moebench.workloads.job import JobWorkload
from moebench.workloads.kernel import KernelWorkload
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.load_decoder import load_decoder
from moebench.workloads.model import ModelWorkload, shape_of
from moebench.workloads.part import workload_of
from moebench.workloads.planned import PlannerWorkload
from moebench.workloads.schema import KINDS as FILE_KINDS

WORKLOADS = {
    "layer": LayerWorkload(GateSpec("switch"), 1, 8, 8, 8, 2),
    "kernel": KernelWorkload("topk_gate", 8, experts=2, top_k=1),
    "exchange": ExchangeWorkload(1024),
    "gate": GateWorkload(GateSpec("switch"), 8, 2),
    "model": ModelWorkload("gpt2-s-moe", shape_of("gpt2-s-moe", GateSpec("switch"), 1, 2)),
    "job": JobWorkload("internal-352b", load_decoder("internal-352b"), 15, 720),
    "planner": PlannerWorkload("internal-352b", load_decoder("internal-352b"), 720, (1, 2)),
    "part": workload_of("dispatch", {"tokens": 8, "d_model": 4, "top_k": 1}),
}
OF_SOME = ("explain", "simulate", "counted", "counting", "apart", "timeline", "together")  # not every kind needs them


UNTIMED = ("gate",)
SEARCHING = ("planner",)  # among many programs, none of which is its own
COMPOSED = ("job", *SEARCHING)  # of programs that are not run together: by `simulate`, in place of these
FUNCTIONS = [field for field in fields(kinds.Kind) if field.type is str]


@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.parametrize("field", FUNCTIONS, ids=lambda field: field.name)
def test_every_name_of_the_table_is_a_function(kind, field):
    """A misspelt module or function would be found by the first user of that kind."""
    may_lack = kind in UNTIMED or field.name in OF_SOME
    may_lack = may_lack or (kind in SEARCHING and field.name == "programs")
    may_lack = may_lack or (kind in COMPOSED and field.name in ("step", "finish"))
    if may_lack and getattr(kinds.KINDS[kind], field.name) == "":
        assert field.default == ""
    else:
        assert callable(kinds.of(kind, field.name))


def test_files_runs_and_rows_know_the_same_kinds():
    """A suite file's kinds are those of the harness, and each has its columns and its time."""
    assert set(kinds.KINDS) == set(FILE_KINDS) == set(WORKLOADS)
    for kind, workload in WORKLOADS.items():
        assert workload.kind == kind
        assert workload.metric in SUBJECTS
        assert sum(set(columns) <= set(workload.columns) for columns in KIND_COLUMNS) == 1
