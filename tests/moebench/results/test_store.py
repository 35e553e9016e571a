"""A run folder keeps every whole case, whatever happens to the process or the disk."""

import errno
import json
import os
import re
from pathlib import Path

import pytest

from moebench.cases.plan import Filters
from moebench.results import lines, store
from moebench.results.store import RUN_FILE, FolderTaken, RunFolder, StorageError, default_folder, new_record
from moebench.results.table import table
from moebench.run import begin, prepare
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite
from tests.moebench import fake_engine


@pytest.fixture
def job(tmp_path):
    """A run of a few cases, without rows yet."""
    return begin(prepare(load_suite("smoke"), Filters(gates=("switch",), topologies=("1x2",))), tmp_path / "run")


def rows(job, index):
    case = job.cases[index]
    return fake_engine.rows_of(case, job.topologies[case.topology], job.suite)


def test_a_run_reads_back_as_it_was_written(job):
    """Suite, filters, machines and rows are the same after opening the folder again."""
    with job.folder.writing() as append:
        append(rows(job, 0))
        append(rows(job, 1))
    again = RunFolder.open(job.folder.path)
    assert again.suite == job.suite
    assert again.filters == job.folder.filters
    assert again.topologies == dict(job.topologies)
    assert again.rows() == [*rows(job, 0), *rows(job, 1)]
    assert again.done() == {job.cases[0].hash, job.cases[1].hash}
    assert [row.metric for row in again.rows("launches")] == ["launches", "launches"]


def test_who_wrote_all_rows_knows_them_without_the_file(job, monkeypatch):
    """The same rows, of the same metrics, as a reader finds; a file that somebody else changed is read."""
    with job.folder.writing() as append:
        append(rows(job, 0))
        append(rows(job, 1))
    read, read_launches = (RunFolder.open(job.folder.path).rows(*metrics) for metrics in ((), ("launches",)))
    with monkeypatch.context() as patch:
        patch.setattr(lines, "objects", lambda *_, **__: pytest.fail("the file was read"))
        assert (job.folder.rows(), job.folder.rows("launches")) == (read, read_launches)
    with RunFolder.open(job.folder.path).writing() as append:
        append(rows(job, 2))
    assert job.folder.rows() == [*read, *rows(job, 2)]
    with job.folder.writing() as append:
        append(rows(job, 3))
    assert job.folder.rows() == [*read, *rows(job, 2), *rows(job, 3)]


def test_a_draw_out_of_memory_is_null_on_disk(job):
    """JSON has no NaN: such draws are null there and NaN again when read."""
    case = job.cases[0]
    with fake_engine.behaving(hungry=case.system, memory_limit=0), job.folder.writing() as append:
        append(rows(job, 0))
    text = job.folder.results.read_text()
    assert "NaN" not in text
    (row,) = job.folder.rows("step_time")
    assert row.value is None
    assert row.status == "out-of-memory"
    assert all(draw != draw for draw in row.draws)
    assert len(row.draws) == job.suite.samples + 1


@pytest.mark.parametrize("torn", ["{", '{"case": "tiny/sw', "half", "\n", "whole"])
def test_a_torn_end_is_left_out_and_cut_off(job, torn):
    """Readers ignore what a dead process left at the end; a resumed run cuts it off."""
    with job.folder.writing() as append:
        append(rows(job, 0))
    good = job.folder.results.read_bytes()
    ends = {"half": json.dumps({"schema_version": 1, **rows(job, 1)[0].to_json()}) + "\n"}
    ends["whole"] = good.decode().splitlines()[0] + "\n"
    with open(job.folder.results, "a") as file:
        file.write(ends.get(torn, torn))
    assert job.folder.rows() == rows(job, 0)
    assert job.folder.done() == {job.cases[0].hash}
    with job.folder.writing() as append:
        append(rows(job, 1))
    assert job.folder.results.read_bytes().startswith(good)
    assert job.folder.rows() == [*rows(job, 0), *rows(job, 1)]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(job):
    """Only the end may be torn; elsewhere the file was damaged, and the error says where."""
    with job.folder.writing() as append:
        append(rows(job, 0))
    good = job.folder.results.read_text()
    job.folder.results.write_text("oops\n" + good)
    with pytest.raises(InputError, match=r"results\.jsonl, line 1: not a JSON object"):
        job.folder.rows()
    job.folder.results.write_text(good.replace('"metric"', '"metrik"'))
    with pytest.raises(InputError, match=r"results\.jsonl, line 1: unknown key 'metrik'"):
        RunFolder.open(job.folder.path).rows()


