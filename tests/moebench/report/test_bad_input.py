"""The report of a run whose files say what nobody should write: texts stay text, numbers that are none are refused."""

import json
from dataclasses import replace

import pytest

from moebench.cases.plan import Filters
from moebench.report.html import write_report
from moebench.results.store import RunFolder
from moebench.workloads.errors import InputError
from tests.moebench.compare.support import case, change_record, exact_rows, noisy, sample_rows
from tests.moebench.compare.support import write_run as write_any_run
from tests.moebench.report.hostile import TEXTS, complaints


def write_run(path, groups, finished=True):
    """A run of the one topology that its record holds."""
    return write_any_run(path, groups, finished, filters=Filters(topologies=("1x2-titan-rtx",)))


def test_hostile_texts_in_rows_and_record_stay_text(tmp_path):
    """In names of cases, systems, gates, reasons, in titles, commands, processors, notes: shown, cut, never markup."""
    groups = []
    for number, text in enumerate(TEXTS):
        rows = exact_rows(case(f"s{number}"))
        named = {"case": f"tiny/{number}/{text}", "case_hash": f"{number:016x}", "system": f"{number} {text}"}
        groups.append([replace(row, **named, gate=f"{number} {text}") for row in rows])
        failed = replace(groups[-1][0], case=f"tiny/failed{number}", case_hash=f"f{number:015x}")
        groups.append([replace(failed, value=None, status="failed", reason=text)])
    path = write_run(tmp_path / "run", groups)

    def change(record):
        record["suite"].update(title="".join(TEXTS), paper=TEXTS[1])
        record["suite"]["experiments"][0].update(title=TEXTS[2], question=TEXTS[4], not_published=TEXTS, caveats=TEXTS)
        record["environment"].update(command=TEXTS[1] * 100_000, cpu=TEXTS[3], gpus=TEXTS, system=TEXTS[-1])
        for hardware in record["hardware"].values():
            hardware.update(title=TEXTS[2], notes=TEXTS)

    change_record(path, change)
    text = write_report(RunFolder.open(path)).read_text()
    assert complaints(text) == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", '"0.002"', "[1]"])
def test_a_number_that_is_none_is_refused_with_its_line(tmp_path, number):
    """Not finite, or no number: one error names file, line and key, and no report is written."""
    path = write_run(tmp_path / "run", [exact_rows(case())])
    rows = path / "results.jsonl"
    rows.write_text(rows.read_text().replace('"value": 0.002', f'"value": {number}'))
    with pytest.raises(InputError, match=r"results\.jsonl, line 1: "):
        write_report(RunFolder.open(path))
    assert not (path / "report.html").exists()


def test_rows_edited_by_hand_are_refused_or_read(tmp_path):
    """An unknown key, a missing one, another version: refused by name. Other spacing and order of keys: read."""
    path = write_run(tmp_path / "run", [exact_rows(case())])
    rows, before = path / "results.jsonl", (path / "results.jsonl").read_text()
    for old, new, words in (
        ('"metric"', '"metrik"', "unknown key 'metrik'"),
        ('"hardware": "titan-rtx", ', "", "missing key 'hardware'"),
        ('"schema_version": 1', '"schema_version": 7', "schema_version 7 is unknown"),
    ):
        rows.write_text(before.replace(old, new, 1))
        with pytest.raises(InputError, match=words):
            write_report(RunFolder.open(path))
    items = [json.loads(line) for line in before.splitlines()]
    rows.write_text("\n".join(json.dumps(dict(reversed(item.items())), separators=(",", ":")) for item in items))
    assert write_report(RunFolder.open(path)).stat().st_size > 0


def test_one_sample_and_half_a_case_have_a_report(tmp_path):
    """A measured case of a single sample has no interval; rows without an end are left out; lines are told."""
    single = case("reference", engine="local")
    (sample,) = sample_rows(single, [noisy(1, 1)[0][:1]])
    groups = [exact_rows(case("hetumoe")), [sample, replace(sample, sample=None)]]
    path = write_run(tmp_path / "run", groups, finished=False)
    rows = path / "results.jsonl"
    with rows.open("a") as file:
        file.write(rows.read_text().splitlines()[0].replace(case("hetumoe").name, "torn")[:-9])
    text = write_report(RunFolder.open(path)).read_text()
    assert "unfinished: 2 of 2 cases" in text
    assert "5–6</tr>" in text
    assert "torn" not in text
