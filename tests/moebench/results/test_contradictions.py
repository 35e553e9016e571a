"""Rows that contradict themselves, as after an edit by hand, are refused with line and reason, whoever reads them."""

import json

import pytest

from moebench.cases.case import Case
from moebench.results.lines import encode, objects
from moebench.results.rows import row_of
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec, LayerWorkload

CASE = Case("s", "e", "hetumoe", LayerWorkload(GateSpec("switch"), 1, 8, 4, 4, 2), "1x1-titan-rtx", "1x1", "sim")


def file_of(tmp_path, **changes):
    """A case of two rows, the first changed."""
    rows = [row_of(CASE, "h", "step_time", "s", 2.0, low=1.0, high=3.0, draws=(2.0, 1.0, 3.0))]
    rows.append(row_of(CASE, "h", "peak_memory", "B", 10.0))
    first, second = encode(rows).splitlines()
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(json.loads(first) | changes) + "\n" + second.decode() + "\n")
    return path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"value": -1.0, "draws": []}, "line 1: value is -1.0, and step_time can't be negative"),
        ({"value": 5.0}, "line 1: value is 5.0, and the first draw, the nominal one, 2.0"),
        ({"value": None, "draws": []}, "line 1: step_time passed and has no value"),
        ({"status": "out-of-memory"}, "line 1: value is 2.0, and a case that is out-of-memory has none"),
        ({"low": 3.5}, "line 1: low is 3.5, above high, 3.0"),
    ],
)
def test_what_can_not_be_is_refused(tmp_path, changes, told):
    """A negative time, another value than the nominal draw's, a case without a number that passed or with one that did
    not, an interval upside down.
    """
    with pytest.raises(InputError, match=told):
        list(objects(file_of(tmp_path, **changes)))


def test_what_can_be_is_read(tmp_path):
    """The rows as they were, and a nominal draw without a number."""
    assert [item["value"] for _, item in objects(file_of(tmp_path))] == [2.0, 10.0]
    assert len(list(objects(file_of(tmp_path, draws=[None, 1.0])))) == 2


def test_a_cut_row_is_seen_by_who_does_not_ask_for_it(tmp_path):
    """A line that lost its end is no row, whichever metric is read."""
    path = file_of(tmp_path)
    first, second = path.read_text().splitlines()
    path.write_text(f"{first[:60]}\n{second}\n")
    with pytest.raises(InputError, match="line 1: not a JSON object"):
        list(objects(path, ["peak_memory"]))
