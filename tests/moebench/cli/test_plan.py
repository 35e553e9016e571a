"""`moebench plan`: the table at several widths, one JSON document, and bad input."""

import json

import pytest
from click.testing import CliRunner

from moebench.cli import group
from moebench.cli.plan_text import document, lines
from moebench.planner.exact import settled
from moebench.planner.search import search
from tests.moebench.planner.questions import question, values_of


@pytest.fixture(scope="module")
def answered():
    """A plan of a small decoder, its first settings traced whole."""
    systems = ("megascale+ranks=1", "megascale+overlap=inter")
    one = question("180 MB", systems=systems, stages=(1, 2), micro_batches=(2,))
    return settled(search(one, values_of(one)), values_of(one))


@pytest.mark.parametrize("width", [80, 120])
def test_text_fits_the_terminal(answered, width, monkeypatch):
    """No line is longer; what decides, what does not fit and what can't run are said."""
    monkeypatch.setenv("COLUMNS", str(width))
    text = lines(answered, 12, False)
    whole = "\n".join(text)
    assert max(map(len, whole.split("\n"))) <= width
    said = " ".join(whole.split())
    assert "The first one's step takes" in said
    assert "traced whole, which changed nothing" in said
    assert "do not fit. The nearest" in said
    assert ("bubble: share of the time" in said) == (width == 120)
    assert "draws of the uncertain parameters" in said


def test_rejected_settings_are_listed_one_a_line(answered):
    """As many as the plan has, each with its reason."""
    text = lines(answered, 12, True)
    for one in answered.plan.rejected:
        assert any(line.endswith(one.reason) for line in text)


def test_the_document_has_every_setting_once(answered):
    """Ranked ones first, with what is known of each."""
    found = document(answered)
    assert len(found["settings"]) == answered.plan.tried
    first = found["settings"][0]
    assert first["rank"] == 1
    assert first["tokens_per_s"] == pytest.approx(8 * 128 / first["step_s"])
    assert first["step_s"] == pytest.approx(found["best_traced_whole_s"])
    assert first["memory_bytes"]["total"] <= 180e6
    assert {one["status"] for one in found["settings"]} >= {"ranked", "does not fit"}


def test_a_dry_run_counts():
    """Nothing is traced."""
    line = ["plan", "mixtral-8x7b", "--topology", "4x8-h800", "--batch", "512", "--dry-run"]
    result = CliRunner().invoke(group, line, catch_exceptions=False)
    assert "settings of" in result.output
    assert "nothing was traced" in result.output
    counts = json.loads(CliRunner().invoke(group, [*line, "--json"], catch_exceptions=False).stdout)
    assert counts["settings"] > counts["cant_run"] > 0


def test_where_no_numbers_go_nothing_is_said_of_memory():
    """A pipeline of three stages on four ranks."""
    one = question(stages=(3,))
    values = values_of(one, 0)
    said = "\n".join(lines(settled(search(one, values), values), 12, False))
    assert "No setting can run." in said
    assert "stages = 3: world = 4 ranks can't be divided among them" in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("mixtral --topology 4x8-h800 --batch 8", "unknown model 'mixtral'"),
        ("mixtral-8x7b --topology 4x8-h900 --batch 8", "did you mean 4x8-h800"),
        ("mixtral-8x7b --topology 4x8-h800 --batch 0", "batch = 0: must be at least 1"),
        ("mixtral-8x7b --topology 4x8-h800 --batch 8 --system nobody", "unknown system for jobs 'nobody'"),
        ("mixtral-8x7b --topology 4x8-h800 --batch 8 --set nic", "write PARAMETER=VALUE"),
        ("deepseek-v3 --topology 4x8-h800 --batch 8", "have no latent attention, 3 dense layers"),
    ],
)
def test_bad_input_is_one_line(words, reason):
    """What is wrong and what is allowed; nothing is printed beside it."""
    from moebench.workloads.errors import InputError

    with pytest.raises(InputError, match=reason):
        CliRunner().invoke(group, ["plan", *words.split()], catch_exceptions=False)


def test_the_command_answers_in_json(monkeypatch):
    """One document on standard output; progress goes elsewhere."""
    monkeypatch.setattr("moebench.planner.checks.checked", _passes)
    line = "plan mixtral-8x7b --topology 1x8-h800 --batch 8 --sequence 512 --stages 1 --micro-batch 1 --samples 4"
    more = "--json --system megascale+overlap=inter --set gpu.memory.capacity=2000GB"
    words = [*line.split(), *more.split()]
    result = CliRunner().invoke(group, words, catch_exceptions=False)
    found = json.loads(result.stdout)
    assert [one["status"] for one in found["settings"]] == ["ranked"]
    assert found["settings"][0]["share_best"] == 1
    assert "floors: 1/1" in result.stderr


def test_nothing_is_ranked_of_a_system_that_trains_wrong(monkeypatch):
    """The reason of the gate is the error."""
    from moebench.workloads.errors import InputError

    monkeypatch.setattr("moebench.planner.checks.checked", _is_wrong)
    words = ["plan", "mixtral-8x7b", "--topology", "1x8-h800", "--batch", "8"]
    with pytest.raises(InputError, match="no setting is ranked, one is wrong: weights"):
        CliRunner().invoke(group, words, catch_exceptions=False)


def _passes(systems):
    from moebench.checks.correctness import Status

    return Status("passed")


def _is_wrong(systems):
    from moebench.checks.correctness import Status

    return Status("wrong", "weights")


def test_a_closed_output_is_nobodys(monkeypatch):
    """`moebench ... >&-`: Python has no standard output then."""
    import sys

    from moebench.cli import _open_closed_streams

    monkeypatch.setattr(sys, "stdout", None)
    _open_closed_streams()
    assert sys.stdout.write("x") == 1
    assert not sys.stdout.isatty()
    sys.stdout.close()
