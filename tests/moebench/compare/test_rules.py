"""moebench.toml: thresholds by pattern, and what it refuses."""

import pytest

from moebench.compare.comparison import compare
from moebench.compare.read import read_side
from moebench.compare.rules import Rules, find_rules, load_rules
from moebench.compare.side import Key
from moebench.workloads.errors import InputError
from tests.moebench.compare.support import case, exact_rows, write_run

EXAMPLE = """
schema_version = 1
baselines = "guard"

[[thresholds]]
metric = "step_time"
relative = "3 %"

[[thresholds]]
metric = "step_time"
case = "overall/*"
absolute = "20 us"
gates = false

[[thresholds]]
metric = "region_time"
part = "region=gate*"
relative = 0.5
gates = true
"""


@pytest.fixture
def write(tmp_path):
    """`write(text)` -> a moebench.toml."""

    def to(text):
        file = tmp_path / "moebench.toml"
        file.write_text(text)
        return file

    return to


def test_each_key_counts_as_the_last_fitting_rule_sets_it(write, tmp_path):
    """General rules first, special ones after them; what no rule sets is the default."""
    rules = load_rules(write(EXAMPLE))
    assert rules.baselines == tmp_path / "guard"
    tiny = rules.of(Key("tiny/x", "local", "step_time", "hot"), "s", measured=True)
    assert (tiny.relative, tiny.absolute, tiny.gates) == (0.03, 0.0, True)
    overall = rules.of(Key("overall/x", "local", "step_time", "hot"), "s", measured=True)
    assert (overall.relative, overall.absolute, overall.gates) == (0.03, pytest.approx(20e-6), False)
    gate, experts = (Key("x", "sim", "region_time", f"region={r}, phase=forward") for r in ("gate", "experts"))
    assert rules.of(gate, "s", measured=False).gates
    assert not rules.of(experts, "s", measured=False).gates


def test_defaults():
    """Exact values exactly, measured ones from one per cent; parts of a whole inform."""
    rules = Rules()
    assert rules.of(Key("x", "sim", "launches"), "1", measured=False).relative < 1e-6
    assert rules.of(Key("x", "local", "step_time", "hot"), "s", measured=True).relative == 0.01
    assert not rules.of(Key("x", "sim", "flops", "region=gate"), "FLOP", measured=False).gates
    assert rules.of(Key("x", "sim", "link_bytes", "tier=nic"), "B", measured=False).gates


def test_thresholds_change_a_verdict(write, tmp_path):
    """One launch more of forty is within three per cent, two are not; a rule that doesn't gate fails nothing."""
    base = read_side(write_run(tmp_path / "a", [exact_rows(case())]))
    one, two = (
        read_side(write_run(tmp_path / f"b{n}", [exact_rows(case(), launches=40.0 + n)])) for n in (1, 2)
    )
    rules = load_rules(write('schema_version = 1\n[[thresholds]]\nmetric = "launches"\nrelative = "3 %"\n'))
    assert compare(base, one, rules).exit_status() == 0
    assert compare(base, two, rules).exit_status() == 1
    rules = load_rules(write('schema_version = 1\n[[thresholds]]\nmetric = "launches"\nabsolute = 2\n'))
    assert compare(base, two, rules).exit_status() == 0
    rules = load_rules(write('schema_version = 1\n[[thresholds]]\nmetric = "*"\ngates = false\n'))
    assert compare(base, two, rules).exit_status(strict=True) == 0
    rules = load_rules(write('schema_version = 1\n[[thresholds]]\nmetric = "launches"\nabsolute = "2 us"\n'))
    with pytest.raises(InputError, match=r"line 4.*launches is in 1, and this is time"):
        compare(base, two, rules)


def test_the_nearest_file_is_found(write, tmp_path, monkeypatch):
    """Here or in a folder above; without one the defaults."""
    write(EXAMPLE)
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert find_rules().baselines == tmp_path / "guard"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "missing key schema_version"),
        ("schema_version = 1\nthreshold = 3", "line 2.*unknown key 'threshold' .did you mean thresholds"),
        ("schema_version = 1\nthresholds = 3", "write each as a table"),
        ("schema_version = 1\nbaselines = 3", "not the name of a folder"),
        ("schema_version = 1\n[[thresholds]]\nmetric = 3\nrelative = 1", "line 3.*3 is not a pattern"),
        ("schema_version = 1\n[[thresholds]]\nmetrc = 'x'", "line 3.*did you mean metric"),
        ("schema_version = 1\n[[thresholds]]\nmetric = 'x'", "sets nothing"),
        ("schema_version = 1\n[[thresholds]]\nrelative = 'much'", "line 3.*not a quantity"),
        ("schema_version = 1\n[[thresholds]]\nrelative = -0.1", "line 3.*below zero"),
        ("schema_version = 1\n[[thresholds]]\nrelative = nan", "not a finite number"),
        ("schema_version = 1\n[[thresholds]]\nabsolute = 'inf s'", "not an amount"),
        ("schema_version = 1\n[[thresholds]]\nabsolute = '-2 s'", "below zero"),
        ("schema_version = 1\n[[thresholds]]\ngates = 1", "neither true nor false"),
        ("schema_version = 1\n[[thresholds]]\nby = 'luck'", "unknown way to judge 'luck'"),
    ],
)
def test_a_fault_names_file_line_and_key(write, text, words):
    """Nothing is ignored."""
    with pytest.raises(InputError, match=words) as error:
        load_rules(write(text))
    assert "moebench.toml" in str(error.value)
