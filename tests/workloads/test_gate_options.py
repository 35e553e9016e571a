"""Options of rules, labels that carry them, and what a layer of other choices is refused with."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.results.plain import from_plain, to_plain
from moebench.workloads.errors import InputError
from moebench.workloads.gates import options as gate_options
from moebench.workloads.gates.registry import GATES, gate, get_gate, parse_label
from moebench.workloads.layer import FIXED_TOP_K, GateSpec
from moebench.workloads.load import gate_spec


@pytest.mark.parametrize(
    ("label", "spec"),
    [
        ("switch", GateSpec("switch", 1)),
        ("gshard", GateSpec("gshard", 2)),
        ("topk", GateSpec("topk", 2)),
        ("topk-4", GateSpec("topk", 4)),
        ("ktop1-3", GateSpec("ktop1", 3)),
        ("sam", GateSpec("sam", 2)),
        ("sam-1+groups=4", GateSpec("sam", 1, (("groups", 4),))),
        ("sam+groups=8", GateSpec("sam", 2)),
        ("hash+map=balanced+seed=3", GateSpec("hash", 1, (("map", "balanced"), ("seed", 3)))),
        ("hash+seed=3+map=balanced", GateSpec("hash", 1, (("map", "balanced"), ("seed", 3)))),
        ("dense-to-sparse", GateSpec("dense-to-sparse", 1)),
        ("dense-to-sparse+threshold=1e-05", GateSpec("dense-to-sparse", 1, (("threshold", 1e-05),))),
        ("dense-to-sparse+tau_max=3", GateSpec("dense-to-sparse", 1, (("tau_max", 3.0),))),
    ],
)
def test_a_label_says_name_choices_and_options(label, spec):
    """In any order; options at their default are no part of the gate."""
    assert parse_label(label) == gate_spec(label) == spec
    assert parse_label(spec.label) == spec


@pytest.mark.parametrize("name", sorted(GATES))
def test_labels_round_trip(name):
    """Every rule with its own K, with another where it takes one, and with each option changed."""
    rule = GATES[name]
    found = [gate(name)]
    if name not in FIXED_TOP_K:
        found.append(gate(name, 3))
    for option, kind in gate_options.types_of(rule.options).items():
        default = getattr(rule.options(), option)
        if kind is not str:
            other = {bool: not default, int: default + 1, float: default + 0.25}[kind]
            with suppress(InputError):  # some only have a meaning beside others
                found.append(gate(name, **{option: other}))
    assert [parse_label(one.label) for one in found] == found
    assert len({one.label for one in found}) == len(found)
    assert (gate(name).label == name) == (name in FIXED_TOP_K)


@pytest.mark.parametrize("name", sorted(GATES))
def test_a_gate_survives_its_run(name):
    """As JSON of a run folder; numbers, words and truth values stay what they are."""
    options = {option: getattr(GATES[name].options(), option) for option in gate_options.types_of(GATES[name].options)}
    spec = GateSpec(name, 3, tuple(options.items()))
    again = from_plain(GateSpec, json.loads(json.dumps(to_plain(spec))))
    assert again == spec
    assert [type(value) for _, value in again.options] == [type(value) for _, value in spec.options]
    with pytest.raises(ValueError, match=r"options\[0\]: expected 2 values"):
        from_plain(GateSpec, {"name": name, "options": [["groups"]]})


@given(st.floats(1e-30, 1e30))
def test_any_number_survives_a_label(value):
    """Small and large floats too."""
    spec = gate("sam", alignment=value)
    assert parse_label(spec.label) == spec


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("swich", ["unknown gate 'swich'", "did you mean switch"]),
        ("switch-2", ["switch takes no number", "topk-2"]),
        ("hash-2", ["hash takes no number"]),
        ("topk-0", ["unknown gate 'topk-0'"]),
        ("topk-04", ["unknown gate"]),
        ("sam+group=4", ["unknown option of gate sam 'group'", "did you mean groups", "alignment, groups"]),
        ("sam+groups", ["+name=value"]),
        ("sam+groups=four", ["groups is a whole number, not 'four'"]),
        ("sam+groups=0", ["groups = 0", "at least 1"]),
        ("sam+groups=2+groups=2", ["named twice"]),
        ("switch+groups=2", ["unknown option of gate switch", "choose one of: none"]),
        ("hash+map=even", ["unknown map 'even'", "balanced, random"]),
        ("hash+vocabulary=99999999", ["must be at most"]),
        ("dense-to-sparse+schedule=cosine", ["constant, exponential, linear"]),
        ("dense-to-sparse+tau_min=3.0", ["0 < tau_min <= tau_max"]),
        ("dense-to-sparse+decay_steps=0", ["decay_steps = 0", "at least 1"]),
        ("dense-to-sparse+tau_max=nan", ["need 0 < tau_min"]),
        ("dense-to-sparse+threshold=1.5", ["threshold = 1.5"]),
    ],
)
def test_a_label_that_means_nothing_is_explained(label, words):
    """What was wrong, and what there is; with the place where it stands."""
    with pytest.raises(InputError) as error:
        parse_label(label, "my.toml")
    assert str(error.value).startswith("my.toml: ")
    for word in words:
        assert word in str(error.value)


def test_options_of_a_spec_are_checked_as_those_of_a_label():
    """A GateSpec made by hand: other names, other types, values without meaning."""
    for options, word in (
        ((("group", 4),), "unknown option"),
        ((("groups", "4"),), "a whole number, not '4'"),
        ((("groups", True),), "a whole number, not True"),
        ((("groups", 0),), "at least 1"),
    ):
        spec = GateSpec("sam", 2, options)
        assert word in get_gate("sam").problem(spec, conventions())
        with pytest.raises(InputError, match=word):
            gate_options.read(GATES["sam"].options, spec)


def conventions():
    from moebench.workloads.conventions import COMMON

    return COMMON


def test_options_are_sorted():
    """Two gates with the same options are equal, whatever order they were named in."""
    one = GateSpec("hash", 1, (("seed", 1), ("map", "balanced")))
    assert one == GateSpec("hash", 1, (("map", "balanced"), ("seed", 1)))
    assert one.label == "hash+map=balanced+seed=1"
    assert hash(one) == hash(gate("hash", map="balanced", seed=1))


@pytest.mark.parametrize("name", sorted(GATES))
def test_every_rule_says_what_it_is(name):
    """Formula, source, loss; its own options are valid; a fixed K is its default."""
    rule = GATES[name]
    assert rule.name == name
    assert all((rule.title, rule.formula, rule.source, rule.aux, rule.capacity))
    assert gate_options.read(rule.options, gate(name)) == rule.options()
    assert FIXED_TOP_K.get(name, rule.default_top_k) == rule.default_top_k
    assert rule.problem(gate(name), conventions()) is None
