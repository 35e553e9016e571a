"""Hit rates of caches of expert states: as a study's rows, held to their definitions, and in a report."""

import json
import re
from dataclasses import replace

import pytest
import torch

from moebench.cases.case import Case
from moebench.cases.plan import Filters, plan
from moebench.imports.routing import Recorded, write
from moebench.kernels.collectives.group import described_group
from moebench.part_study import expected, rows_of
from moebench.report.cache_view import answer, curves, figures, tables
from moebench.results.plain import from_plain, to_plain
from moebench.results.table import table_of
from moebench.systems.moesys.part_cache import capacities, expert_cache, requests
from moebench.systems.part_interface import Setting
from moebench.systems.part_registry import problem
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite
from moebench.workloads.part import PARTS, PartWorkload, workload_of
from moebench.workloads.suite import Suite

PART = "expert-cache"
SIZES = {
    "tokens": 3, "experts": 5, "top_k": 2, "layers": 2, "steps": 12, "turn_steps": 5, "passes": 3, "cache_sizes": 4,
}  # fmt: skip
SYSTEMS = (
    *PARTS[PART].systems, "moesys+threshold=0", "moesys+threshold=4+period=5", "moesys+decay_percent=0+period=3",
    "moesys+victim=least-above-threshold", "moesys+fallback=least+period=7",
)  # fmt: skip
TEXT = """
schema_version = 1
title = "Caches"
paper = "none"
[[experiments]]
kind = "part"
name = "storage"
title = "Caches"
question = "Who has most hits?"
metric = "hit_rate"
sizes = ["1x1"]
node_types = ["a100-80-nvme"]
[[experiments.parts]]
part = "expert-cache"
systems = ["moesys", "lfu", "lru", "clairvoyant", "step-before", "moesys+threshold=0"]
routings = ["zipf-1.5", "./own.npz"]
[[experiments.readings]]
name = "small"
sizes = { tokens = 4, experts = 8, top_k = 2, layers = 1, steps = 12, turn_steps = 0, passes = 1, cache_sizes = 3 }
"""


def case_of(system, routing="zipf-1.5", **sizes):
    """One that is studied."""
    return Case("s", "storage", system, workload_of(PART, SIZES | sizes, routing=routing), "1x1-a", "1x1", "count")


def rates(system, **sizes):
    """By share of the states in the cache; under None the one that stands for the case."""
    rows = [row for row in rows_of(case_of(system, **sizes), "a") if row.metric.startswith("hit_rate")]
    return {row.detail.get("cached"): row.value for row in rows}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("passes", [1, 3])
def test_every_way_is_what_its_definition_says(system, passes):
    """States in lists and sets; of the one that knows the future, every choice there is. A false rate is told."""
    own = tuple((name, {**SIZES, "passes": passes}[name]) for name in PARTS[PART].sizes)
    workload = PartWorkload(PART, own, dtype="fp32", routing="zipf-1")
    call = expert_cache(Setting(workload, system, described_group(1), torch.device("cpu"), torch.float32))
    found = call.run()
    assert call.wrong(found) is None
    assert "by definition" in call.wrong([found[0] + 0.01, *found[1:]])


def test_rows_say_the_rate_of_each_cache():
    """The one in the middle stands for the case; a larger cache hits as often at least; the bound is above all."""
    found = {name: rates(name) for name in ("moesys", "lru", "lfu", "clairvoyant")}
    most = found.pop("clairvoyant")
    assert list(most)[1:] == [0.2, 0.4, 0.6, 0.8]
    assert most[None] == most[0.6]
    assert [most[share] for share in (0.2, 0.4, 0.6, 0.8)] == sorted(most[share] for share in (0.2, 0.4, 0.6, 0.8))
    assert all(rate <= most[share] + 1e-12 for own in found.values() for share, rate in own.items())
    assert len({tuple(own.values()) for own in found.values()}) == 3
    before = {row.metric: row.value for row in rows_of(case_of("step-before"), "a")}
    assert set(before) == {"hit_rate", "experts_used"}
    assert before["hit_rate"] == rates("step-before", passes=1)[None]
    assert 0 < before["hit_rate"] < 1
    assert 0 < before["experts_used"] < 1


def test_no_tokens_no_steps_one_expert():
    """Nothing is asked for and nothing hit; one expert is always there."""
    assert set(rates("lru", tokens=0).values()) == {0.0}
    assert set(rates("clairvoyant", steps=0, turn_steps=0).values()) == {0.0}
    one = {"experts": 1, "top_k": 1, "layers": 1, "cache_sizes": 1}
    assert capacities(case_of("lru", **one).workload) == [0]
    assert rates("lru", **one) == {None: 0.0, 0.0: 0.0}
    assert rates("step-before", **one, turn_steps=0)[None] == 1.0


def test_a_turn_makes_others_popular():
    """With the same seeds the same states are asked for before, and others after."""
    stays, turns = (requests(case_of("lru", turn_steps=turn, passes=1).workload) for turn in (0, 5))
    assert len(stays) == len(turns) == 12
    assert stays != turns
    assert requests(case_of("lru", turn_steps=5, passes=3).workload)[0] == [*turns[0], *turns[0][::-1], *turns[0][::-1]]


