"""FasterMoE: the predictor against its formula, the schedule's order, what shadows move; papers/baselines.md 4.3."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moebench.trace.layer as layer_module
from moebench.program import BACKWARD, FORWARD
from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from moebench.systems.fastermoe_schedule import group_steps
from moebench.systems.fastermoe_shadows import Settings
from moebench.systems.registry import get
from moebench.trace.answers import RoutingAnswers
from moebench.trace.layer import trace_layer
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from tests.moebench.sim.sim_machines import topology

DROPLESS = Conventions(capacity_rule="unlimited")
T, D, F, E, RANKS = 64, 24, 20, 16, 8
SKEWED = LayerWorkload(GateSpec("topk", 2), 1, T, D, F, E, routing=RoutingSpec("zipf", alpha=2.0))
FIVE = ["kept_rows", "received_kept_rows", "kept_counts", "received_kept_counts", "received_kept_by_expert"]
ROW, EXPERT = 4 * D, 4 * 2 * D * F  # bytes


def traced(name="fastermoe", work=SKEWED, ranks=RANKS, conventions=DROPLESS):
    return trace_layer(get(name), work, ranks, conventions)


def loads_of(work=SKEWED, ranks=RANKS):
    return RoutingAnswers(work, ranks, DROPLESS).answer(0, "expert_loads")


def starts(program, name, phase=None):
    full = f"moebench::{name}_start"
    return [op for op in program.ops if op.name == full and phase in (None, op.phase)]


def reads_of(program):
    return [op.name.removeprefix("host::") for op in program.ops if op.kind == "host-read"]


def test_the_papers_example_is_shadowed():
    """One of four experts with 90 % of 2 x 8192 rows, D = 1024: 70.9 ms fall to 5.3 ms, which HEAD misses."""
    settings, loads = Settings(), [14745, 547, 546, 546]
    assert settings.time_s(14745, 0, 1024) == pytest.approx(70.9e-3, rel=1e-3)
    assert settings.time_s(547, 1, 1024) == pytest.approx(5.3e-3, rel=5e-3)
    assert settings.shadowed(loads, 1024) == (0,)
    assert settings.shadowed([4096] * 4, 1024) == ()


def test_defaults_are_the_packages():
    """50 Gb/s, 11.5 TFLOP/s, alpha 2, 4-byte data, groups of 4 (papers/baselines.md 4.3)."""
    assert Settings() == Settings(
        group=4, shadows=True, network_gbit_per_s=50.0, products_tflops=11.5, alpha=2.0
    )
    rows, d_model = 1000, 512
    computed = 3 * 4 * 2 * d_model**2 * rows / 11.5e12
    sent = 4 * d_model * 4 * rows / 6.25e9
    weights = 3 * 2 * 2 * d_model**2 * 4 / 6.25e9
    assert Settings().time_s(rows, 3, d_model) == pytest.approx(computed + sent + weights)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=12), st.sampled_from([16, 256, 2048]))
def test_the_greedy_choice_stops_where_time_first_rises(loads, d_model):
    """The busiest experts first, ties by id, as many as make T fall without a break; never all."""
    settings = Settings()
    chosen = settings.shadowed(loads, d_model)
    ordered = sorted(range(len(loads)), key=lambda e: (-loads[e], e))
    assert set(chosen) == set(ordered[: len(chosen)])
    assert len(chosen) < len(loads)
    times = [settings.time_s(loads[e], n, d_model) for n, e in enumerate(ordered)]
    count = next((n for n in range(1, len(times)) if times[n] >= times[n - 1]), len(times)) - 1
    assert len(chosen) == count


@given(st.integers(1, 20), st.integers(1, 9))
def test_every_pair_of_ranks_meets_once(ranks, group):
    """Whatever the sizes, also where the group does not divide the ranks: who sends is whom the other expects."""
    steps = [group_steps(ranks, group, rank // group) for rank in range(ranks)]
    assert {len(of_rank) for of_rank in steps} == {-(-ranks // group)}
    for rank, of_rank in enumerate(steps):
        assert sorted(peer for to, _ in of_rank for peer in to) == list(range(ranks))
        for number, (to, _) in enumerate(of_rank):
            assert all(rank in steps[peer][number][1] for peer in to)


def test_variants_bear_their_settings():
    """Only what differs is in the name; a bad option is refused with the valid ones."""
    assert get("fastermoe+group=4").name == "fastermoe"
    one = get("fastermoe+shadows=false+group=2")
    assert one.name == "fastermoe+group=2+shadows=false"
    assert get(one.name).settings == Settings(group=2, shadows=False)
    assert "group 2" in one.title
    for text, words in (
        ("fastermoe+size=2", "alpha, group, network_gbit_per_s, products_tflops, shadows"),
        ("fastermoe+group=two", "group is a whole number, not 'two'"),
        ("fastermoe+shadows=yes", "shadows is true or false"),
        ("fastermoe+alpha=0", "alpha = 0.0: must be positive"),
        ("fastermoe+alpha=nan", "must be positive"),
        ("fastermoe+group=0", "group = 0: must be positive"),
        ("fastmoe+group=2", "fastmoe has no options"),
    ):
        with pytest.raises(InputError, match=words.replace("+", r"\+")):
            get(text)


def test_experts_start_on_what_is_there():
    """Forward: all sends, all broadcasts, experts each behind its own wait, a step's returns behind it, shadows."""
    shadows = Settings().shadowed(loads_of(), D)
    assert len(shadows) > 1
    parts = 2 * E // RANKS  # two groups of four
    for program in traced():
        forward = [op for op in program.ops if op.phase == FORWARD]
        sends = starts(program, "all_to_all_into", FORWARD)
        casts = starts(program, "broadcast", FORWARD)
        assert (len(sends), len(casts)) == (2 * parts, len(shadows))
        products = [op for op in forward if op.region == "experts" and op.kind == "product"]
        first, last = products[0].index, products[-1].index
        assert max(op.index for op in (*sends[:parts], *casts)) < first
        waits = {op.waits_on[0]: op.index for op in forward if op.kind == "wait"}
        order = [waits[op.index] for op in (*sends[:parts], *casts)]
        assert order == sorted(order)
        between = [sum(a < op.index < b for op in products) for a, b in zip(order, [*order[1:], last + 1])]
        assert all(count in (0, 2) for count in between)
        assert sum(between) == len(products)
        local = E // RANKS
        ends = [order[local], order[2 * local]]  # of the steps: the wait of what follows
        returns = [op.index for op in sends[parts:]]
        assert [sum(index < end for index in returns) for end in ends] == [local, 2 * local]
        assert min(returns) > order[local - 1]


