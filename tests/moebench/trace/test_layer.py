"""From a system and a workload to the programs of all ranks."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import moebench.trace.answers as answers_module
import moebench.trace.layer as layer_module
from moebench.kernels.host import UnansweredRead, read_ints
from moebench.kernels.region import region
from moebench.program import FORWARD
from moebench.systems.registry import get, systems
from moebench.trace.answers import RoutingAnswers
from moebench.trace.errors import Unsupported
from moebench.trace.layer import trace_layer
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.gates.registry import GATES, gate
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from moebench.workloads.routing import logits_for
from tests.moebench.trace.ragged import RAGGED, RaggedLayer

DROPLESS = Conventions(capacity_rule="unlimited")
WORKLOAD = LayerWorkload(GateSpec("topk", 2), 1, 12, 16, 8, 8, routing=RoutingSpec("zipf"))


@pytest.mark.parametrize("name", sorted(set(systems()) - {"fastmoe", "fastermoe", "megatron_allgather"}))
def test_padded_layer_is_one_program_for_any_number_of_ranks(name):
    """Nothing is read on the host, so no routing is computed, and the ranks are a range; leaders have their own."""
    workload = LayerWorkload(GateSpec("switch"), 1, 64, 2048, 64, 1440)
    first, *others = trace_layer(get(name), workload, 1440, COMMON, ranks_per_node=8)
    has_leaders = name == "hetumoe_leader"
    assert first.stands_for == range(0, 1440, 8 if has_leaders else 1)
    assert [len(program.stands_for) for program in others] == [1440 - 180] * has_leaders
    for program in (first, *others):
        assert (program.world, program.notes) == (1440, ())
        assert not [op for op in program.ops if op.kind == "host-read"]


@pytest.mark.parametrize(("input_gradient", "products"), [(True, 10), (False, 8)])
@pytest.mark.parametrize("gate", [GateSpec("switch"), GateSpec("gshard", 2)])
def test_flops_of_the_einsum_layer_equal_the_closed_form(gate, input_gradient, products):
    """Dispatch and combine: 10 S E C M, or 8 where the input needs no gradient; experts: 12 rows d h, or 10.

    Where no dimension is 1: torch turns a contraction over one element into a pointwise product, which counts none.
    """
    workload = LayerWorkload(gate, 2, 32, 24, 40, 8, input_gradient=input_gradient)
    (program,) = trace_layer(get("deepspeed"), workload, 4, COMMON)
    capacity = COMMON.capacity(64, 8, gate.top_k, 1.0)
    flops = {}
    for op in program.ops:
        flops[op.region] = flops.get(op.region, 0) + op.flops
    assert flops["dispatch"] + flops["combine"] == products * 64 * 8 * capacity * 24
    # Two products over 8 C rows, each with two in the backward; without input gradient the first has one.
    rows = 8 * capacity
    assert flops["experts"] == (12 if input_gradient else 10) * rows * 24 * 40
    forward = sum(op.flops for op in program.ops if op.phase == FORWARD and op.region != "gate")
    assert forward == 4 * 64 * 8 * capacity * 24 + 4 * rows * 24 * 40


def test_answers_are_those_of_the_reference_gate():
    """Counts by rank, their maximum, and what each rank receives, before capacity."""
    answers = RoutingAnswers(WORKLOAD, 4, DROPLESS)
    counts = [
        GATES["topk"].route(logits_for(WORKLOAD, rank), WORKLOAD.gate, DROPLESS, 1.0).counts_E.tolist()
        for rank in range(4)
    ]
    assert [list(answers.answer(rank, "expert_counts")) for rank in range(4)] == counts
    assert all(answers.answer(rank, "max_expert_count") == (max(map(max, counts)),) for rank in range(4))
    assert answers.answer(1, "received_counts") == tuple(n for row in counts for n in row[2:4])
    assert answers.received_rows(1) == sum(answers.answer(1, "received_counts"))
    assert sum(answers.received_rows(rank) for rank in range(4)) == 4 * 12 * 2


def test_routing_is_computed_only_for_what_is_read(monkeypatch):
    """The reference gate runs once a rank, when the first read needs it, and not again for cases that route alike."""
    calls = []
    original = GATES["topk"].choose

    def counted(logits_TE, *rest):
        calls.append(logits_TE.shape)
        return original(logits_TE, *rest)

    monkeypatch.setitem(GATES, "topk", replace(GATES["topk"], choose=counted))
    answers_module._routed.cache_clear()
    answers = RoutingAnswers(WORKLOAD, 4, DROPLESS)
    assert calls == []
    answers.answer(2, "expert_counts"), answers.answer(2, "expert_counts")
    assert calls == [(12, 8)]
    answers.answer(0, "received_counts"), answers.answer(3, "max_expert_count")
    assert len(calls) == 4
    alike = replace(DROPLESS, auxiliary=2.0, name="as-shipped")
    RoutingAnswers(replace(WORKLOAD, input_gradient=False), 4, alike).answer(0, "expert_counts")
    assert len(calls) == 4
    answers_module._routed.cache_clear()


def test_rounds_are_counted_on_some_ranks():
    """Two ranks stand for all, which the programs say; on two each counts its own."""
    workload = replace(WORKLOAD, gate=GateSpec("base"), sequence=40, routing=RoutingSpec())
    answers = RoutingAnswers(workload, 8, COMMON)
    rounds = [answers.answer(rank, "rounds") for rank in range(8)]
    own = [
        GATES["base"].route(logits_for(workload, rank), workload.gate, COMMON, 1.0).rounds for rank in range(2)
    ]
    assert rounds == [(count,) for count in own] * 4
    for ranks in (2, 8):
        programs = trace_layer(get("reference"), workload, ranks, COMMON)
        assert len(programs) == len(set(own))
        notes = () if ranks == 2 else ("the rounds of gate base are those of 2 of the ranks",)
        assert {program.notes for program in programs} == {notes}


@pytest.mark.parametrize("conventions", [COMMON, DROPLESS], ids=["capacity", "dropless"])
@pytest.mark.parametrize(("name", "tokens"), [("base", 16), ("base", 13), ("expert-choice", 13), ("expert-choice", 1)])
def test_rules_that_fill_experts_evenly_need_no_run(name, tokens, conventions, monkeypatch):
    """Counts, kept ones too, are those of the rule; where it says them itself it does not run."""
    workload = replace(WORKLOAD, gate=gate(name), sequence=tokens)
    answers = RoutingAnswers(workload, 4, conventions)
    found = {quantity: answers.answer(1, quantity) for quantity in ("expert_counts", "kept_counts", "expert_loads")}
    rule = GATES[name]
    routing = rule.route(logits_for(workload, 1), workload.gate, conventions, 1.0)
    assert found["expert_counts"] == tuple(routing.counts_E.tolist())
    if tokens != 13 or name != "base":
        assert found["kept_counts"] == found["expert_counts"]
        assert found["expert_loads"] == tuple(4 * count for count in found["kept_counts"])
        monkeypatch.setitem(GATES, name, replace(rule, choose=None))
        assert RoutingAnswers(replace(workload, d_ffn=9), 4, conventions).answer(1, "expert_loads")


def test_kept_rows_are_those_with_a_slot():
    """After capacity: by rank, by expert, in all, as a rank sends and as it receives them."""
    answers = RoutingAnswers(WORKLOAD, 4, COMMON)
    kept = []
    for rank in range(4):
        routing = GATES["topk"].route(logits_for(WORKLOAD, rank), WORKLOAD.gate, COMMON, 1.0)
        kept.append([int((routing.keep_TK & (routing.experts_TK == expert)).sum()) for expert in range(8)])
        assert answers.answer(rank, "kept_counts") == tuple(kept[rank])
        assert answers.answer(rank, "kept_rows") == (sum(kept[rank]),)
        assert sum(kept[rank]) < sum(answers.answer(rank, "expert_counts"))
    received = [row[2:4] for row in kept]
    assert answers.answer(1, "received_kept_counts") == tuple(count for row in received for count in row)
    assert answers.answer(1, "received_kept_by_expert") == tuple(map(sum, zip(*received)))
    assert answers.answer(1, "received_kept_rows") == (sum(map(sum, received)),)
    assert answers.answer(3, "expert_loads") == tuple(map(sum, zip(*kept)))


def test_kept_rows_by_part_of_the_tokens():
    """Each rank's experts, part after part, add up to all that they get; one part is all; uneven parts are refused."""
    answers, held = RoutingAnswers(WORKLOAD, 4, COMMON), WORKLOAD.experts // 4
    for rank in range(4):
        whole = answers.answer(rank, "received_kept_by_expert")
        question = answers.question("received_kept_by_part", 3 * held)
        flat = answers.answer(rank, question)
        by_part = [flat[begin : begin + held] for begin in range(0, 3 * held, held)]
        assert tuple(map(sum, zip(*by_part))) == whole
        assert rank or len(set(by_part)) > 1
        assert answers.answer(rank, answers.question("received_kept_by_part", held)) == whole
    assert answers.question("received_kept_by_expert", held) == "received_kept_by_expert"
    with pytest.raises(UnansweredRead, match="12 tokens of a rank are not 5 equal parts"):
        answers.answer(0, answers.question("received_kept_by_part", 5 * held))


