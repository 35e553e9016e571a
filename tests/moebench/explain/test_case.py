import numpy as np
import pytest
from hypothesis import given

from moebench.explain.case import breakdown, compare
from moebench.explain.words import difference_words, labels, words
from moebench.quantities import amount, memory, times
from moebench.sim.replay import replay
from moebench.sim.uncertainty import draw, influence, nominal
from tests.moebench.sim.sim_machines import ProgramBuilder, all_to_all, hardware, topology, uncertain
from tests.moebench.sim.sim_strategies import programs


def dense(ranks=8):
    """Masks applied as large products around an exchange."""
    builder = ProgramBuilder(0, ranks)
    builder.product(4096, 4096, 4096, region="dispatch")
    start = builder.start(all_to_all(range(ranks), 9 * 10**6))
    builder.wait(start)
    builder.product(2048, 2048, 2048, region="experts")
    builder.product(4096, 4096, 4096, region="combine", phase="backward")
    return builder.program()


def sparse(ranks=8):
    """The same with a copy instead of the products."""
    builder = ProgramBuilder(0, ranks)
    builder.add("moebench::permute", "gather", "dispatch", bytes_read=10**8, bytes_written=10**8)
    start = builder.start(all_to_all(range(ranks), 9 * 10**6))
    builder.wait(start)
    builder.product(2048, 2048, 2048, region="experts")
    return builder.program()


def taken_apart(name, program, where=None, samples=0):
    where = where or topology(1, 8)
    values = draw(where.parameters(), samples, 0)
    found = replay([program], where, values)
    return breakdown(name, [program], found, influence(where.parameters(), values, found.step_time_s))


@given(programs())
def test_operators_and_regions_add_up_to_the_step(built):
    """Every moment of the slowest rank is some operator's."""
    where = topology(1, 4)
    found = breakdown("case", built, replay(built, where, nominal(where.parameters())))
    assert sum(part.time_s for part in found.operators) == pytest.approx(found.step_s, rel=1e-9, abs=1e-15)
    assert sum(part.time_s for part in found.regions) == pytest.approx(found.step_s, rel=1e-9, abs=1e-15)
    assert [p.time_s for p in found.operators] == sorted((p.time_s for p in found.operators), reverse=True)


def test_operators_carry_their_counts():
    """Calls, FLOPs, bytes to others and what bounds them."""
    by_name = {part.key: part for part in taken_apart("dense", dense()).operators}
    product = by_name["dispatch", "forward", "aten::bmm"]
    assert (product.calls, product.flops, product.limit) == (1, 2 * 4096**3, "compute")
    exchange = by_name["exchange", "forward", "moebench::all_to_all_start"]
    assert exchange.sent_bytes == 7 * 9 * 10**6
    assert exchange.exposed_s == pytest.approx(7e-3, rel=0.01)
    assert exchange.compute_s == exchange.device_bytes == 0


def test_a_comparison_finds_what_only_one_case_does():
    """The products of the dense case make the difference; what both do cancels."""
    found = compare(taken_apart("g/dense", dense()), taken_apart("g/sparse", sparse()))
    assert sum(d.delta_s for d in found.operators) == pytest.approx(found.delta_s)
    assert sum(d.delta_s for d in found.regions) == pytest.approx(found.delta_s)
    largest = {d.label for d in found.operators[:2]}
    assert largest == {"aten::bmm in dispatch, forward", "aten::bmm in combine, backward"}
    assert found.operators[0].second is None
    experts = next(d for d in found.operators if d.label == "aten::bmm in experts, forward")
    assert experts.delta_s == pytest.approx(0, abs=1e-12)


def test_words_about_one_case():
    """The step, its regions, what waits, the largest operators, the parameter that matters."""
    where = topology(1, 8, hw=hardware(gpu__product__compute_share=uncertain(0.8, 0.4, 0.9)))
    said = words(taken_apart("overall/dense", dense(), where, samples=50))
    assert said[0].startswith("overall/dense takes 29.8 ms a step (5 to 95 % of the draws: ")
    assert "holds 0.931 GiB" in said[1]
    assert said[2].startswith("By region: ")
    assert "23.5 % of the step waits for communication that nothing hides." in said
    assert "Most time goes to aten::bmm in dispatch, forward (1 call, 10.7 ms, 36.0 %, 137 GFLOP, " in " ".join(said)
    assert "gpu.product.compute_share moves it most: the higher, the shorter (rank correlation -1.00)" in said[-1]


def test_words_about_two_cases():
    """Which is slower, by how much, where, by which operators, and what neither shares."""
    first, second = taken_apart("overall/b8/sparse", sparse()), taken_apart("overall/b8/dense", dense())
    said = difference_words(compare(first, second))
    assert said[0].startswith("dense takes 29.8 ms a step, 3.42 times as long as sparse with 8.72 ms: 21.1")
    assert said[1].startswith("By region, the slower less the faster: combine +10.7 ms, dispatch +10.4 ms")
    assert said[2].startswith("The operators that make most of the difference: aten::bmm in")
    assert said[3].startswith("Only sparse runs operators worth")
    assert "moebench::permute in dispatch, forward" in said[3]
    assert said[4].startswith("Only dense runs operators worth 21.")
    assert "computation 17.2 GFLOP against 292 GFLOP" in said[5]
    assert said[5].endswith("payload of collectives the same.")


def test_words_say_when_a_case_does_not_fit():
    """Out of memory is a result, for one case and for two."""
    where = topology(1, 8, hw=hardware(gpu__memory__capacity=1e9))
    found = taken_apart("a/dense", dense(), where)
    assert words(found)[1] == "It does not fit into the device's memory: it holds 0.931 GiB at its peak."
    other = taken_apart("a/sparse", sparse())
    assert any("dense does not fit" in sentence for sentence in difference_words(compare(found, other)))


def test_words_about_nothing():
    """An empty step is said to take no time, alone and against itself."""
    found = taken_apart("empty", ProgramBuilder().program())
    assert words(found)[0] == "empty takes 0 s a step."
    assert difference_words(compare(found, found))[0] == "empty takes 0 s a step, longer than empty with 0 s: 0 s more."


def test_labels_keep_what_differs():
    """Parts of the names that both share are left out; names of other shapes stay whole."""

    def named(first, second):
        return list(labels(compare(taken_apart(first, sparse()), taken_apart(second, sparse()))).values())

    assert named("o/b8/x/a", "o/b8/y/a") == ["x", "y"]
    assert named("o/b8/x/a", "o/b16/x/b") == ["b8/a", "b16/b"]
    assert named("o/a", "o/x/a") == ["o/a", "o/x/a"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.8123, "812 ms"), (3.4e-6, "3.40 us"), (12.34, "12.3 s"), (0.9999, "1.00 s"), (1234.5, "1234 s")],
)
def test_times_in_the_unit_that_fits(seconds, text):
    """Three digits."""
    assert times(seconds) == text


def test_amounts_in_the_unit_that_fits():
    """Decimal prefixes, and binary ones for memory."""
    assert amount(8.796e12, "FLOP") == "8.80 TFLOP"
    assert amount(999.9, "B") == "1.00 kB"
    assert amount(0, "B") == "0 B"
    assert memory(24 * 2**30) == "24.0 GiB"
    assert np.isfinite(float(amount(1e-9, "B").split()[0]))