def test_routers_are_trained_for_it(monkeypatch):
    """One a layer, once for all sizes of step and policies."""
    trained = []

    def of_gate(label, experts, tokens, seed):
        trained.append((label, experts, seed))
        return Recorded(torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)), "")

    monkeypatch.setattr("moebench.imports.routing.of_gate", of_gate)
    for tokens in (3, 4):
        rows_of(case_of("lru", routing="trained", tokens=tokens, experts=6, turn_steps=0), "a")
    assert trained == [("topk-2", 6, 0), ("topk-2", 6, 1)]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"experts": 0}, "experts = 0: must be at least 1"),
        ({"cache_sizes": 0}, "cache_sizes = 0"),
        ({"top_k": 6}, "top_k = 6: above experts = 5"),
        ({"passes": 2}, "passes = 2: 1, forward, or 3"),
        ({"system": "moesys+decay_percent=101"}, r"moesys\+decay_percent=101: hits decay to 100 % of themselves at"),
        ({"routing": "own.npz"}, "turn_steps = 5: a recorded routing changes when it did"),
        ({"routing": "own.npz", "turn_steps": 0}, r"layers = 2: a recorded routing is of one; write \{layer\}"),
    ],
)
def test_sizes_without_a_meaning_are_told(sizes, said):
    """With what there is."""
    given = {"routing": "zipf-1", "system": "lru", **sizes}
    routing, system = given.pop("routing"), given.pop("system")
    told = problem(workload_of(PART, SIZES | given, routing=routing), system, None, 1, 1, 1)
    assert re.match(said, told)


def test_a_suite_with_such_sizes_is_refused(suite, tmp_path):
    """Before anything is counted."""
    (tmp_path / "wrong.toml").write_text(TEXT.replace("passes = 1", "passes = 2"))
    with pytest.raises(InputError, match=r"wrong\.toml: experiment storage: part expert-cache: passes = 2: 1, forward"):
        plan(load_suite(str(tmp_path / "wrong.toml")), Filters())


@pytest.fixture
def suite(tmp_path):
    """With a routing that was recorded."""
    logits_TE = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    write(Recorded(logits_TE, "a test"), tmp_path / "own.npz")
    (tmp_path / "caches.toml").write_text(TEXT)
    return load_suite(str(tmp_path / "caches.toml"))


def test_a_suite_says_which_routings(suite, tmp_path):
    """A file by its name in a case's, wherever the suite lies; it survives a run's file."""
    assert suite.experiments[0].parts[0].routings == ("zipf-1.5", str(tmp_path / "own.npz"))
    cases = plan(suite, Filters())
    assert f"storage/{PART}/own-t4-e8-k2-l1-s12-u0-p1-c3/1x1-a100-80-nvme/lru" in {case.name for case in cases}
    assert from_plain(Suite, json.loads(json.dumps(to_plain(suite)))) == suite
    assert expected(cases[0])[0] > 0
    assert plan(suite, Filters(systems=("moesys+period=9",)))[0].system == "moesys+period=9"
    with pytest.raises(InputError, match=r"unknown victim of system .*choose one of: least-above-"):
        plan(suite, Filters(systems=("moesys+victim=all",)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"./own.npz"', '"./other.npz"', r"line 16.*routings: the recorded routing .*other\.npz is not there"),
        ('"zipf-1.5", ', '"zipf-x", ', "routing 'zipf-x': write zipf-1.5"),
        ('"zipf-1.5", ', '"zipf-101", ', "with that exponent, 0 to 100"),
        ('routings = ["zipf-1.5", "./own.npz"]', "", "part expert-cache needs routings"),
    ],
)
def test_a_routing_that_is_none_is_told(suite, tmp_path, old, new, said):
    """With its place in the file."""
    (tmp_path / "wrong.toml").write_text(TEXT.replace(old, new))
    with pytest.raises(InputError, match=said) as told:
        load_suite(str(tmp_path / "wrong.toml"))
    assert "wrong.toml, line" in str(told.value)


def test_the_report_works_its_words_out_of_the_rows(suite):
    """How many points there are, who has most hits, by how much; a panel a routing; the settings in a table."""
    rows = [row for case in plan(suite, Filters()) for row in rows_of(case, "a")]
    own, experiment = table_of(rows), suite.experiments[0]
    assert len(curves(own)) == 2 * 5 * 3
    told = answer(experiment, own)
    assert told.startswith("Of 6 points, each of a routing, size of step, way to ask and size of cache, the most")
    counted = {name: int(count) for name, count in re.findall(r"(moesys|lfu|lru) at (\d)", told)}
    assert set(counted) == {"moesys", "lfu", "lru"}
    assert sum(counted.values()) >= 6
    worse = [replace(row, value=0.0) if row.system == "lru" and row.metric.startswith("hit") else row for row in rows]
    assert "lru at 0" in answer(experiment, table_of(worse))
    (drawn,) = figures(experiment, own)
    assert drawn.svg.count(">zipf-1.5<") == 2  # wide and narrow
    assert ">own<" in drawn.svg
    prefetch, settings = tables(own)
    assert [row[0] for row in prefetch.rows] == ["zipf-1.5", "own"]
    assert {row[3] for row in settings.rows} == {"moesys", "moesys+threshold=0"}
