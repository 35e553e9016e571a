"""A cluster emulated on one machine: nodes as network namespaces, each with one rate-limited NIC, and ranks on them."""

from moebench.cluster.lab.counters import NicCounters, read_counters
from moebench.cluster.lab.preconditions import lab_problem
from moebench.cluster.lab.ranks import Lab
from moebench.cluster.lab.tools import LabError

__all__ = ["Lab", "LabError", "NicCounters", "lab_problem", "read_counters"]
