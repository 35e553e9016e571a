"""Baselines: accepted explicitly, pooled while they agree, kept by machine, readable in git."""

import json

import pytest

from moebench.cases.plan import Filters
from moebench.compare.accept import MOST_RUNS, accept
from moebench.compare.baseline import read_baseline
from moebench.compare.check import check
from moebench.compare.read import read_side
from moebench.compare.rules import Rules
from moebench.workloads.errors import InputError
from tests.moebench.compare.support import case, exact_rows, noisy, pytest_file, sample_rows, write_run

LOCAL = case(engine="local")


@pytest.fixture
def rules(tmp_path):
    """Baselines in a folder of the test."""
    return Rules(baselines=tmp_path / "baselines")


def timed(path, seed, median_s=0.002, launches=40.0, **options):
    """A measured run: samples of two processes and exact counts."""
    rows = sample_rows(LOCAL, noisy(seed, 2, median_s, 0.002)) + exact_rows(LOCAL, launches=launches)[1:]
    return read_side(write_run(path, [rows], created=f"2026-11-30T00:00:{seed:02}+00:00", **options))


def test_a_run_is_the_same_as_the_baseline_it_became(rules, tmp_path):
    """Exact values and samples come back as they were accepted; samples have six digits."""
    run = timed(tmp_path / "a", 1)
    accepted = accept(run, rules, "main")
    assert (accepted.comparison, accepted.runs) == (None, 1)
    base = read_baseline(rules.baselines, "main", run.machine)
    assert base.cases == run.cases
    assert base.exact == run.exact
    for key, samples in run.samples.items():
        for ours, theirs in zip(base.samples[key].processes, samples.processes, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    found = check(run, rules, "main")
    assert {f.verdict for f in found.findings} == {"same"}
    assert found.exit_status(strict=True) == 0


def test_the_files_make_small_differences_in_git(rules, tmp_path):
    """Sorted keys, a line a value: one launch more changes one line, besides when and of what it is."""
    accept(timed(tmp_path / "a", 1), rules, "main")
    file = rules.baselines / "main" / "exact.json"
    before = file.read_text().splitlines()
    accept(timed(tmp_path / "b", 2, launches=41.0), rules, "main")
    after = file.read_text().splitlines()
    changed = [line.strip() for line in after if line not in before]
    assert changed == ['"launches": [41.0, "1"]', '"created": "2026-11-30T00:00:02+00:00",'] or changed == [
        '"launches": [41.0, "1"],', '"created": "2026-11-30T00:00:02+00:00",'
    ]  # fmt: skip
    for path in file.parent.iterdir():
        document = json.loads(path.read_text())
        assert path.read_text().endswith("}\n")
        assert list(document) == sorted(document)
        assert max(len(line) for line in path.read_text().splitlines()) < 300


def test_samples_are_pooled_up_to_some_runs(rules, tmp_path):
    """Runs that say the same add up; the oldest goes when there are enough; the same run counts once."""
    for seed in range(MOST_RUNS + 2):
        accepted = accept(timed(tmp_path / str(seed), seed), rules, "main")
    assert accepted.runs == MOST_RUNS
    again = accept(read_side(tmp_path / "6"), rules, "main")
    assert again.runs == MOST_RUNS
    run = read_side(tmp_path / "6")
    (samples,) = read_baseline(rules.baselines, "main", run.machine).samples.values()
    assert samples.runs == tuple(n for n in range(MOST_RUNS) for _ in range(2))


def test_an_accepted_slowdown_starts_anew(rules, tmp_path):
    """The old level goes: a baseline of two levels would find everything inconclusive."""
    for seed in range(3):
        accept(timed(tmp_path / str(seed), seed), rules, "main")
    slow = timed(tmp_path / "slow", 9, median_s=0.003)
    assert check(slow, rules, "main").exit_status() == 1
    accepted = accept(slow, rules, "main")
    assert [key.metric for key in accepted.replaced] == ["step_time"]
    assert accepted.runs == 1
    assert check(timed(tmp_path / "next", 10, median_s=0.003), rules, "main").exit_status() == 0


def test_another_machine_has_its_own_samples(rules, tmp_path):
    """Exact values gate everywhere; samples only where the baseline has some of that machine, or when told to."""
    accept(timed(tmp_path / "a", 1), rules, "main")
    elsewhere = timed(tmp_path / "b", 2, median_s=0.02, launches=41.0, cpu="Another CPU")
    found = check(elsewhere, rules, "main")
    verdicts = {f.key.metric: f.verdict for f in found.findings}
    assert verdicts["launches"] == "slower"
    assert verdicts["step_time"] == "inconclusive"
    assert any("no samples of this machine (Another CPU" in n and "it has some of: Test CPU" in n for n in found.notes)
    across = check(elsewhere, rules, "main", across_machines=True)
    assert across.notes[0].startswith("ACROSS MACHINES")
    assert {f.key.metric: f.verdict for f in across.findings}["step_time"] == "slower"
    assert accept(elsewhere, rules, "main").runs == 1
    assert len(list((rules.baselines / "main").glob("samples-*.json"))) == 2


def test_a_filtered_run_replaces_its_own_cases_only(rules, tmp_path):
    """What the user left out stays; what the suite no longer has goes."""
    both = [exact_rows(case("one")), exact_rows(case("two"))]
    accept(read_side(write_run(tmp_path / "a", both)), rules, "main")
    one = [exact_rows(case("one"), launches=50.0)]
    accept(read_side(write_run(tmp_path / "b", one, filters=Filters(systems=("one",)))), rules, "main")
    base = read_baseline(rules.baselines, "main", None)
    assert {key.case: value.value for key, value in base.exact.items() if key.metric == "launches"} == {
        case("one").name: 50.0, case("two").name: 40.0,
    }  # fmt: skip
    accept(read_side(write_run(tmp_path / "c", one)), rules, "main")
    assert {case_ for case_, _ in read_baseline(rules.baselines, "main", None).cases} == {case("one").name}


def test_what_must_not_become_a_baseline(rules, tmp_path):
    """Unfinished runs, wrong or failed cases, samples that are no times, a run of another suite; nothing is written."""
    unfinished = read_side(write_run(tmp_path / "a", [exact_rows(case())], finished=False))
    with pytest.raises(InputError, match="not finished"):
        accept(unfinished, rules, "main")
    (row, *_) = exact_rows(case())
    wrong = type(row)(**vars(row) | {"status": "wrong", "value": None, "reason": "differs"})
    with pytest.raises(InputError, match=r"1 wrong cases, such as .* \(differs\)"):
        accept(read_side(write_run(tmp_path / "b", [[wrong]])), rules, "main")
    with pytest.raises(InputError, match="not a finite number"):
        accept(read_side(pytest_file(tmp_path / "c.json", {"x": [float("nan"), 1.0]})), rules, "main")
    assert not rules.baselines.exists()
    accept(read_side(write_run(tmp_path / "d", [exact_rows(case())])), rules, "main")
    with pytest.raises(InputError, match="of suite other"):
        accept(read_side(write_run(tmp_path / "e", [exact_rows(case())], suite="other")), rules, "main")


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "a\n", "a\0", "\u202ea", "x" * 101])
def test_a_name_is_no_path(rules, tmp_path, name):
    """Nothing outside of the baselines' folder is read or written."""
    run = read_side(write_run(tmp_path / "a", [exact_rows(case())]))
    for act in (accept, check):
        with pytest.raises(InputError, match="a name is one word"):
            act(run, rules, name)


