"""What a figure holds: obtained values of the suite's default machine, reported ones where their scope puts them."""

from dataclasses import replace

import pytest

from moebench.figures.gather import gather
from moebench.figures.obtained import _compared, obtained_points
from moebench.figures.points import NOT_PUBLISHED, OBTAINED, REPORTED, Grid
from moebench.results.rows import Row
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite, suite_names
from tests.moebench.figures.support import drawing_of, run_of, suite_of
from tests.moebench.suites import of_kind

SPEEDUP = {
    "value": "speedup",
    "baseline": "deepspeed",
    "series": "size",
    "panel": "gate",
    "only": {"system": ("hetumoe",)},
}


def points(drawing, source):
    return [p for p in drawing.points if p.source == source]


def test_speedups_are_those_of_the_rows(fake, tmp_path):
    """The fake engine's factors: 8 everywhere; none at batch size 64, where the baseline has no memory."""
    suite = suite_of(**SPEEDUP, reported=("hetu-h1",))
    drawing = drawing_of(suite, run_of(suite, tmp_path / "run"))
    obtained = points(drawing, OBTAINED)
    assert {p.at["gate"] for p in obtained} == {"switch"}  # --quick runs the swept gate
    assert len(obtained) == 16
    for p in obtained:
        if p.at["batch_size"] == "64":
            assert (p.value, p.note) == (None, "deepspeed out of memory")
        else:
            assert (p.value, p.low, p.high) == pytest.approx((8, 8, 8))
            assert p.origin.endswith("/hetumoe")
    assert drawing.engine == "sim"
    assert (drawing.count(OBTAINED), drawing.count(REPORTED)) == (12, 1)


def test_a_reported_number_stands_where_its_scope_says(fake, tmp_path):
    """H1 in the panel and at the batch size of its scope, of no size; every other place is not published."""
    drawing = drawing_of(suite_of(**SPEEDUP, reported=("hetu-h1",)))
    (mark,) = points(drawing, REPORTED)
    assert (mark.at, mark.value, mark.note) == ({"gate": "switch", "batch_size": "32"}, 8.1, "up to")
    assert (mark.origin, mark.evidence) == ("hetu-h1", "printed")
    crossed = points(drawing, NOT_PUBLISHED)
    assert len(crossed) == 3 * 4 * 4 - 4
    assert all(p.value is None for p in crossed)
    assert {"gate": "switch", "batch_size": "32", "size": "4x8"} not in [p.at for p in crossed]


def test_a_bound_over_all_cases_has_no_place(fake, tmp_path):
    """H2 is a line in every panel, and publishes no value of any place."""
    drawing = drawing_of(suite_of(**SPEEDUP | {"baseline": "best-other"}, reported=("hetu-h2",)))
    (line,) = points(drawing, REPORTED)
    assert (line.at, line.value, line.note) == ({}, 1.15, "at least")
    assert len(points(drawing, NOT_PUBLISHED)) == 3 * 4 * 4


def test_the_best_other_is_the_fastest_that_the_paper_compared_with(fake, tmp_path):
    """Of its rivals only one ran here; a rival of today that is faster does not count."""
    suite = suite_of(**SPEEDUP | {"baseline": "best-other", "only": {"system": ("hetumoe",), "gate": ("switch",)}})
    drawing = drawing_of(suite, run_of(suite, tmp_path / "run"))
    assert [p.value for p in points(drawing, OBTAINED) if p.value] == [pytest.approx(8)] * 12
    assert {p.note for p in points(drawing, OBTAINED)} == {"", "the others out of memory"}


