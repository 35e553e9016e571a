"""What the ranks measure, on real ranks over loopback."""

from dataclasses import replace

import pytest

from moebench.cluster.worker import FEWEST_STEPS, MOST_STEPS, TARGET, Request, plan_samples
from moebench.ranks.run import RanksError, run_ranks
from tests.moebench.cluster import engine_functions
from tests.moebench.cluster.engine_functions import some_cases


def test_samples_fit_their_budget():
    """Short steps are repeated, long ones are not, and blocks become fewer where time is short."""
    steps, blocks = plan_samples([1e-4, 0.01, 5.0], 7, 1e9)
    assert steps == [MOST_STEPS, 10, FEWEST_STEPS]
    assert blocks == 7
    assert plan_samples([1e-4, 0.01, 5.0], 7, 1e9, [1, 4, 4])[0] == [MOST_STEPS, 12, 4]  # all turns, equally often
    assert plan_samples([1.0], 7, 17.0) == ([FEWEST_STEPS], 2)
    assert plan_samples([1.0], 7, 0.0) == ([FEWEST_STEPS], 1)


def test_ranks_measure_the_same_samples():
    """Both systems twice a block at mirrored places, on one clock, and the program each rank really ran."""
    cases = some_cases(2)[:2]
    reports = run_ranks(engine_functions.BRIEFLY, 2, (Request(tuple(cases), 0, 1, 60.0, True),), timeout_s=120)
    assert len({report.host.clock for report in reports}) == 1
    orders = [[(s.case, s.block, s.place, s.steps) for s in report.samples] for report in reports]
    assert orders[0] == orders[1]
    places = [case for case, *_ in orders[0]]
    assert sorted(places) == [0, 0, 1, 1]
    assert places == places[::-1]
    for ours, theirs in zip(*(report.samples for report in reports)):
        assert ours.start_s < theirs.end_s
        assert theirs.start_s < ours.end_s
        assert ours.cpu_s > 0
    for case in range(2):
        ours, theirs = (report.details[case] for report in reports)
        assert (ours.program.rank, theirs.program.rank) == (0, 1)
        assert [op.name for op in ours.program.ops] == [op.name for op in theirs.program.ops]
        assert len(ours.seconds) == len(ours.program.ops)
        assert any(op.collective for op in ours.program.ops)


def test_three_ranks_with_uneven_batches():
    """Ranks may hold different numbers of tokens where their buffers are equal; all end, each with its own program."""
    [case] = some_cases(2, systems=("reference",))
    case = replace(case, workload=replace(case.workload, sequence=1, experts=6))
    target = f"{engine_functions.__name__}:measure_uneven"
    reports = run_ranks(target, 3, (case, (31, 36, 33)), timeout_s=120)
    flops = [sum(op.flops for op in report.details[0].program.ops) for report in reports]
    assert len(set(flops)) == 3
    sent = [[op.collective for op in report.details[0].program.ops if op.collective] for report in reports]
    assert len({len(collectives) for collectives in sent}) == 1
    assert {c.bytes_per_peer for ours in sent for c in ours if c.algorithm == "all_to_all"} == {6 * 2 * 64 * 4}


def test_a_failing_case_is_named_by_the_rank_that_fails():
    """The status and the case stand in the traceback's last line."""
    case = some_cases(2, systems=("reference",))[0]
    narrow = replace(case, workload=replace(case.workload, d_model=2))
    with pytest.raises(RanksError, match=r"rank \d raised:") as caught:
        run_ranks(TARGET, 2, (Request((narrow,), 0, 1, 60.0, False),), timeout_s=120)
    assert f"CaseFailed: failed: {narrow.name}: InputError: d_model" in str(caught.value)
