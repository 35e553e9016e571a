"""Questions to the planner that are answered in a second or two: a small decoder on a few GPUs."""

from dataclasses import replace

from moebench.planner.space import Question
from moebench.sim.uncertainty import draw
from moebench.workloads.load import load_topology, with_overrides
from tests.moebench.jobs import MODEL

TWO_NODES = "2x2-h800"


def values_of(asked, samples=8):
    """Draws of the parameters of a question's topology."""
    return draw(asked.topology.parameters(), samples, 0)


def question(memory="", **more):
    """Four layers on two nodes of two GPUs; `memory` beside what is reserved, such as `30 MB`."""
    topology = load_topology(more.pop("topology", TWO_NODES))
    if memory:
        reserved = topology.parameters()["gpu.memory.reserved"].value
        number, unit = memory.split()
        capacity = reserved + float(number) * {"MB": 1e6, "GB": 1e9}[unit]
        topology = with_overrides(topology, {"gpu.memory.capacity": f"{capacity / 1e9:.6f} GB"})
    asked = {"systems": ("megascale",), "global_batch": 8, "micro_batches": (1, 2)}
    return Question(replace(MODEL, **more.pop("model", {})), topology, **(asked | more))
