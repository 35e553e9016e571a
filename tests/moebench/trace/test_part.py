"""Parts as programs: what they send, and what a fused kernel makes of chunks."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from moebench.cases.case import Case
from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from moebench.trace.errors import Unsupported
from moebench.trace.part import programs_of
from moebench.trace.serialise import programs_from_json, programs_to_json
from moebench.workloads.load import load_topology
from moebench.workloads.part import workload_of

PAIRS = ("qkv+a2a", "a2a+outproj", "ag+scatter+groupedgemm", "groupedgemm+gather+rs")


@cache
def machine(name="1x8-h800"):
    return load_topology(name)


def traced(part, system, model="", topology="1x8-h800", **sizes):
    workload = workload_of(part, {"tokens": 8192, "products": 2, **sizes}, model)
    case = Case("suite", "experiment", system, workload, topology, topology.partition("-")[0], "sim")
    return programs_of(case, machine(topology))


def run(programs, topology="1x8-h800"):
    return replay(programs, machine(topology), nominal(machine(topology).parameters()))


@pytest.mark.parametrize("model", ["internal-352b", "deepseek-moe"])
@pytest.mark.parametrize("part", PAIRS)
def test_tiles_of_a_fused_kernel_cost_what_it_costs_in_one_piece(part, model):
    """As many FLOPs and bytes, the same time on the device, on the links and on the host; what overlaps is shorter."""
    [serial], [fused] = traced(part, "serial", model), traced(part, "fused", model)
    for what in ("flops", "bytes"):
        whole, tiles = (sum(getattr(op, what) for op in one.ops) for one in (serial, fused))
        assert tiles == pytest.approx(whole, rel=1e-4)
    whole, tiles = run((serial,)), run((fused,))
    for resource in ("compute", "link", "host"):
        assert tiles.busy_s[resource] == pytest.approx(whole.busy_s[resource], rel=0.02), resource
    assert tiles.step_time_s < whole.step_time_s
    assert tiles.step_time_s >= max(whole.busy_s["compute"], whole.busy_s["link"])
    assert {op.tiles for op in fused.ops} == {1, 8}
    assert "assumes a fused kernel" in fused.notes[-1]
    assert programs_from_json(programs_to_json((fused,))) == (fused,)


def test_chunks_that_run_as_they_are_pay_for_their_starts():
    """At two chunks a part overlaps, and has a second start of everything; sixty-four of them cost more than none."""
    serial, two, many = (
        run(traced("a2a+outproj", system, "deepseek-moe"))
        for system in ("serial", "chunked+chunks=2", "chunked+chunks=64")
    )
    assert two.busy_s["host"] > serial.busy_s["host"]
    assert many.step_time_s > serial.step_time_s


@pytest.mark.parametrize("tiles", [2, 16])
def test_a_tile_takes_its_share_of_the_whole(tiles):
    """Of a collective of a given number of bytes, and of its start."""
    [program] = traced("dispatch", "all-gather", d_model=4096, top_k=1)
    ops = tuple(
        op if op.collective is None else replace(
            op, collective=replace(op.collective, tiles=tiles, bytes_per_peer=op.collective.bytes_per_peer // tiles)
        )
        for op in program.ops
    )  # fmt: skip
    whole, part = run((program,)), run((replace(program, ops=ops),))
    np.testing.assert_allclose(part.busy_s["communication"], whole.busy_s["communication"] / tiles)


def test_what_is_sent_is_what_the_formulas_say():
    """k rows of every token to seven of eight ranks; everybody's tokens to seven; half as many bytes in BF16."""
    row = 8192
    for system, rows in (("all-to-all", 3 * 1024 * 7 / 8), ("all-gather", 7 * 1024), ("reduce-scatter", 7 * 1024)):
        found = run(traced("dispatch", system, d_model=4096, top_k=3))
        assert found.link_use["link"].rank_bytes == rows * row
    sent = {
        system: run(traced("gradient-sum", system, topology="4x8-h800", parameters=8_000_000), "4x8-h800")
        for system in ("fp32-reduce-scatter", "bf16-all-to-all", "bf16-ring")
    }
    assert {name: one.link_use["nic"].rank_bytes for name, one in sent.items()} == {
        "fp32-reduce-scatter": 24e6, "bf16-all-to-all": 12e6, "bf16-ring": 12e6,
    }  # fmt: skip
    times = {name: float(one.step_time_s[0]) for name, one in sent.items()}
    assert max(times["bf16-all-to-all"], times["bf16-ring"]) < times["fp32-reduce-scatter"]  # no hop meets another


def test_attention_on_every_gpu_hides_inside_the_node():
    """Between nodes as many bytes as where it is cut; inside one all of it, while the experts' travel."""
    sizes = {"attention_mb": 512, "expert_mb": 10000, "sent_percent": 100, "of_part": 0}
    cut, whole = (
        run(traced("parameter-sync", system, topology="4x8-h800", **sizes), "4x8-h800")
        for system in ("tp-attention", "sp-attention")
    )
    assert whole.link_use["nic"].rank_bytes == pytest.approx(cut.link_use["nic"].rank_bytes, rel=1e-6)
    assert cut.link_use["nic"].rank_bytes == pytest.approx(2 * (10e9 + 64e6) * 3 / 4, rel=1e-6)
    assert cut.link_use["link"].rank_bytes == 0
    assert whole.link_use["link"].rank_bytes == pytest.approx(2 * 512e6 * 7 / 8, rel=1e-6)
    assert whole.step_time_s == pytest.approx(cut.step_time_s, rel=0.01)
    part = run(traced("parameter-sync", "sp-attention", topology="4x8-h800", **sizes | {"of_part": 1}), "4x8-h800")
    assert part.link_use["link"].rank_bytes == pytest.approx(8 * whole.link_use["link"].rank_bytes, rel=1e-6)


@pytest.mark.parametrize(
    ("part", "system", "sizes", "words"),
    [
        ("qkv+a2a", "fused", {"tokens": 8200}, "1025 rows are no whole tiles of 128"),
        ("qkv+a2a", "serial", {"tokens": 8193}, "tokens = 8193 is not divisible by ranks = 8"),
        ("gradient-sum", "bf16-ring", {"parameters": 8}, "among replicas on several nodes, and there is one"),
        ("ag+scatter+groupedgemm", "serial", {"products": 3}, "products = 3: 1, or 2 with a gate's"),
        ("parameter-sync", "tp-attention", {"of_part": 2}, "of_part = 2: 1 where"),
        ("a2a+outproj", "chunked+chunks=3", {}, "chunks = 3 can't cut the 1024 tokens of a rank"),
        ("dispatch", "all-to-all", {"tokens": 8, "d_model": 1, "top_k": 3}, "top_k = 3 rows of 1 tokens can't go to 8"),
    ],
)
def test_what_has_no_meaning_is_unsupported(part, system, sizes, words):
    """With the sizes that don't fit."""
    more = {"attention_mb": 1, "expert_mb": 1, "sent_percent": 1, "topology": "4x8-h800"} if "of_part" in sizes else {}
    with pytest.raises(Unsupported, match=words):
        traced(part, system, "mixtral-8x7b", **sizes, **more)


def test_nothing_to_send_is_no_error():
    """No tokens at all."""
    for system in ("all-to-all", "all-gather", "reduce-scatter"):
        assert run(traced("dispatch", system, tokens=0, d_model=8, top_k=2)).link_use["link"].rank_bytes == 0
