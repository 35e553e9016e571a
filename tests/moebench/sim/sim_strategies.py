"""Random programs for Hypothesis: a few ranks that launch the same collectives, with different work in between."""

from hypothesis import strategies as st

from moebench.program import Collective
from tests.moebench.sim.sim_machines import ProgramBuilder

REGIONS = ("gate", "dispatch", "experts", "combine")
WORK = ("product", "pointwise", "view", "read")


@st.composite
def programs(draw, world=4, distinct=None):
    """One program a distinct rank of `world` ranks; together they stand for all of them."""
    distinct = distinct or draw(st.integers(1, 3))
    builders = [ProgramBuilder(p, world, range(p, world, distinct)) for p in range(distinct)]
    in_flight: list[list[int]] = [[] for _ in builders]
    for _ in range(draw(st.integers(0, 4))):
        for builder in builders:
            _work(draw, builder)
        _launch(draw, builders, in_flight, world)
        for builder, flying in zip(builders, in_flight):
            _work(draw, builder)
            if flying and draw(st.booleans()):
                builder.wait(flying.pop(draw(st.integers(0, len(flying) - 1))))
                _work(draw, builder)
    return [builder.program() for builder in builders]


def _work(draw, builder):
    for kind in draw(st.lists(st.sampled_from(WORK), max_size=4)):
        region = draw(st.sampled_from(REGIONS))
        if kind == "product":
            builder.product(draw(st.integers(0, 2000)), 512, 256, region=region)
        elif kind == "pointwise":
            builder.pointwise(draw(st.integers(0, 10**8)), region=region)
        elif kind == "view":
            builder.view(region=region)
        else:
            builder.read(region=region)


def _launch(draw, builders, in_flight, world):
    algorithm = draw(st.sampled_from(("all_to_all", "all_reduce", "all_gather")))
    size = draw(st.integers(0, 2**24))
    is_even = algorithm != "all_to_all" or draw(st.booleans())
    for builder, flying in zip(builders, in_flight):
        send = () if is_even else tuple(draw(st.integers(0, 2**22)) for _ in range(world))
        region = "grad-sync" if algorithm == "all_reduce" else "exchange"
        one = Collective(algorithm, "world", range(world), size if is_even else None, send, send)
        flying.append(builder.start(one, region))
