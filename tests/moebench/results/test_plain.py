"""Dataclasses survive the way through JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.cases.plan import Filters
from moebench.results.plain import from_plain, to_plain
from moebench.workloads.load import load_suite, load_topology, suite_names, topology_names
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite


@pytest.mark.parametrize("name", suite_names())
def test_suites_round_trip(name):
    """Every suite of the package is the same after run.json."""
    suite = load_suite(name)
    assert from_plain(Suite, json.loads(json.dumps(to_plain(suite)))) == suite


@pytest.mark.parametrize("name", topology_names())
def test_topologies_round_trip(name, measured_machine):
    """Every topology, its hardware and the source of each parameter, is the same after run.json."""
    topology = load_topology(name)
    assert from_plain(Topology, json.loads(json.dumps(to_plain(topology)))) == topology


names = st.lists(st.text(max_size=8), max_size=3).map(tuple)


@given(names, st.lists(st.integers(), max_size=3).map(tuple), st.dictionaries(st.text(), st.text()), st.booleans())
def test_filters_round_trip(systems, batch_sizes, overrides, quick):
    """Any filters are the same after run.json."""
    filters = Filters(systems=systems, batch_sizes=batch_sizes, overrides=overrides, quick=quick)
    assert from_plain(Filters, json.loads(json.dumps(to_plain(filters)))) == filters


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"quick": 1}, r"Filters\.quick: expected bool, found 1"),
        ({"batch_sizes": [True]}, r"Filters\.batch_sizes\[0\]: expected int, found True"),
        ({"gates": "switch"}, r"Filters\.gates: expected a list, found 'switch'"),
        ({"colour": "red"}, r"Filters: unknown key 'colour'"),
        ([], r"Filters: expected an object, found \[\]"),
    ],
)
def test_wrong_data_say_where(data, words):
    """The error names the key and what was expected."""
    with pytest.raises(ValueError, match=words):
        from_plain(Filters, data)