def test_exchanges_and_kernels_have_places_of_their_own():
    """H3 and H4 each in the panel of their size; H5 in both panels of k; H6 at its kernel, in the panel of its op."""
    suite = load_suite("hetu")
    claims = {c: [] for c in ("hetu-h3", "hetu-h4", "hetu-h5", "hetu-h6")}
    for drawing in gather(suite):
        for p in points(drawing, REPORTED):
            claims.setdefault(p.origin, []).append(p.at)
    assert claims["hetu-h3"] == [{"size": "4x8", "system": "leader"}]
    assert claims["hetu-h4"] == [{"size": "8x8", "system": "leader"}]
    assert claims["hetu-h5"] == [{"top_k": "1", "system": "hetu"}, {"top_k": "2", "system": "hetu"}]
    assert claims["hetu-h6"] == [{"op": "layout", "system": "hetu"}]


def test_every_packaged_figure_has_its_numbers_or_a_reason():
    """All suites load and gather without a run; what has no reported number says so."""

    for name in suite_names():
        for drawing in gather(load_suite(name)):
            assert bool(drawing.points) != bool(drawing.reason)
            assert bool(drawing.points) == bool(drawing.figure.reported)
            shown = {p.origin for p in drawing.points if p.source == REPORTED}
            assert shown == set(drawing.figure.reported)


def test_kernels_are_drawn_by_shape(fake, tmp_path):
    """Two implementations against the baseline, at each number of tokens and choices."""
    suite = of_kind("hetu", "kernel")
    suite = replace(suite, samples=4, figures=tuple(f for f in suite.figures if f.name == "topk-kernel"))
    drawing = drawing_of(suite, run_of(suite, tmp_path / "run", experiments=("topk-kernel",)))
    obtained = points(drawing, OBTAINED)
    assert len(obtained) == 2 * 4 * 2
    assert [p.value for p in obtained] == [pytest.approx(1)] * 16  # one factor for all on the fake engine


def test_times_have_the_unit_and_the_interval_of_their_rows(fake, tmp_path):
    """Milliseconds of a layer's step; of a suite without a paper nothing is said to be unpublished."""
    suite = replace(suite_of(series="system", only={"gate": ("switch",), "size": ("4x8",)}), reported=None)
    folder = run_of(suite, tmp_path / "run")
    drawing = drawing_of(suite, folder)
    rows = {row.case: row for row in folder.rows("step_time")}
    known = [p for p in points(drawing, OBTAINED) if p.value is not None]
    assert len(known) == 3 * 4 - 1
    assert all(p.value == pytest.approx(rows[p.origin].value * 1e3) for p in known)
    assert not points(drawing, NOT_PUBLISHED)


def test_models_are_compared_with_the_fastest_variant():
    """A reduction of exposed time is over that variant whose step is the shortest, cluster by cluster, in per cent."""
    suite = load_suite("lancet")
    (figure,) = (f for f in suite.figures if f.name == "fig-13-tutel")
    experiment = next(e for e in suite.experiments if e.name == figure.experiment)
    grid = Grid.of(figure, experiment)
    steps = {"lancet": 1.0, "tutel+degree=1": 3.0, "tutel+degree=2": 2.0, "tutel+degree=4": 4.0}
    exposed = {"lancet": 0.25, "tutel+degree=1": 0.1, "tutel+degree=2": 1.0, "tutel+degree=4": 0.2}
    rows = {
        metric: [
            model_row(system, value, metric, node_type)
            for node_type in ("p4de", "p3dn")
            for system, value in found.items()
        ]
        for metric, found in (("step_time", steps), ("exposed_communication", exposed))
    }
    points_, engine, machine = obtained_points(grid, suite, experiment, rows)
    assert (engine, machine) == ("sim", "p4de and p3dn")
    assert [p.at["cluster"] for p in points_] == ["a100", "v100"]
    assert [p.value for p in points_] == [pytest.approx(75.0)] * 2