def test_an_unknown_schema_is_refused(job):
    """A folder, or a row, of another version is not guessed at."""
    file = job.folder.path / "run.json"
    text = file.read_text()
    file.write_text(text.replace('"schema_version": 1', '"schema_version": 99'))
    with pytest.raises(InputError, match=r"run\.json: schema_version 99 is unknown; this moebench reads 1"):
        RunFolder.open(job.folder.path)
    file.write_text(json.dumps({"suite": {}}))
    with pytest.raises(InputError, match="schema_version None is unknown"):
        RunFolder.open(job.folder.path)
    file.write_text(text)
    with job.folder.writing() as append:
        append(rows(job, 0))
    job.folder.results.write_text(job.folder.results.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(InputError, match=r"results\.jsonl, line 1: schema_version 2 is unknown"):
        RunFolder.open(job.folder.path).rows()


def test_a_folder_without_a_run_is_an_error(tmp_path):
    """No run.json, or one that is no JSON, says so."""
    with pytest.raises(InputError, match="no run here"):
        RunFolder.open(tmp_path / "nothing")
    (tmp_path / "run.json").write_text('{"schema_version": 1, ')
    with pytest.raises(InputError, match="not a JSON document"):
        RunFolder.open(tmp_path)


def test_damaged_contents_name_the_key(job):
    """A run.json whose suite lost a key says which."""
    file = job.folder.path / "run.json"
    record = json.loads(file.read_text())
    del record["suite"]["name"]
    file.write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"run\.json: suite: .*name"):
        _ = RunFolder.open(job.folder.path).suite


def test_a_full_disk_loses_nothing(job, monkeypatch):
    """A write that the disk refuses leaves the whole cases before it, and one clear error."""
    with job.folder.writing() as append:
        append(rows(job, 0))
    good = job.folder.results.read_bytes()
    real = os.write

    def full(descriptor, data):
        if len(data) > 10:
            return real(descriptor, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with job.folder.writing() as append:
        monkeypatch.setattr(store.os, "write", full)
        with pytest.raises(StorageError, match="can't write: No space left on device"):
            append([*rows(job, 1)[:1]])
        monkeypatch.undo()
    assert job.folder.results.read_bytes() == good


def test_an_unwritable_place_writes_nothing(tmp_path, job):
    """A folder that can't be made is a StorageError, and no part of it is left behind."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError):
        RunFolder.create(tmp_path / "file", dict(job.folder.record))
    with pytest.raises(StorageError, match="can't write"):
        RunFolder.create(tmp_path / "file" / "run", dict(job.folder.record))


def test_a_failed_start_leaves_no_empty_folders(tmp_path, job, monkeypatch):
    """Where run.json can't be written, the folders made for it are taken away again."""

    def refuse(path, text):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store, "write_atomically", refuse)
    with pytest.raises(StorageError, match="Read-only file system"):
        RunFolder.create(tmp_path / "new" / "deep" / "run", dict(job.folder.record))
    assert not (tmp_path / "new").exists()


