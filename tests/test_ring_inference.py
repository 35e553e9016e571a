"""The measurement of ring inference, at sizes that take no time; its times are for an idle machine."""

import json

import pytest

from benchmarks import ring_inference, ring_results
from benchmarks.ring_inference import Way, knee, lead_in, predicted_ratio, ways_of, within
from moebench.systems.moesys.expert_file import ExpertLayout
from moebench.systems.moesys.hiding import LayerTimes

SIZES = {"layers": 4, "experts": 2, "top-k": 1, "d-model": 16, "d-ffn": 16, "heads": 2, "batch": 3, "budget": 0}
SMALL = [text for name, value in (SIZES | {"threads": 1}).items() for text in (f"--{name}", str(value))]


def test_every_way_is_measured_and_the_knee_is_named(tmp_path, capsys):
    """A line for no offload, the naive way, K = 1 to 3, kept layers, chosen experts; memory is K of 4 layers."""
    out = tmp_path / "found.json"
    ring_inference.main([*SMALL, "--folder", str(tmp_path), "-o", str(out)])
    text = capsys.readouterr().out
    for words in ("no offload", "when needed", "ring, K = 1", "ring, K = 3", "ring, K = 2, 1 kept", "knee: K = "):
        assert words in text
    (batch,) = json.loads(out.read_text())["batches"]
    page = ring_results.markdown(ring_results.read(out))
    assert "4 layers of 0 MiB of experts in float32" in page
    assert [f"| {name} |" in page for name in ("no offload", "ring, K = 1", "ring, K = 3")] == [True] * 3
    assert "Knee: K = " in page
    assert "Furthest from the formula: " in page
    lines = {tuple(line["way"].values()): line for line in batch["lines"]}
    whole = lines["none", 4, 0]["held_bytes"]
    assert lines["none", 4, 0]["ratio"]["median"] == 1.0
    assert [lines["ring", slots, 0]["held_bytes"] * 4 / whole for slots in (1, 2, 3)] == [1, 2, 3]
    assert lines["ring", 2, 0]["copied_bytes_a_token"] == whole
    assert lines["ring", 2, 1]["copied_bytes_a_token"] == whole * 3 / 4
    assert list(tmp_path.iterdir()) == [out]


def test_the_knee_is_where_more_slots_gain_little():
    """The fewest slots from which no more of them are 5 % faster; one that is fast by chance before that is none."""
    assert knee({1: 2.0, 2: 1.3, 3: 1.02, 4: 1.0}) == 3
    assert knee({1: 1.04, 2: 1.0}) == 1
    assert knee({1: 1.5, 2: 1.3, 3: 1.1}) == 3


def test_what_the_formula_says_of_each_way():
    """Copies of 3 behind compute of 2: the ring takes 1.5, the naive way 2.5; kept layers less."""
    times = LayerTimes(1.0, 1.0, 3.0)
    ways = (Way("none", 8), Way("synchronous", 1), Way("ring", 1), Way("ring", 4), Way("ring", 5, 4))
    assert [predicted_ratio(way, times, 8) for way in ways] == pytest.approx([1.0, 2.5, 2.0, 1.5, 1.0], abs=0.02)
    assert predicted_ratio(Way("chosen", 8), times, 8) is None
    assert [way.slots for way in ways_of(8, 4)] == [8, 1, 1, 2, 3, 4, 5, 6, 7, 4, 4, 16]


def test_a_sample_begins_when_what_was_copied_beforehand_is_used_up():
    """At once where copies hide; else after K slots at the rate at which they are lost."""
    assert lead_in(Way("ring", 7), LayerTimes(1, 1, 2), 8) == 1
    assert lead_in(Way("ring", 7), LayerTimes(1, 1, 4), 8) == 3
    assert lead_in(Way("ring", 7), LayerTimes(1, 1, 2.01), 8) == 12
    assert lead_in(Way("none", 8), LayerTimes(1, 1, 9), 8) == 1


def test_a_memory_limit_leaves_out_what_takes_more():
    """Two layers: K = 1 and 2, the naive way, one layer's chosen experts, and no offload for comparison."""
    layout = ExpertLayout(4, 2, 16, 16)
    found = within(ways_of(4, 2), layout, 2.5 * layout.layer_bytes)
    assert [way.name for way in found] == [
        *("no offload", "when needed", "ring, K = 1", "ring, K = 2", "ring, K = 2, 1 kept"),
        *("chosen, 2 experts", "chosen, 4 experts"),
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--top-k", "3"], "top_k = 3"),
        (["--memory-limit", "1KiB"], "a memory limit of 1,024 bytes is below one layer of experts, 8,192 bytes"),
        (["--memory-limit", "much"], "--memory-limit"),
    ],
)
def test_bad_sizes_end_with_one_line(tmp_path, capsys, more, words):
    """Exit 2, on standard error, and no file stays."""
    with pytest.raises(SystemExit, match="2"):
        ring_inference.main([*SMALL, "--folder", str(tmp_path), *more])
    assert f"error: {words}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_the_disk_refuses_is_one_line(tmp_path, capsys):
    """A folder that is not there ends the measurement with status 2, as any bad input."""
    with pytest.raises(SystemExit, match="2"):
        ring_inference.main([*SMALL, "--folder", str(tmp_path / "missing")])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "missing" in line
