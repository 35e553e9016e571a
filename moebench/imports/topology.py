"""Logs of nccl-tests into a topology file: a node type that is described, with links as they were measured."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moebench.imports.link_fit import FABRIC, RATES, fit_links
from moebench.imports.nccl_log import Log
from moebench.local.machine_file import head, parameter
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.load import load_topology, node_type_names


@dataclass(frozen=True)
class Imported:
    """A topology file's text, and how well the network model with its links predicts each log.

    Attributes:
        errors: mean and largest relative error by log.
    """

    text: str
    errors: tuple[tuple[Log, float, float], ...]


def import_topology(logs: Sequence[Log], like: str, title: str | None = None) -> Imported:
    """The topology of logs of one cluster.

    Args:
        like: node type with the same GPUs, from which the file extends.

    Raises:
        InputError: no such node type, or one with fewer GPUs a node; logs that can't be of one cluster.
    """
    if like not in node_type_names():
        raise one_of("node type", like, node_type_names(), "--like")
    per_node = {log.gpus_per_node for log in logs}
    if len({log.gpus_per_node for log in logs if log.nodes > 1}) > 1:
        raise InputError("logs of several nodes have different numbers of GPUs a node: give those of one cluster")
    nodes, gpus = max(log.nodes for log in logs), max(per_node)
    topologies = {
        size: load_topology(f"{size[0]}x{size[1]}-{like}") for size in {(log.nodes, log.gpus_per_node) for log in logs}
    }
    fitted = fit_links(logs, topologies)
    errors = tuple(
        (log, float(np.abs(error).mean()), float(np.abs(error).max())) for log, error in zip(logs, fitted.errors)
    )
    timed = ", ".join(f"{log.collective} on {log.nodes}x{log.gpus_per_node} ({log.path.name})" for log in logs)
    kinds = "".join(f"; {log.path.name}: mean error {mean:.1%}, largest {most:.1%}" for log, mean, most in errors)
    size = f"{nodes}x{gpus}"
    gpu = next((log.gpu for log in logs if log.gpu), "")
    lines = head(
        "Written by `moebench import topology` from nccl-tests.",
        title or f"{size} {gpu or like}, links by nccl-tests",
        (f"fitted to {timed}{kinds}", "how times are shared out among start, latency and messages is assumed: "
         f"as in {like}"),
    )  # fmt: skip
    about = [f'extends = "{like}"', f"sizes = [{json.dumps(size)}]"]
    if nodes > 1:
        about.append(f"max_nodes = {nodes}")  # what more nodes do to the fabric was not measured
    lines[3:3] = about
    for name, found in fitted.parameters.items():
        is_rate = any(name in names for names in RATES)
        source = f"fit to nccl-tests: {timed}" if is_rate else f"fit to nccl-tests ({timed}), shares as in {like}"
        if name == FABRIC:
            source = f"in nic.bandwidth, which was measured on all {nodes} nodes at once"
        lines += parameter(name, found, source, "measured" if is_rate else "derived")
    return Imported("\n".join(lines), errors)
