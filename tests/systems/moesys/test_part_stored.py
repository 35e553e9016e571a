"""A step with stored states as a part: right by every way, from real files that are named when they are damaged."""

import os

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.systems.moesys.part_stored import BATCHES, _counts, _order, disk_bytes, tiers
from moebench.systems.moesys.shard_files import StorageError
from moebench.systems.part_interface import Setting
from moebench.systems.part_registry import make, problem
from moebench.systems.scratch import VARIABLE
from moebench.workloads.errors import InputError
from moebench.workloads.part import PARTS, workload_of

PART = "stored-step"
SIZES = {"tokens": 24, "d_model": 20, "d_ffn": 12, "experts": 6, "top_k": 2, "layers": 3, "accumulated": 1}


def part(system="2d", routing="zipf-1.5", device="cpu", ranks=1, **sizes):
    """On one rank, in FP64."""
    workload = workload_of(PART, SIZES | sizes, routing=routing)
    return make(Setting(workload, system, described_group(ranks), torch.device(device), torch.float64))


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Where the files lie."""
    (tmp_path / "files").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "files"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a disk's time, nothing that these tests could see
    return tmp_path / "files"


@pytest.mark.parametrize("options", ["", "+cache_percent=0+slots=1", "+cache_percent=100+policy=lfu", "+policy=moesys"])
@pytest.mark.parametrize("ahead", PARTS[PART].systems)
def test_every_way_trains_as_weights_in_memory_do(ahead, options, scratch):
    """Outputs and gradients of steps that depend on all updates before; no file is left behind."""
    call = part(ahead + options, accumulated=2)
    found = [call.run() for _ in range(3)]
    assert call.wrong(found[-1]) is None
    assert "tokens is off" in call.wrong((found[-1][0] * 1.001, found[-1][1]))
    assert "gradient is off" in call.wrong((found[-1][0], found[-1][1] * 1.001))
    assert len(list(scratch.glob("moebench-states-*/states/*.shard"))) >= 18
    del call
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("sizes", [{"tokens": 0}, {"experts": 1, "top_k": 1}, {"layers": 1}, {"d_ffn": 1, "tokens": 1}])
def test_odd_sizes_have_a_meaning(sizes):
    """No tokens, one expert, one layer, one row."""
    call = part(**sizes)
    for _ in range(2):
        found = call.run()
    assert call.wrong(found) is None


def test_a_damaged_or_missing_shard_is_named_and_the_rest_is_as_it_was(scratch):
    """By the step that needs it; with the file put back it goes on, and is right."""
    call = part("none+cache_percent=0+slots=1")
    call.run()
    (path, *_) = sorted(scratch.glob("moebench-states-*/states/layer0001-*.shard"))
    good = path.read_bytes()
    for bad in (good[:-3] + b"bad", None):
        path.unlink() if bad is None else path.write_bytes(bad)
        with pytest.raises(StorageError, match=rf"{path.name} \(layer 1, expert 0\): (damaged|missing)"):
            _until_it_is_needed(call)
    path.write_bytes(good)
    call.run()


def _until_it_is_needed(call):
    """By one of the batches."""
    for _ in range(BATCHES):
        call.run()


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(scratch, monkeypatch):
    """By the part itself, with what is needed; a folder that is not there likewise."""
    with pytest.raises(InputError, match=r"expert states of .* need .* bytes .*: nothing was written"):
        part(d_model=20_000, d_ffn=200_000, experts=2000)
    assert list(scratch.iterdir()) == []
    monkeypatch.setenv(VARIABLE, str(scratch / "none"))
    with pytest.raises(InputError, match="none: No such file or directory"):
        part()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"layers": 0}, "layers = 0: must be at least 1"),
        ({"accumulated": 0}, "accumulated = 0"),
        ({"tokens": 25}, "tokens = 25 is not divisible by ranks = 2"),
        ({"experts": 7}, "experts = 7 is not divisible by ranks = 2"),
        ({"top_k": 7}, "top_k = 7: above experts = 6"),
        ({"d_model": 4}, "d_model = 4: below experts = 6"),
        ({"routing": "trained"}, "routing trained: a step's is drawn"),
        ({"system": "2d+cache_percent=101"}, "a cache holds 100 % of the states at most"),
    ],
)
def test_what_has_no_meaning_is_told(sizes, said):
    """With its size."""
    given = {"routing": "zipf-1", "system": "2d", **sizes}
    routing, system = given.pop("routing"), given.pop("system")
    assert said in problem(workload_of(PART, SIZES | given, routing=routing), system, None, 2, 2, 1)


def test_a_described_routing_has_every_choice_of_every_token():
    """Another one in each batch, with the same experts popular, and in each layer for other experts."""
    workload = workload_of(PART, SIZES, routing="zipf-1.5")
    by_rank, sums = _counts(workload, 1, 0)
    assert sums == by_rank[0]
    assert sum(sums) == 2 * SIZES["tokens"]
    assert sums != _counts(workload, 1, 1)[1]
    many = workload_of(PART, {**SIZES, "tokens": 4000}, routing="zipf-1.5")
    popular = [max(range(6), key=_counts(many, 1, batch)[1].__getitem__) for batch in range(BATCHES)]
    assert len(set(popular)) == 1  # of one popularity
    orders = [_order(SIZES["experts"], layer).tolist() for layer in range(SIZES["layers"])]
    assert len({tuple(order) for order in orders}) == 3


def test_bytes_of_each_tier():
    """Slots, cache and files as the storage takes them; the paper's inequalities beside."""
    workload = workload_of(PART, {**SIZES, "tokens": 2000}, routing="zipf-0")  # every expert works
    expert = 2 * SIZES["d_model"] * SIZES["d_ffn"]
    found = tiers(workload, "2d+cache_percent=50+slots=3", 2)
    assert found["device"][0] == 2 * 3 * expert * 2
    assert found["device"][1] == 4 * 6 * expert
    assert found["host"][1] == 16 * 18 * expert
    assert found["disk"] == (disk_bytes(workload, 2), 12 * 18 * expert)
    assert tiers(workload, "2d+cache_percent=100", 2)["host"][0] > found["host"][0]