def test_an_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    """A reader never sees half a file, and no scratch file stays."""
    file = tmp_path / "run.json"
    file.write_text("old")

    def refuse(source, target):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store.os, "replace", refuse)
    with pytest.raises(OSError, match="Input/output"):
        store.write_atomically(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_two_writers_are_refused(job):
    """A second process that resumes the same folder is told so."""
    second = RunFolder.open(job.folder.path).writing()
    with job.folder.writing(), pytest.raises(InputError, match="another moebench is writing here"), second:
        pass


def test_a_folder_in_use_is_not_overwritten(job):
    """A new run never lands in a folder that holds one; the error names --resume."""
    with pytest.raises(InputError, match="--resume"):
        RunFolder.create(job.folder.path, dict(job.folder.record))


def test_default_folders_do_not_collide(in_folder):
    """Two runs within a second get two folders."""
    first = default_folder("hetu")
    first.mkdir(parents=True)
    assert first.parent.name == "runs"
    assert first.name.startswith("hetu-")
    assert default_folder("hetu") != first


def test_two_runs_that_begin_at_once_do_not_share_a_folder(job, tmp_path, monkeypatch):
    """Both saw an empty folder: the one that comes second is refused, and changes nothing of the first."""
    path, record = tmp_path / "new", dict(job.folder.record)

    def begins_meanwhile(self, *arguments, own=Path.mkdir, **options):
        own(self, *arguments, **options)
        if not (path / RUN_FILE).exists():
            (path / RUN_FILE).write_text("the first")

    monkeypatch.setattr(Path, "mkdir", begins_meanwhile)
    with pytest.raises(FolderTaken, match="another run began there just now"):
        RunFolder.create(path, record)
    assert (path / RUN_FILE).read_text() == "the first"


def test_machines_of_one_name_but_other_numbers_both_survive(job):
    """Two topologies may hold different hardware of one name; neither replaces the other."""
    from dataclasses import replace

    first = next(iter(job.topologies.values()))
    other = replace(first, name="other", hardware=replace(first.hardware, title="another"))
    record = new_record(job.suite, Filters(), "auto", [first, other], {}, 0)
    folder = RunFolder(job.folder.path, json.loads(json.dumps(record)))
    assert folder.topologies == {first.name: first, "other": other}


@pytest.mark.parametrize("last_newline", [True, False])
def test_rows_may_be_spaced_in_any_way(job, last_newline):
    """A file that another program wrote again (`jq -c`) holds the same rows, and a resumed run adds to them."""
    with job.folder.writing() as append:
        append(rows(job, 0))
        append(rows(job, 1))
    compact = [json.dumps(json.loads(t), separators=(",", ":")) for t in job.folder.results.read_text().splitlines()]
    job.folder.results.write_text("\n".join(compact) + "\n" * last_newline)
    assert job.folder.rows() == [*rows(job, 0), *rows(job, 1)]
    assert [row.metric for row in job.folder.rows("launches")] == ["launches", "launches"]
    with job.folder.writing() as append:
        append(rows(job, 2))
    assert job.folder.rows() == [*rows(job, 0), *rows(job, 1), *rows(job, 2)]


def test_only_a_torn_end_is_ever_cut_off(job):
    """Rows of several cases without their ends, or lines of something else, are refused and stay as they are."""
    with job.folder.writing() as append:
        append(rows(job, 0))
        append(rows(job, 1))
    good = job.folder.results.read_text()
    pretty = "".join(json.dumps(json.loads(text), indent=2) + "\n" for text in good.splitlines())
    for damaged in (good.replace('"last": true', '"last": 1'), pretty, "hello\nworld\n"):
        job.folder.results.write_text(damaged)
        with pytest.raises(InputError, match=r"results\.jsonl, line \d+: "), job.folder.writing():
            pass
        assert job.folder.results.read_text() == damaged


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda item: item.pop("case_hash"), "line 1: missing key 'case_hash'"),
        (lambda item: item.update(value="fast"), "line 1: value is 'fast'"),
        (lambda item: item.update(value=float("nan")), "line 1: not a JSON object: NaN is not a number of JSON"),
        (lambda item: item.update(value=True), "line 1: value is True"),
        (lambda item: item.update(draws=["x"]), "line 1: draws holds something else than numbers"),
        (lambda item: item.update(status="good"), "line 1: status is 'good', not one of: passed"),
        (lambda item: item.update(schema_version=2), "line 1: schema_version 2 is unknown"),
    ],
)
def test_a_row_changed_by_hand_is_one_error_for_every_reader(job, change, words):
    """Whoever reads the rows, the error names file and line, and nothing is changed."""
    with job.folder.writing() as append:
        append(rows(job, 0))
    first, *others = job.folder.results.read_text().splitlines()
    item = json.loads(first)
    change(item)
    job.folder.results.write_text("\n".join([json.dumps(item), *others]) + "\n")
    before = job.folder.results.read_text()
    readers = [job.folder.rows, job.folder.done, lambda: table(job.folder), lambda: job.folder.writing().__enter__()]
    for reader in readers:
        with pytest.raises(InputError, match=re.escape(words)):
            reader()
    assert job.folder.results.read_text() == before