def test_an_unknown_baseline_lists_those_there_are(rules, tmp_path):
    """With a hint at the nearest."""
    run = read_side(write_run(tmp_path / "a", [exact_rows(case())]))
    accept(run, rules, "main")
    with pytest.raises(InputError, match=r"unknown baseline 'mian' .did you mean main"):
        check(run, rules, "mian")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"schema_version": 1', '"schema_version": 2', "schema_version 2 is unknown"),
        ('"suite": "smoke"', '"suite": 3', "suite is missing"),
        ("[40.0, ", '["many", ', "launches is"),
        ("[40.0, ", "[1e999, ", "launches is"),
        ('"of": {', '"ofs": {', "'of'"),
        ('"hash":', '"hush":', "hush"),
        ("{", "[", "not a JSON document"),
    ],
)
def test_a_baseline_edited_by_hand_is_refused(rules, tmp_path, old, new, words):
    """One error that names the file."""
    run = read_side(write_run(tmp_path / "a", [exact_rows(case())]))
    accept(run, rules, "main")
    file = rules.baselines / "main" / "exact.json"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=words) as error:
        check(run, rules, "main")
    assert "exact.json" in str(error.value)


def test_pytest_benchmark_files_make_a_baseline_too(rules, tmp_path):
    """The same verbs for somebody who times with that plugin."""
    for process in (0, 1):
        pytest_file(tmp_path / "a" / f"{process}.json", {"test_x": noisy(process, 1, noise=0.002)[0]})
    run = read_side(tmp_path / "a")
    accept(run, rules, "main")
    (finding,) = check(run, rules, "main").findings
    assert finding.verdict == "same"
    assert finding.change == pytest.approx(0, abs=1e-5)
