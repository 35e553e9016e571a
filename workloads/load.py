"""Everything that loads: hardware, topologies and suites by name or file, what-if overrides, and experts rules.

The rest of the project imports these names from here; bad input of any kind is an InputError of one line.
"""

from moebench.workloads.experts import experts_for
from moebench.workloads.load_machine import (
    hardware_names,
    load_hardware,
    load_topology,
    most_nodes,
    node_type_names,
    topology_names,
    with_overrides,
)
from moebench.workloads.load_model import load_model, model_names
from moebench.workloads.load_suite import gate_spec, load_suite, suite_names
from moebench.workloads.places import this_machine_hardware_path, user_folder

__all__ = [
    "experts_for",
    "gate_spec",
    "hardware_names",
    "load_hardware",
    "load_model",
    "load_suite",
    "load_topology",
    "model_names",
    "most_nodes",
    "node_type_names",
    "suite_names",
    "this_machine_hardware_path",
    "topology_names",
    "user_folder",
    "with_overrides",
]
