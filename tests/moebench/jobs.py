"""A small training job for tests: a decoder, a described cluster, cases of both."""

import numpy as np

from moebench.cases.case import Case
from moebench.sim.uncertainty import draw
from moebench.workloads.job import JobWorkload
from moebench.workloads.load import load_topology
from moebench.workloads.models.decoder import DecoderModel, DecoderShape

SHAPE = DecoderShape(256, 16, 8, 16, 512, 16, 2, shared_ffn=128)
MODEL = DecoderModel("small", "Small", 4, SHAPE, 512, sequence=128)


def case_of(system="megascale", topology="4x8-h800", **more):
    """A case of 4 nodes: two stages, two replicas."""
    workload = JobWorkload("small", MODEL, **({"stages": 2, "global_batch": 16} | more))
    size = topology.partition("-")[0]
    return Case("own", "jobs", system, workload, topology, size, "sim")


def machine(name="4x8-h800", samples=8):
    """The topology, and draws of its parameters."""
    topology = load_topology(name)
    values = draw(topology.parameters(), samples, 0)
    return topology, {key: np.asarray(value) for key, value in values.items()}
