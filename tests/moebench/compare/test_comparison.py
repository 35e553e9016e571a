"""Exact values, statuses, and everything that stands between two runs and a verdict."""

from dataclasses import replace

import pytest

from moebench.cases.plan import Filters
from moebench.compare.comparison import compare
from moebench.compare.read import read_side
from moebench.results.rows import row_of
from moebench.workloads.errors import InputError
from tests.moebench.compare.support import (
    case,
    change_record,
    exact_rows,
    noisy,
    sample_rows,
    write_run,
)


@pytest.fixture
def run(tmp_path):
    """`run("a", rows, ...)` -> that run as a side."""

    def write(name, *groups, **options):
        return read_side(write_run(tmp_path / name, groups, **options))

    return write


def verdicts(comparison):
    """Verdict by metric of the findings that count, one case."""
    return {finding.key.metric: finding.verdict for finding in comparison.findings if finding.gates}


def test_equal_runs_are_the_same(run):
    """Every exact value of a run beside itself, exit status 0."""
    side = run("a", exact_rows(case()))
    found = compare(side, side)
    assert set(verdicts(found).values()) == {"same"}
    assert found.exit_status() == found.exit_status(strict=True) == 0


def test_one_launch_more_is_slower_and_one_less_faster(run):
    """Exact values have no noise: the smallest difference counts."""
    base = run("a", exact_rows(case()))
    more, less = run("b", exact_rows(case(), launches=41.0)), run("c", exact_rows(case(), launches=39.0))
    assert verdicts(compare(base, more)) | {"launches": None} == verdicts(compare(base, base)) | {"launches": None}
    assert verdicts(compare(base, more))["launches"] == "slower"
    assert compare(base, more).exit_status() == 1
    assert verdicts(compare(base, less))["launches"] == "faster"
    assert compare(base, less).exit_status(strict=True) == 0


def test_what_rises_where_a_step_gets_shorter_makes_nothing_slower(run):
    """Throughput and the like follow from the time, parts of a job are shown, and of kept routes more is better."""
    def rows(step_s, kept):
        units = {"throughput": "1/s", "mfu": "1", "algorithmic_bandwidth": "B/s", "optimisation_time": "s"}
        more = {name: (unit, 1e-6 / step_s) for name, unit in {**units, "exposed_comm": "s"}.items()}
        more["kept_share"] = "1", kept
        own = [row_of(case(), "titan-rtx", metric, unit, value) for metric, (unit, value) in more.items()]
        return [*exact_rows(case(), step_time=step_s), *own]

    base, head = run("a", rows(0.002, 0.9)), run("b", rows(0.001, 0.95))
    found = compare(base, head)
    assert {metric for metric, verdict in verdicts(found).items() if verdict == "faster"} == {"step_time", "kept_share"}
    assert found.exit_status() == 0
    assert {f.key.metric: f.verdict for f in found.findings if not f.gates} == {"exposed_comm": "slower"}
    assert verdicts(compare(head, base))["kept_share"] == "slower"


def test_values_of_one_metric_stay_apart(run):
    """Bytes of each kind of transfer, of a tier by each count, of each set of ranks: the first is not lost."""
    def rows(first):
        each = [("transfer_bytes", {"transfer": kind}) for kind in ("to-device", "to-host")]
        each += [("tier_memory", {"tier": "host", "by": by}) for by in ("storage", "paper")]
        each += [("rank_time", {"ranks": ranks, "waits": first}) for ranks in ([0, 1], [2])]
        return [*exact_rows(case()), *(
            row_of(case(), "titan-rtx", metric, "B", 1.0 if number % 2 else first, detail=detail)
            for number, (metric, detail) in enumerate(each)
        )]  # fmt: skip

    found = compare(run("a", rows(1.0)), run("b", rows(2.0)))
    assert [f.key.part for f in found.findings if f.verdict == "slower"] == [
        "transfer=to-device", "tier=host, by=storage", "ranks=[0, 1]"
    ]  # fmt: skip


def test_rounding_of_a_simulated_time_is_no_change(run):
    """Sums of floats in another order."""
    base, head = run("a", exact_rows(case())), run("b", exact_rows(case(), step_time=0.002 * (1 + 1e-12)))
    assert verdicts(compare(base, head))["step_time"] == "same"


