"""`moebench list`: what there is, as a table or as JSON objects with a name."""

import json

import pytest

from moebench.cli.list_ import KINDS
from moebench.workloads.load import load_suite

KNOWN = {
    "suites": "hetu",
    "systems": "hetumoe",
    "gates": "switch",
    "kernels": "topk_gate",
    "exchanges": "leader",
    "parts": "qkv+a2a",
    "models": "mixtral-8x7b",
    "topologies": "4x8-titan-rtx",
    "hardware": "titan-rtx",
    "claims": "hetu-h1",
    "figures": "hetu/speedup-deepspeed",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_lists_names(moebench, kind):
    """JSON is one list of objects with `name`, and nothing else on standard output; the table has the same names."""
    said = moebench("list", kind, "--json")
    assert said.status == 0
    entries = json.loads(said.out)
    names = [entry["name"] for entry in entries]
    assert KNOWN[kind] in names
    assert len(set(names)) == len(names)
    table = moebench("list", kind).out.splitlines()
    assert len(table) == len(entries) + 1
    assert [line.split()[0] for line in table[1:]] == names


def test_claims_say_what_is_claimed_and_whose_it_is(moebench):
    """The claim in words, its source, and only those of one suite where that is asked."""
    said = moebench("list", "claims", "--suite", "hetu", "--json")
    entries = {entry["name"]: entry for entry in json.loads(said.out)}
    assert {entry["paper"] for entry in entries.values()} == {"hetu"}
    assert entries["hetu-h1"]["claim"] == "step speedup of hetumoe against deepspeed, gate switch, batch size 32"
    assert entries["hetu-c2"]["where"] == "Tutel issue #214, a maintainer (independent counter-evidence)"
    assert "choose one of" in moebench.refused("list", "claims", "--suite", "hetumoe")
    assert "belong to no suite" in moebench.refused("list", "gates", "--suite", "hetu")
    names = [f"hetu/{figure.name}" for figure in load_suite("hetu").figures]
    figures = json.loads(moebench("list", "figures", "--suite", "hetu", "--json").out)
    assert [entry["name"] for entry in figures] == names


def test_topologies_say_how_large_they_may_be(moebench):
    """The most nodes of the node type, more than the listed sizes."""
    entries = {entry["name"]: entry for entry in json.loads(moebench("list", "topologies", "--json").out)}
    assert entries["4x8-titan-rtx"]["max_nodes"] == 128


def test_an_unknown_kind_lists_the_kinds(moebench):
    """`list` of something else says what can be listed."""
    error = moebench.refused("list", "papers")
    for kind in KINDS:
        assert kind in error


def test_this_machine_is_listed_once_measured(moebench, tmp_path, monkeypatch):
    """Before `calibrate` this machine is left out rather than an error."""
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    said = moebench("list", "topologies", "--json")
    assert said.status == 0
    assert "this-machine" not in said.out


def test_kernels_say_who_implements_them_and_where(moebench):
    """Formula, implementations, and the devices of each: Triton's code needs a GPU."""
    entries = {entry["name"]: entry for entry in json.loads(moebench("list", "kernels", "--json").out)}
    gate = entries["topk_gate"]
    assert gate["implementations"][:3] == ["reference", "torch", "triton"]
    assert gate["devices"]["triton"] == ["cuda"]
    assert gate["devices"]["torch"] == ["cpu", "cuda"]
    assert "softmax" in gate["formula"]
    assert {"hetu", "tutel", "deepspeed", "fastmoe"} <= set(entries["layout"]["implementations"])
    line = next(line for line in moebench("list", "kernels").out.splitlines() if line.startswith("topk_gate "))
    assert "triton: cuda; others: cpu and cuda" in line