def test_a_row_that_is_a_list_and_a_file_that_is_a_folder(job):
    """Neither is a row; both are one clear error."""
    with job.folder.writing() as append:
        append(rows(job, 0))
    job.folder.results.write_text("[1, 2]\n" + job.folder.results.read_text())
    with pytest.raises(InputError, match=r"results\.jsonl, line 1: not a JSON object"):
        job.folder.rows()
    job.folder.results.unlink()
    job.folder.results.mkdir()
    with pytest.raises(InputError, match=r"results\.jsonl: cannot be read: Is a directory"):
        job.folder.done()


def test_a_case_that_stands_there_twice_counts_once(job):
    """Two runs' rows in one file: the first of a case counts, for every reader, and the second can be named."""
    with job.folder.writing() as append:
        append(rows(job, 0))
        append(rows(job, 1))
    assert lines.repeated(job.folder.results) is None
    job.folder.results.write_text(2 * job.folder.results.read_text())
    assert job.folder.rows() == [*rows(job, 0), *rows(job, 1)]
    assert len(table(job.folder)) == 4
    assert lines.repeated(job.folder.results) == (6, job.cases[0].name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("engine"), "missing key 'engine'"),
        (lambda r: r.pop("resumed"), "resumed"),
        (lambda r: r.pop("environment"), "environment"),
        (lambda r: r.pop("created"), "created"),
        (lambda r: r.update(created="yesterday"), "yesterday"),
        (lambda r: r.update(cases="many"), r"cases: expected int, found 'many'"),
        (lambda r: r.update(cases=-1), r"cases: -1 is negative"),
        (lambda r: r.update(engine="warp"), r"unknown engine 'warp'; choose one of: "),
        (lambda r: r.update(environment=[]), r"environment: expected an object, found \[\]"),
        (lambda r: r.update(environment={}), r"environment: .*moebench"),
        (lambda r: r["environment"].update(gpus=5), r"environment\.gpus: expected a list, found 5"),
        (lambda r: r["suite"].update(samples=-5), r"suite\.samples: .*greater than or equal to 1, got -5"),
        (lambda r: r["suite"].update(seed="x"), r"suite\.seed: expected int, found 'x'"),
        (lambda r: r["suite"].update(experiments=[]), r"suite\.experiments: .*at least 1"),
        (lambda r: r["suite"]["experiments"][0].update(sizes=["axb"]), r"sizes\[0\]: 'axb' is not a size"),
        (lambda r: r["suite"]["experiments"][0]["gates"][0].update(name="none"), "unknown gate 'none'"),
        (lambda r: r["suite"]["experiments"][0]["layer"].update(experts=["foo"]), "experts rule 'foo'"),
        (lambda r: r.update(hardware=[]), r"hardware: expected an object, found \[\]"),
        (lambda r: r.update(colour="red"), "unknown key 'colour'"),
    ],
)
def test_a_record_changed_by_hand_is_one_error_when_it_is_opened(job, change, words):
    """The error names the file and the key, whichever command opens the run."""
    file = job.folder.path / "run.json"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))
    with pytest.raises(InputError, match=rf"run\.json: .*({words})") as caught:
        RunFolder.open(job.folder.path)
    assert "\n" not in str(caught.value)


def test_a_text_with_a_path_that_is_not_utf_8_is_written(tmp_path):
    """Such a path comes from the system as surrogates; the same bytes go into the file."""
    name = os.fsdecode(b"run-\xff")
    store.write_atomically(tmp_path / "a.html", f"see {name}")
    assert (tmp_path / "a.html").read_bytes() == b"see run-\xff"


def test_an_output_that_is_a_file_is_called_one(tmp_path, job):
    """Not "a folder that is not empty"."""
    (tmp_path / "passwd").write_text("x")
    with pytest.raises(InputError, match="passwd: is a file, and a run needs a folder"):
        RunFolder.create(tmp_path / "passwd", dict(job.folder.record))


def test_a_file_that_lies_elsewhere_is_named(tmp_path):
    """Temporary files on another disk, say: the run folder is not what is full."""
    with pytest.raises(StorageError, match=r"^/tmp/other: can't write: No space left"), store.storage(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/other")