@pytest.mark.parametrize(
    ("ours", "theirs", "value", "note"),
    [(0.0, 2.0, 100.0, ""), (2.0, 0.0, None, "not comparable"), (0.0, 0.0, None, "not comparable")],
)
def test_nothing_exposed_is_all_saved(ours, theirs, value, note):
    """Less than something; of nothing no share can be saved."""
    suite = load_suite("lancet")
    (figure,) = (f for f in suite.figures if f.name == "fig-13-tutel")
    grid = Grid.of(figure, next(e for e in suite.experiments if e.name == figure.experiment))
    own, other = (model_row(s, v, "exposed_communication", "p4de") for s, v in (("lancet", ours), ("tutel", theirs)))
    found = _compared(grid, own, [other], {}, "tutel")
    assert (found.value, found.note) == (value, note)
    drawn = replace(own, draws=(1.0, 0.0, 0.0, 0.0)), replace(other, draws=(2.0,) * 4)
    several = _compared(grid, drawn[0], [drawn[1]], {}, "tutel")
    assert (several.value, several.low, several.high) == (50.0, 100.0, 100.0)


def model_row(system, value, metric, node_type):
    """A summary of a model of the suite's decomposition, gate switch."""
    size = "4x8"
    return Row(
        case=f"decomposition/{system}/{node_type}", case_hash="x", suite="lancet", experiment="decomposition",
        system=system, topology=f"{size}-{node_type}", size=size, hardware="x", dtype="tf32", conventions="common",
        implementation="torch", is_default=True, engine="sim", metric=metric, unit="s", value=value, gate="switch",
        batch_size=48, model="gpt2-s-moe",
    )  # fmt: skip


def test_a_run_without_the_figures_cases_is_a_reason(fake, tmp_path):
    """Nothing is invented for another size, and nothing for conventions other than the common ones."""
    suite = suite_of(only={"gate": ("gshard",), "size": ("4x8",), "system": ("hetumoe",)})
    drawing = drawing_of(suite, run_of(suite, tmp_path / "run", gates=("switch",)))
    assert drawing.points == ()
    assert drawing.reason == "nothing reported has a place in it, and the run has no case of it"


def test_cases_without_a_number_are_a_reason(fake, tmp_path):
    """Which they are, and why."""
    only = {"gate": ("switch",), "size": ("4x8",), "system": ("deepspeed",), "batch_size": ("64",)}
    suite = suite_of(only=only)
    drawing = drawing_of(suite, run_of(suite, tmp_path / "run", gates=("switch",), batch_sizes=(64,)))
    assert drawing.points == ()
    assert drawing.reason.endswith("no case of it has a number to judge by (out of memory)")


def test_measured_ratios_lie_between_the_ends_of_both_intervals():
    """Without draws an interval is what both medians' intervals leave possible."""
    def row(system, value, low, high):
        rest = dict.fromkeys(("case", "case_hash", "suite", "experiment", "topology", "size", "hardware", "dtype"), "x")
        rest |= {"conventions": "common", "implementation": "torch", "is_default": True, "engine": "local"}
        return Row(**rest, system=system, metric="step_time", unit="s", value=value, low=low, high=high)

    suite = suite_of(**SPEEDUP)
    grid = Grid.of(suite.figures[0], suite.experiments[0])
    found = _compared(grid, row("a", 2.0, 1.9, 2.5), [row("b", 6.0, 5.0, 6.6)], {}, "b")
    assert (found.value, found.low, found.high) == (3.0, 5.0 / 2.5, 6.6 / 1.9)
    nothing = _compared(grid, row("a", 0.0, 0.0, 0.0), [row("b", 6.0, 5.0, 6.6)], {}, "b")
    assert (nothing.value, nothing.note) == (None, "not comparable")
    three, one = (replace(row(name, 2.0, 1.0, 3.0), draws=draws) for name, draws in (("a", (2.0,) * 3), ("b", (1.0,))))
    assert _compared(grid, three, [one], {}, "b").note == "not comparable"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("hetu-h11", "unknown reported number 'hetu-h11'"),
        ("hetu-c1", "hetu-c1 is a finding in words"),
        ("hetu-h7", "hetu-h7 is a number in"),
    ],
)
def test_a_number_that_has_no_place_is_refused(name, told):
    """The text names the figure and the number."""
    with pytest.raises(InputError, match="figure one") as refused:
        drawing_of(suite_of(**SPEEDUP, reported=(name,)))
    assert told in str(refused.value)
