"""What is read: run folders, files of pytest-benchmark, and everything that only looks like one."""

import json
import math

import numpy as np
import pytest

from moebench.compare.comparison import compare
from moebench.compare.read import read_side
from moebench.workloads.errors import InputError
from tests.moebench.compare.support import case, exact_rows, noisy, pytest_file, sample_rows, write_run


def test_samples_keep_their_processes_and_regimes(tmp_path):
    """Two processes, hot and cold apart, in the order of their numbers."""
    of = case(engine="local")
    hot, cold = noisy(1, 2), noisy(2, 2, 0.004)
    rows = [*sample_rows(of, hot), *sample_rows(of, cold, regime="cold", sm_clock_mhz=1980)]
    side = read_side(write_run(tmp_path / "a", [rows]))
    by_part = {key.part: samples for key, samples in side.samples.items()}
    assert set(by_part) == {"hot", "cold"}
    assert [list(group) for group in by_part["hot"].processes] == [list(group) for group in hot]
    assert by_part["hot"].clock_mhz is None
    assert by_part["cold"].clock_mhz == 1980
    assert side.machine.facts["cpu"] == "Test CPU"


def test_a_simulated_run_has_no_machine(tmp_path):
    """Nothing was timed, so nothing depends on where."""
    assert read_side(write_run(tmp_path / "a", [exact_rows(case())])).machine is None


def test_pytest_benchmark_a_file_is_a_process(tmp_path):
    """A folder of files is a run of several processes; a single file confirms nothing by itself."""
    for number in range(3):
        data = noisy(number, 1, noise=0.002)[0]
        pytest_file(tmp_path / "a" / f"{number}.json", {"test_x": data, "test_y": data})
        slow = noisy(10 + number, 1, 0.0025, noise=0.002)[0]
        pytest_file(tmp_path / "b" / "Linux" / f"{number}.json", {"test_x": slow, "test_y": data})
    base, head = read_side(tmp_path / "a"), read_side(tmp_path / "b")
    assert (base.suite, base.commit, base.machine.facts["cores"]) == ("pytest-benchmark", "b" * 40, "2")
    found = {f.key.case: f.verdict for f in compare(base, head).findings}
    assert found == {"test_x": "slower", "test_y": "same"}
    single = compare(read_side(tmp_path / "a" / "0.json"), read_side(tmp_path / "b" / "Linux" / "0.json"))
    assert {f.verdict for f in single.findings} == {"inconclusive", "same"}


def test_pytest_benchmark_without_data_and_with_numbers_that_are_none(tmp_path):
    """No samples kept, NaN, infinite, an integer of 400 digits: inconclusive, with the reason."""
    data = [0.001] * 10
    base = pytest_file(tmp_path / "a.json", dict.fromkeys(["none", "nan", "inf", "huge"], data))
    changed = {"none": [], "nan": [math.nan, 0.001], "inf": [math.inf, 0.001], "huge": [10**400, 1]}
    head = pytest_file(tmp_path / "b.json", changed)
    found = {f.key.case: f for f in compare(read_side(base), read_side(head)).findings}
    assert {f.verdict for f in found.values()} == {"inconclusive"}
    assert "--benchmark-save-data" in found["none"].reason
    assert all("not a finite number" in found[name].reason for name in ("nan", "inf", "huge"))


def test_files_of_several_machines_are_no_run(tmp_path):
    """One run is one machine's."""
    pytest_file(tmp_path / "a" / "1.json", {"x": [1.0]})
    pytest_file(tmp_path / "a" / "2.json", {"x": [1.0]}, cpu="Other")
    with pytest.raises(InputError, match="different machines"):
        read_side(tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a JSON document"),
        ("[1, 2]", "is not a file of pytest-benchmark"),
        ("[" * 100_000, "not a JSON document"),
        ('{"machine_info": 1, "benchmarks": 2}', "benchmarks is not a list"),
        ('{"machine_info": {}, "benchmarks": [3]}', r"benchmarks\[0\]: not an object"),
        ('{"machine_info": {}, "benchmarks": [{"name": "x"}]}', "missing stats"),
        ('{"machine_info": {}, "benchmarks": [{"stats": {}}]}', "missing fullname"),
        ('{"machine_info": {}, "benchmarks": [{"name": "x", "stats": {"data": ["1"]}}]}', "something else than"),
        ('{"machine_info": {}, "benchmarks": [{"name": "x", "stats": {}}, {"name": "x", "stats": {}}]}', "second time"),
        ("\ud800", "not UTF-8"),
    ],
)
def test_files_that_only_look_like_results(tmp_path, text, words):
    """One clear error that names the file and the place."""
    file = tmp_path / "f.json"
    file.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(InputError, match=words) as error:
        read_side(file)
    assert "f.json" in str(error.value)


def test_places_without_a_run(tmp_path):
    """An empty folder, a missing one."""
    with pytest.raises(InputError, match="no run here"):
        read_side(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        read_side(tmp_path / "absent")


def hand_edited(rows, change):
    """The lines of some rows as JSON objects after an edit."""
    for row in rows:
        change(row)
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text.replace('"value": 40.0', '"value": NaN', 1), "line 2: .*NaN is not a number of JSON"),
        (lambda text: text.replace('"value": 40.0', '"value": 1e999', 1), "line 2: value is inf"),
        (lambda text: text.replace('"value": 40.0', '"value": "fast"', 1), "line 2: value is 'fast'"),
        (lambda text: text.replace('"status": "passed"', '"status": "great"', 1), "status is 'great'"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 9', 1), "schema_version 9 is unknown"),
        (lambda text: "not json\n" + text, "line 1: not a JSON object"),
    ],
)
def test_results_edited_by_hand_are_refused_with_their_line(tmp_path, edit, words):
    """What is no row any more is named by file and line."""
    path = write_run(tmp_path / "a", [exact_rows(case())])
    file = path / "results.jsonl"
    file.write_text(edit(file.read_text()))
    with pytest.raises(InputError, match=words):
        read_side(path)


def test_a_clock_that_no_gpu_has_is_none(tmp_path):
    """Beyond any clock, or no number: as if it had not been recorded."""
    for number, clock in enumerate((1e308, -1, "fast", None)):
        rows = sample_rows(case(engine="local"), noisy(1, 2), sm_clock_mhz=clock)
        (samples,) = read_side(write_run(tmp_path / str(number), [rows])).samples.values()
        assert samples.clock_mhz is None


def test_odd_details_are_no_danger(tmp_path):
    """A process that is a text, a part that is a list, a metric with a bar: read, and shown as text."""
    of = case(engine="local")
    rows = sample_rows(of, noisy(1, 2))
    path = write_run(tmp_path / "a", [rows])
    file = path / "results.jsonl"
    text = file.read_text().replace('"process": 1', '"process": "one"').replace("step_time", "step | time")
    file.write_text(text.replace('"regime": "hot"', '"regime": ["a|b", 1]'))
    ((key, samples),) = read_side(path).samples.items()
    assert key.metric == "step / time"
    assert key.part == "['a|b', 1]"
    assert [group.size for group in samples.processes] == [28]
    assert np.isfinite(samples.processes[0]).all()
