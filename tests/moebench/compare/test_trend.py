"""Histories: read fast and right, changes found where they are, named by their commits."""

import json

import numpy as np
import pytest

from moebench.compare.change_points import change_points
from moebench.compare.history import read_history
from moebench.compare.trend import trend
from moebench.workloads.errors import InputError
from tests.moebench.compare.support import case, exact_rows, noisy, pytest_file, sample_rows, write_run


def commit(number):
    """A commit's name that shows its number."""
    return f"{number:02d}" + "c" * 38


def exact_history(folder, values, metric="step_time"):
    """Simulated runs, one an hour, each of its own commit."""
    for number, value in enumerate(values):
        write_run(
            folder / f"r{number}", [exact_rows(case(), **{metric: value})],
            git={"commit": commit(number), "changed": False}, created=f"2026-11-01T{number:02}:00:00+00:00",
        )  # fmt: skip
    return folder


def pytest_history(folder, values, commits=None):
    """Files of pytest-benchmark, one an hour, with a little noise in each."""
    for number, value in enumerate(values):
        path = folder / f"{number:04}.json"
        name = commit(number if commits is None else commits)
        pytest_file(path, {"test_x": noisy(number, 1, value, 0.002)[0]}, commit=name)
        document = json.loads(path.read_text())
        document["datetime"] = f"2026-11-01T{number:02}:30:00"
        path.write_text(json.dumps(document))
    return folder


def test_an_exact_value_changes_where_it_changes(tmp_path):
    """Up at run 3, back at run 5: both with their commits; the newest change decides."""
    found = trend(read_history(exact_history(tmp_path, [1e-3, 1e-3, 1e-3, 2e-3, 2e-3, 1e-3])))
    assert [(c.verdict, c.commits, c.is_last) for c in found.changes] == [
        ("faster", "04cccccccccc..05cccccccccc", True),
        ("slower", "02cccccccccc..03cccccccccc", False),
    ]
    assert found.exit_status() == 0
    found = trend(read_history(tmp_path, last=5, since="2026-11-01T01:00:00"))
    assert len(found.history.runs) == 5
    assert trend(read_history(exact_history(tmp_path / "b", [1e-3, 2e-3]))).exit_status() == 1


def test_what_torch_explains_is_re_based(tmp_path):
    """A new version between two runs is no regression."""
    write_run(tmp_path / "a", [exact_rows(case())], created="2026-11-01T00:00:00+00:00")
    rows = [exact_rows(case(), step_time=0.005)]
    write_run(tmp_path / "b", rows, created="2026-11-02T00:00:00+00:00", packages={"torch": "2.14.0"})
    found = trend(read_history(tmp_path))
    assert [c.verdict for c in found.changes] == ["re-based"]
    assert found.exit_status(strict=True) == 0


def test_other_metrics_on_request(tmp_path):
    """Launches have their own history; what follows from a time has none."""
    exact_history(tmp_path, [40.0, 41.0], metric="launches")
    assert not trend(read_history(tmp_path)).changes
    (change,) = trend(read_history(tmp_path, ["launches"])).changes
    assert (change.before, change.after, change.change) == (40.0, 41.0, 0.025)
    with pytest.raises(InputError, match="follows from the times"):
        read_history(tmp_path, ["achieved_rate"])
    with pytest.raises(InputError, match="optimisation_time: more of it is neither better nor worse"):
        read_history(tmp_path, ["optimisation_time"])
    with pytest.raises(InputError, match="no finished run with values of nonsense"):
        read_history(tmp_path, ["nonsense"])


def test_a_measured_step_is_found_with_its_commits(tmp_path):
    """Ten per cent at run 12 of 20, with noise of one per cent from run to run, and one spike that is none."""
    levels = [1e-3] * 12 + [1.1e-3] * 8
    values = np.array(levels) * np.exp(np.random.default_rng(3).normal(0, 0.01, 20))
    values[5] *= 3
    found = trend(read_history(pytest_history(tmp_path, values)))
    (change,) = found.changes
    assert change.verdict == "slower"
    assert change.commits == "11cccccccccc..12cccccccccc"
    assert change.change == pytest.approx(0.1, abs=0.02)
    assert change.p_value < 0.002
    assert found.exit_status() == 1


def test_a_step_that_is_too_fresh_is_open(tmp_path):
    """Three runs after five: seen, and not yet sure."""
    found = trend(read_history(pytest_history(tmp_path, [1e-3] * 5 + [1.5e-3] * 3)))
    assert [c.verdict for c in found.changes] == ["inconclusive"]
    assert "too few runs" in found.changes[0].reason
    assert (found.exit_status(), found.exit_status(strict=True)) == (0, 3)