def test_the_backward_reduces_shadows_while_the_others_are_computed():
    """All sends of gradients, the shadows' products and sums, the experts', only then the sums' waits, and returns."""
    shadows = Settings().shadowed(loads_of(), D)
    parts = 2 * E // RANKS
    for program in traced():
        backward = [op for op in program.ops if op.phase == BACKWARD]
        sends = starts(program, "all_to_all_into", BACKWARD)
        sums = starts(program, "reduce", BACKWARD)
        assert (len(sends), len(sums)) == (2 * parts, len(shadows))
        waits = {op.waits_on[0]: op.index for op in backward if op.kind == "wait"}
        last = max(op.index for op in backward if op.region == "experts" and op.kind == "product")
        assert max(op.index for op in sends[:parts]) < min(op.index for op in sums)
        first_wait = min(waits[op.index] for op in sends[:parts])
        assert max(op.index for op in sums) < first_wait
        assert min(waits[op.index] for op in sums) > last
        assert min(waits[op.index] for op in sends[parts:]) > max(waits[op.index] for op in sums)


def test_shadows_move_parameters_instead_of_rows():
    """An expert's P parameters to all, P gradients to its rank; its rows stay, all others travel as without shadows."""
    loads = loads_of()
    shadows = Settings().shadowed(loads, D)
    with_shadows, without = traced(), traced("fastermoe+shadows=false")
    for program in with_shadows:
        assert [op.collective.bytes_per_peer for op in starts(program, "broadcast")] == [EXPERT] * len(shadows)
        assert [op.collective.bytes_per_peer for op in starts(program, "reduce")] == [EXPERT] * len(shadows)
        assert reads_of(program) == [*FIVE, "expert_loads", *["streams"] * 4]
        (gathered,) = starts(program, "all_gather")
        assert gathered.collective.bytes_per_peer == 8 * E
    for program in without:
        assert not starts(program, "broadcast")
        assert reads_of(program) == [*FIVE, *["streams"] * 4]

    def sent(programs):
        of_each = [[sum(op.collective.send_bytes) for op in starts(p, "all_to_all_into", FORWARD)] for p in programs]
        return sum(len(p.stands_for) * sum(parts) for p, parts in zip(programs, of_each, strict=True))

    kept_here = sum(loads[expert] for expert in shadows)
    assert sent(without) == 2 * sum(loads) * ROW
    assert sent(with_shadows) == 2 * (sum(loads) - kept_here) * ROW