def test_from_nothing_to_something_is_slower(run):
    """A count that was zero has no ratio, and is a change all the same."""
    base, head = run("a", exact_rows(case(), launches=0.0)), run("b", exact_rows(case(), launches=1.0))
    (finding,) = [f for f in compare(base, head).findings if f.key.metric == "launches"]
    assert finding.verdict == "slower"
    assert finding.change == float("inf")


@pytest.mark.parametrize(
    ("changes", "rebased", "reason"),
    [
        ({"packages": {"torch": "2.12.0"}}, {"step_time", "launches", "device_bytes", "flops"}, "torch"),
        ({"cost_model": 99}, {"step_time"}, "cost model"),
        ({"packages": {"torch": "2.13.0+cu130"}}, set(), ""),  # another build traces the same operators
    ],
)
def test_what_another_key_explains_is_re_based(run, changes, rebased, reason):
    """Torch explains counts and times, the cost model times only; neither is ever called slower."""
    worse = {"step_time": 0.003, "launches": 50.0, "device_bytes": 3e6, "flops": 4e6}
    same = {"packages": {"torch": "2.13.0+cpu"}}
    base, head = run("a", exact_rows(case()), **same), run("b", exact_rows(case(), **worse), **(same | changes))
    found = compare(base, head)
    assert {f.key.metric for f in found.findings if f.verdict == "re-based"} == rebased
    assert all(reason in f.reason for f in found.findings if f.verdict == "re-based")
    assert {m for m, v in verdicts(found).items() if v == "slower"} == set(worse) - rebased
    assert found.exit_status() == (0 if len(rebased) == 4 else 1)
    assert found.exit_status(strict=True) == (3 if len(rebased) == 4 else 1)


def test_another_described_machine_re_bases_times_and_not_counts(run, tmp_path):
    """The digest of the topology is the key of everything that the cost model makes."""
    base = run("a", exact_rows(case()))
    path = write_run(tmp_path / "b", [exact_rows(case(), step_time=0.003, launches=41.0)])
    change_record(path, lambda record: record["topologies"]["1x2-titan-rtx"].update(digest="0" * 64))
    found = verdicts(compare(base, read_side(path)))
    assert found["step_time"] == "re-based"
    assert found["launches"] == "slower"


def test_another_workload_under_the_same_name_is_re_based(run):
    """The content hash tells cases apart that share a name."""
    changed = case(d_model=16)
    assert changed.name == case().name
    found = compare(run("a", exact_rows(case())), run("b", exact_rows(changed, flops=9e6)))
    assert verdicts(found)["flops"] == "re-based"
    assert verdicts(found)["launches"] == "same"  # equal all the same


def test_samples_of_a_what_if_are_re_based_with_what_was_set(run):
    """Nothing of them is judged; of another case without --set the reason is the case."""
    base, other = (sample_rows(case(engine="local", d_model=width), noisy(1)) for width in (8, 16))
    what_if = Filters(overrides={"host.issue": "9us"})
    for filters, why in ((what_if, "--set nothing became host.issue=9us"), (None, "the case itself changed")):
        folder = "b" if filters else "c"
        found = compare(run(f"a{folder}", base), run(folder, other, filters=filters)).findings
        assert [(f.verdict, f.reason, f.head) for f in found] == [("re-based", why, None)]


def test_a_case_that_lost_its_numbers_is_broken(run):
    """Passed before, out of memory now: exit 1; the other way round it is fixed."""
    good = exact_rows(case())
    bad = [replace(good[0], value=None, status="out-of-memory", reason="needs 30 GiB"), *good[1:]]
    base, head = run("a", good), run("b", bad)
    found = compare(base, head)
    assert verdicts(found) == {"status": "broken"}
    assert found.findings[0].reason == "out-of-memory: needs 30 GiB"
    assert found.exit_status() == 1
    assert verdicts(compare(head, base)) == {"status": "fixed"}
    assert compare(head, base).exit_status(strict=True) == 0
    other = compare(run("c", bad, packages={"torch": "2.12.0"}), run("d", good, packages={"torch": "2.13.0"}))
    assert verdicts(other) == {"status": "re-based"}  # who knows what fixed it