def test_a_step_within_one_commit_is_not_the_codes(tmp_path):
    """The same clean commit on both sides: something else changed."""
    found = trend(read_history(pytest_history(tmp_path, [1e-3] * 10 + [1.5e-3] * 10, commits=7)))
    assert [c.verdict for c in found.changes] == ["inconclusive"]
    assert "one commit" in found.changes[0].reason


def test_two_machines_are_two_series(tmp_path):
    """Runs here and there by turns are no changes."""
    for number in range(8):
        value = 1e-3 if number % 2 else 3e-3
        pytest_file(tmp_path / f"{number}.json", {"x": noisy(number, 1, value)[0]}, cpu=f"CPU {number % 2}")
    found = trend(read_history(tmp_path))
    assert not found.changes
    assert len(found.history.series) == 2


def test_the_fast_reader_reads_what_the_careful_one_does(tmp_path):
    """Summaries of measured cases, simulated times with draws; however the JSON is spaced; samples are passed over."""
    from dataclasses import replace

    measured = sample_rows(case("two", engine="local"), noisy(1))
    summary = replace(measured[0], sample=None, value=0.5, detail={"regime": "hot", "count": 42})
    rows = exact_rows(case())
    rows[0] = replace(rows[0], draws=(1e-3, float("nan"), 2e-3))
    path = write_run(tmp_path / "a", [rows, [*measured, summary]])
    for separators in ((", ", ": "), (",", ":")):
        text = (path / "results.jsonl").read_text().splitlines()
        lines = [json.dumps(json.loads(line), separators=separators, sort_keys=True) for line in text]
        (path / "results.jsonl").write_text("\n".join(lines) + "\n")
        found = {(s.key.case, s.key.part): [p.value for p in s.points] for s in read_history(tmp_path).series}
        assert found == {(case().name, ""): [0.002], (case("two", engine="local").name, "hot"): [0.5]}


def test_damaged_runs_are_left_out_with_their_reason(tmp_path):
    """A broken record, a broken row, a stranger's JSON, an unfinished run: the history goes on without them."""
    exact_history(tmp_path, [1e-3, 1e-3])
    write_run(tmp_path / "unfinished", [exact_rows(case())], finished=False)
    (write_run(tmp_path / "torn", [exact_rows(case())]) / "run.json").write_text("{")
    bad = write_run(tmp_path / "bad", [exact_rows(case())]) / "results.jsonl"
    bad.write_text(bad.read_text().replace('"value": 0.002', '"value": "soon"'))
    old = write_run(tmp_path / "old", [exact_rows(case())]) / "run.json"
    old.write_text(old.read_text().replace('"schema_version": 1', '"schema_version": 0'))
    odd = write_run(tmp_path / "odd", [exact_rows(case())]) / "run.json"
    odd.write_text('{"schema_version": 1, "finished": "x", "environment": 3}')
    (tmp_path / "stranger.json").write_text("[1, 2]")
    history = read_history(tmp_path)
    assert len(history.runs) == 2
    assert len(history.left_out) == 4
    assert any("value is 'soon'" in text for text in history.left_out)


def test_nothing_to_read_is_an_error(tmp_path):
    """No folder, an empty one, a date that is none."""
    with pytest.raises(InputError, match="no such folder"):
        read_history(tmp_path / "absent")
    with pytest.raises(InputError, match="no finished run"):
        read_history(tmp_path)
    with pytest.raises(InputError, match=r"--since yesterday: .* is not a date"):
        read_history(tmp_path, since="yesterday")


def test_change_points_of_noise_are_rare_and_of_steps_exact():
    """White noise with spikes has none in 97 of 100 series; a step of four deviations is found within one run."""
    random = np.random.default_rng(0)
    false = 0
    for _ in range(100):
        noise = random.normal(0, 0.01, 60)
        noise[random.integers(0, 60, 2)] += 0.3
        false += bool(change_points(noise))
        step = random.normal(0, 0.01, 60) + 0.04 * (np.arange(60) >= 37)
        assert any(abs(found - 37) <= 1 for found in change_points(step))
    assert false <= 3


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0, 3.0], [2.0] * 50])
def test_series_too_short_or_constant_have_no_changes(values):
    """Nothing raises, nothing is found."""
    assert change_points(np.array(values)) == []


def test_a_constant_that_jumps_is_found():
    """Without any noise there is nothing to divide by, and the jump is there all the same."""
    assert change_points(np.array([1.0] * 10 + [2.0] * 10)) == [10]