def test_every_row_is_computed_once_wherever_it_is():
    """FLOPs of all experts of all ranks: 12 D F a row, shadowed or not; calls without rows are left out."""
    for name in ("fastermoe", "fastermoe+shadows=false", "fastermoe+group=1", "fastermoe+group=3", "fastmoe"):
        programs = traced(name)
        flops = [sum(op.flops for op in p.ops if op.region == "experts") for p in programs]
        total = sum(len(p.stands_for) * count for p, count in zip(programs, flops, strict=True))
        assert total == 12 * sum(loads_of()) * D * F
        products = [op for p in programs for op in p.ops if op.region == "experts" and op.kind == "product"]
        assert all(op.flops for op in products) or name == "fastmoe"


def test_buffers_are_zeroed_and_outputs_copied_there():
    """papers/baselines.md 4.3: 2 M + N rows of zeros each way, and a copy of what the experts gave."""
    for program in traced("fastermoe+shadows=false"):
        answers = RoutingAnswers(SKEWED, RANKS, DROPLESS)
        sent, received = (answers.answer(program.rank, name)[0] for name in ("kept_rows", "received_kept_rows"))
        for phase in (FORWARD, BACKWARD):
            ops = [op for op in program.ops if op.phase == phase and op.dtype == "fp32"]
            zeros = sum(op.bytes_written for op in ops if op.region == "exchange" and op.kind == "fill")
            assert zeros == (2 * received + sent) * ROW
            copied = [op for op in ops if op.region == "experts" and op.name == "aten::copy_"]
            assert sum(op.bytes_written for op in copied) == received * ROW


@pytest.mark.parametrize(("ranks", "group", "steps"), [(8, 4, 2), (8, 8, 1), (8, 3, 3), (4, 4, 1), (2, 4, 1)])
def test_steps_and_calls_follow_the_groups(ranks, group, steps):
    """ceil(R / g) steps, an exchange for each step and local expert each way and in both directions."""
    for program in traced(f"fastermoe+group={group}", ranks=ranks):
        assert len(starts(program, "all_to_all_into")) == 4 * steps * E // ranks


def test_no_program_stands_for_ranks_of_two_groups(monkeypatch):
    """Equal routing makes ranks of one group equal, not those of others; above the limit of programs too."""
    exact = replace(SKEWED, routing=RoutingSpec("exact"))
    assert [list(p.stands_for) for p in traced(work=exact)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(traced("fastermoe+group=8", work=exact)) == 1
    monkeypatch.setattr(layer_module, "MOST_DISTINCT_PROGRAMS", 4)
    programs = traced("fastermoe+group=2")
    assert sorted(rank for p in programs for rank in p.stands_for) == list(range(RANKS))
    assert len(programs) == 4
    assert all(len({rank // 2 for rank in p.stands_for}) == 1 for p in programs)
    where = topology(8, 1)
    assert replay(programs, where, nominal(where.parameters())).step_time_s[0] > 0


def test_a_constant_input_sends_no_gradient_back():
    """Nothing is returned in the backward, and experts skip the products for it."""
    for program in traced(work=replace(SKEWED, input_gradient=False)):
        assert len(starts(program, "all_to_all_into", BACKWARD)) == 2 * E // RANKS
    flops = [
        sum(len(p.stands_for) * op.flops for p in programs for op in p.ops if op.region == "experts")
        for programs in (traced(), traced(work=replace(SKEWED, input_gradient=False)))
    ]
    assert flops[0] - flops[1] == 2 * sum(loads_of()) * D * F


def test_pipelined_steps_hide_what_one_exchange_cannot():
    """On a slow network with as much to compute the schedule is faster than FastMoE, and shadows help where skewed."""
    work = LayerWorkload(GateSpec("topk", 2), 1, 4096, 512, 8192, 8, routing=RoutingSpec("exact"))
    where = topology(8, 1, nic__bandwidth=3e9)
    values = nominal(where.parameters())
    times = {
        name: replay(trace_layer(get(name), work, 8, COMMON), where, values).step_time_s[0]
        for name in ("fastmoe", "fastermoe", "fastermoe+group=1")
    }
    assert times["fastermoe"] < times["fastmoe"]
    assert times["fastermoe+group=1"] < times["fastermoe"]
    skewed = replace(work, routing=RoutingSpec("zipf", alpha=1.5))
    skew = {
        name: replay(trace_layer(get(name), skewed, 8, DROPLESS), where, values).step_time_s[0]
        for name in ("fastermoe", "fastermoe+alpha=16.0", "fastermoe+shadows=false")
    }
    # The default alpha of 2 takes an expert for an eighth of what it is, and shadows too many.
    assert skew["fastermoe+alpha=16.0"] < min(skew["fastermoe"], skew["fastermoe+shadows=false"])