def test_cases_of_one_side_only(run):
    """Gone from the suite: missing, undecided under --strict. Left out by a filter: nothing. New: shown only."""
    base = run("a", exact_rows(case("one")), exact_rows(case("two")))
    head = run("b", exact_rows(case("one")))
    missing = compare(base, head)
    assert [f.key.case for f in missing.findings if f.verdict == "missing"] == [case("two").name]
    assert (missing.exit_status(), missing.exit_status(strict=True)) == (0, 3)
    narrow = run("c", exact_rows(case("one")), filters=Filters(systems=("one",)))
    assert compare(base, narrow).exit_status(strict=True) == 0
    new = compare(head, base)
    assert [f.verdict for f in new.findings if not f.gates] == ["new"]
    assert new.exit_status(strict=True) == 0


def test_an_unfinished_run_is_compared_as_far_as_it_goes(run):
    """What is there counts, the rest is missing, and a note says so."""
    base = run("a", exact_rows(case("one")), exact_rows(case("two")))
    head = run("b", exact_rows(case("one"), launches=41.0), finished=False)
    found = compare(base, head)
    assert found.exit_status() == 1
    assert any("head is not finished" in note for note in found.notes)
    assert "not finished" in next(f.reason for f in found.findings if f.verdict == "missing")


def test_nothing_to_compare_is_an_error(run):
    """Other suites, empty runs, no case in common; the text names both sides."""
    base = run("a", exact_rows(case()))
    with pytest.raises(InputError, match=r"suite smoke, .* of suite other"):
        compare(base, run("b", exact_rows(case()), suite="other"))
    with pytest.raises(InputError, match="holds no whole case"):
        compare(base, run("c", finished=False))
    with pytest.raises(InputError, match="no case in common"):
        compare(base, run("d", exact_rows(case("two"))))


def test_other_machines_are_refused_for_samples_and_no_matter_for_exact_values(run):
    """Simulated numbers are the same everywhere; measured ones need --across-machines, and say so."""
    exact, timed = exact_rows(case()), sample_rows(case(engine="local"), noisy(1))
    found = compare(run("a", exact), run("b", exact, cpu="Another CPU"))
    assert found.exit_status(strict=True) == 0
    base, head = run("c", timed), run("d", timed, cpu="Another CPU")
    with pytest.raises(InputError, match=r"different machines: .*Test CPU.*Another CPU.*--across-machines"):
        compare(base, head)
    found = compare(base, head, across_machines=True)
    assert found.across_machines
    assert found.notes[0].startswith("ACROSS MACHINES: base on Test CPU, 2 cores")


def test_other_versions_are_noted_beside_measured_times(run):
    """A new torch may be why a measured time moved."""
    timed = sample_rows(case(engine="local"), noisy(1))
    base, head = run("a", timed), run("b", timed, packages={"torch": "2.14.0"})
    assert any(note.endswith("2.14.0 for head") for note in compare(base, head).notes)


def test_a_time_without_repetitions_is_not_compared(run):
    """Region times of a measured case are one try each; counts beside them are exact."""
    measured = case(engine="local")
    time, *counts = exact_rows(measured)
    region = replace(time, detail={"region": "gate", "phase": "forward"}, metric="region_time")
    side = run("a", [*sample_rows(measured, noisy(1)), region, *counts])
    assert {key.metric for key in side.exact} == {"launches", "device_bytes", "flops"}
    assert {key.part for key in side.samples} == {"hot"}


def test_a_cpu_bound_case_judges_nothing(run):
    """Its samples are there, and its summary says that they mean nothing."""
    clustered = case(engine="cluster")
    rows = sample_rows(clustered, noisy(1), regime="hot")
    summary = replace(rows[0], sample=None, detail={"mark": "cpu-bound", "regime": "hot"})
    base, head = run("a", [*rows, summary]), run("b", sample_rows(clustered, noisy(2, median_s=0.1)))
    (finding,) = compare(base, head).findings
    assert finding.verdict == "inconclusive"
    assert "cpu-bound" in finding.reason
