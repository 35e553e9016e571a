"""`moebench figures`: which suite and run, what is said of each figure, and what is refused."""

import json

import pytest

from moebench.workloads.load import load_suite


@pytest.fixture
def drawn(monkeypatch):
    """Nothing is drawn; the files that would be are still named."""
    def write(drawings, place, formats):
        place.mkdir(parents=True)
        return {d.figure.name: [f"{d.figure.name}.{f}" for f in (*formats, "csv")] for d in drawings if d.points}

    monkeypatch.setattr("moebench.figures.write.write_figures", write)


@pytest.fixture
def run(fake, moebench, in_folder):
    """A quick run of a part of hetu under runs/."""
    chosen = ("--experiment", "overall", "--system", "hetumoe", "--system", "deepspeed", "--batch-size", "32")
    assert moebench("run", "--suite", "hetu", "--quick", *chosen, "--out", "runs/one").status == 0
    return in_folder / "runs" / "one"


def test_each_figure_has_a_line(moebench, drawn, in_folder, monkeypatch):
    """Without a run what was reported is drawn alone; the others say why they aren't."""
    monkeypatch.setenv("COLUMNS", "200")
    said = moebench("figures", "--suite", "hetu", "--format", "svg")
    assert said.status == 0
    assert "no finished run of suite hetu" in said.err
    heading, *lines = said.out.splitlines()
    assert heading.split() == ["figure", "name", "drawn", "from", "files", "title"]
    figures = load_suite("hetu").figures
    assert [line.split()[1] for line in lines[: len(figures)]] == [figure.name for figure in figures]
    assert all(line.endswith(figure.title) for figure, line in zip(figures, lines))
    h1 = next(line for line in lines if "speedup-deepspeed" in line)
    assert "1 reported, 0 obtained" in h1
    assert "svg, csv" in h1
    assert "fig-6 is not drawn: a drawing of how blocks move" in said.out
    assert (in_folder / "figures").is_dir()


def test_a_narrow_terminal_loses_columns_and_no_figure(moebench, drawn, in_folder, monkeypatch):
    """Titles first, then files; reasons wrap."""
    monkeypatch.setenv("COLUMNS", "60")
    said = moebench("figures", "--suite", "hetu", "--format", "svg")
    heading, *lines = said.out.splitlines()
    assert heading.split() == ["figure", "name", "drawn", "from"]
    assert max(map(len, said.out.splitlines())) <= 60
    assert {figure.name for figure in load_suite("hetu").figures} <= {line.split()[1] for line in lines[:9]}


def test_json_names_files_and_reasons(moebench, drawn, run):
    """The newest run of the suite fills the figures; its folder holds them."""
    said = moebench("figures", "--suite", "hetu", "--json", "--format", "png,pdf", "--format", "png")
    assert "runs/one" in said.err
    entries = {entry["name"]: entry for entry in json.loads(said.out)}
    assert list(entries) == [figure.name for figure in load_suite("hetu").figures]
    one = entries["speedup-deepspeed"]
    assert (one["reported"], one["obtained"], one["engine"], one["not_drawn"]) == (1, 4, "sim", None)
    assert one["files"] == [f"runs/one/figures/speedup-deepspeed.{form}" for form in ("png", "pdf", "csv")]
    assert entries["fig-6"]["number"] == "6"
    assert entries["fig-6"]["files"] == []
    assert "the run has no case of it" in entries["breakdown"]["not_drawn"]


def test_a_run_may_be_named_in_two_ways(moebench, drawn, run, in_folder):
    """RUN and --run; its suite needs no name."""
    for index, given in enumerate(([run], ["--run", run])):
        said = moebench("figures", *given, "-o", in_folder / str(index), "--format", "svg")
        assert said.status == 0
        assert "1 reported, 4 obtained (sim)" in said.out
    assert "give one of them" in moebench.refused("figures", run, "--run", run)


def test_a_suite_without_a_paper_says_so(moebench, in_folder):
    """Nothing is written."""
    said = moebench("figures", "--suite", "smoke")
    assert (said.status, said.out) == (0, "suite smoke lists no figures, and it reproduces no paper\n")
    assert moebench("figures", "--suite", "smoke", "--json").out == "[]\n"
    said = moebench("figures", "--suite", "validation")
    assert "no finished run of suite validation under runs/, and it reproduces no paper" in said.err
    assert "narrow is not drawn: no finished run of the suite" in said.out
    assert list(in_folder.iterdir()) == []


def test_bad_input_is_one_line(moebench, run, in_folder):
    """A suite, a format, a run of another suite, no suite at all, a place that is a file; nothing is written."""
    assert "unknown suite 'hetumoe'" in moebench.refused("figures", "--suite", "hetumoe")
    assert "unknown format 'jpg'" in moebench.refused("figures", "--suite", "hetu", "--format", "svg,jpg")
    assert "say which suite" in moebench.refused("figures")
    assert "is a run of suite hetu, not of smoke" in moebench.refused("figures", run, "--suite", "smoke")
    assert "no run here" in moebench.refused("figures", in_folder / "nowhere")
    (in_folder / "file").write_text("")
    assert "is a file" in moebench.refused("figures", run, "-o", in_folder / "file")
    assert not (run / "figures").exists()