def test_ranks_with_equal_answers_share_a_program():
    """Exact routing sends every rank the same: one program, although it reads."""
    workload = replace(WORKLOAD, sequence=16, routing=RoutingSpec("exact"))
    (program,) = trace_layer(RAGGED, workload, 4, DROPLESS)
    assert program.stands_for == range(4)


def test_many_distinct_ranks_are_grouped_by_received_rows(monkeypatch):
    """Above the limit each group is traced at its median rank, every rank is in one group, and a note says so."""
    monkeypatch.setattr(layer_module, "MOST_DISTINCT_PROGRAMS", 3)
    programs = trace_layer(RAGGED, WORKLOAD, 8, DROPLESS)
    assert len(programs) == 3
    assert sorted(rank for program in programs for rank in program.stands_for) == list(range(8))
    assert all(program.rank in program.stands_for for program in programs)
    assert all("8 distinct routings are grouped" in program.notes[0] for program in programs)
    answers = RoutingAnswers(WORKLOAD, 8, DROPLESS)
    groups = [sorted(answers.received_rows(rank) for rank in program.stands_for) for program in programs]
    assert all(lower[-1] <= upper[0] for lower, upper in pairwise(groups))


def test_few_programs_stand_for_ranks_that_receive_nearly_equally_many_rows(monkeypatch):
    """Nearly equal ranks share programs; where their rows differ by more, each is traced."""
    monkeypatch.setattr(layer_module, "ENOUGH_PROGRAMS", 3)
    assert len(trace_layer(RAGGED, WORKLOAD, 8, DROPLESS)) == 8
    monkeypatch.setattr(layer_module, "NEARLY_EQUAL", 100.0)
    programs = trace_layer(RAGGED, WORKLOAD, 8, DROPLESS)
    assert len(programs) == 3
    assert all("8 distinct routings are grouped" in program.notes[0] for program in programs)


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({"experts": 6}, 4, "not divisible"),
        ({"gate": GateSpec("topk", 9)}, 4, "top_k"),
    ],
)
def test_workload_without_meaning_is_unsupported(changes, ranks, reason):
    """The reason names the keys."""
    with pytest.raises(Unsupported, match=reason):
        trace_layer(get("deepspeed"), replace(WORKLOAD, **changes), ranks, COMMON)


def test_system_that_refuses_the_conventions_is_unsupported():
    """The system's own reason is passed on."""
    with pytest.raises(Unsupported, match="capacity_rule"):
        trace_layer(get("hetumoe"), WORKLOAD, 4, DROPLESS)


def test_read_that_nothing_answers_is_unsupported(monkeypatch):
    """No reference rule of these gates takes rounds."""

    def forward(self, x_TD):
        with region("gate"):
            read_ints(torch.zeros(1, dtype=torch.int64, device=x_TD.device), "rounds")

    monkeypatch.setattr(RaggedLayer, "forward", forward)
    with pytest.raises(Unsupported, match="rounds"):
        trace_layer(RAGGED, WORKLOAD, 4, DROPLESS)


def test_tracing_leaves_the_random_state_alone():
    """Two traces of one workload are equal, and torch's generator stands where it stood."""
    before = torch.get_rng_state()
    first = trace_layer(RAGGED, WORKLOAD, 2, DROPLESS)
    assert trace_layer(RAGGED, WORKLOAD, 2, DROPLESS) == first
    assert torch.equal(torch.get_rng_state(), before)
