"""Topology files, sizes made up from node types, and what-if overrides."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.workloads.errors import InputError
from moebench.workloads.load import load_topology, node_type_names, topology_names, with_overrides
from moebench.workloads.parameters import LINK_SPECS
from moebench.workloads.places import ON_THIS_MACHINE
from tests.workloads.files import hardware_text, topology_text, written

PAPERS = [f"{size}-{gpu}" for gpu in ("titan-rtx", "rtx-2080-ti", "v100-pcie", "v100-sxm2")
          for size in ("1x8", "2x8", "4x8", "8x8")]
PAPERS += ["8x8-p4de", "8x8-p3dn", "4x8-p4d", "180x8-h800", "16x8-a100-80", "2x8-a100-40", "4x8-h20", "4x8-h100",
           "1x8-h200", "1x8-b200"]
DESCRIBED = [name for name in node_type_names() if name not in ON_THIS_MACHINE]


@pytest.mark.parametrize("name", PAPERS)
def test_topologies_of_the_papers_load(name):
    """Every size and node type that the papers name."""
    topology = load_topology(name)
    assert topology.name == name
    assert f"{topology.nodes}x{topology.gpus_per_node}" == name.split("-")[0]
    assert name in topology_names()


@pytest.mark.parametrize("node_type", DESCRIBED)
def test_every_link_number_has_source_status_and_range(node_type):
    """All of them but datasheet numbers have a range, and all that the network model needs are there."""
    topology = load_topology(f"2x2-{node_type}")
    assert {name for name, spec in LINK_SPECS.items() if spec.required} <= set(topology.link_parameters)
    for parameter in topology.link_parameters.values():
        assert parameter.source
        assert parameter.low <= parameter.value <= parameter.high
        assert parameter.is_uncertain == (parameter.status != "datasheet")


def test_the_nodes_that_lancet_names():
    """p4de: four NICs and A100 of 80 GB; p3dn: one NIC and V100 of 32 GB."""
    p4de, p3dn = load_topology("8x8-p4de"), load_topology("8x8-p3dn")
    assert (p4de.nics_per_node, p4de.hardware.name) == (4, "a100-80")
    assert (p3dn.nics_per_node, p3dn.hardware.name) == (1, "v100-sxm2")
    assert p3dn.hardware.parameters["gpu.memory.capacity"].value == 32 * 2**30


def test_the_in_node_rate_without_peer_to_peer():
    """Nominal from two measured RTX 2080 Ti; 2 to 9 GB/s, which nobody published for 8 TITAN RTX."""
    rate = load_topology("1x8-titan-rtx").link_parameters["link.bandwidth"]
    assert (rate.low, rate.value, rate.high) == pytest.approx((2e9, 4.24e9, 9e9))
    assert rate.status == "assumed"


@given(st.integers(1, 128), st.integers(1, 8))
def test_any_size_within_the_limits_is_a_topology(nodes, gpus):
    """N nodes of G GPUs: N x G ranks, and a part of a node keeps at least one NIC."""
    topology = load_topology(f"{nodes}x{gpus}-titan-rtx")
    assert topology.ranks == nodes * gpus
    assert topology.nics_per_node == 1
    h100 = load_topology(f"{nodes}x{gpus}-h100")
    assert h100.nics_per_node == gpus


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("129x8-titan-rtx", "at most 128x8"),
        ("1x9-titan-rtx", "at most 128x8"),
        ("4x8-titan", "did you mean 4x8-titan-rtx"),
        ("4x8-nothing-like-it", "choose the type from: a100-40"),
        ("0x8-titan-rtx", "unknown topology"),
        ("4x-titan-rtx", "unknown topology"),
        ("4x8", "unknown topology"),
        ("", "unknown topology"),
        ("4x8-_pcie3-one-nic", "unknown topology"),
        ("cluster.toml", "no node type file cluster.toml"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name, told):
    """The error says how a topology is written and which types there are."""
    with pytest.raises(InputError, match=re.escape(told)):
        load_topology(name)


def test_a_cluster_file_of_the_users(tmp_path):
    """A file with `nodes` is a whole cluster; its hardware may be a file beside it."""
    written(tmp_path, hardware_text(), "my-gpu.toml")
    text = topology_text().replace('hardware = "titan-rtx"', 'hardware = "my-gpu.toml"')
    topology = load_topology(str(written(tmp_path, text, "my-cluster.toml")))
    assert topology.name == "2x4-my-cluster"
    assert topology.hardware.title == "Test GPU"
    assert topology.ranks == 8


def test_a_file_whose_name_looks_like_a_size(tmp_path, monkeypatch):
    """A name that ends with .toml is a file."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, topology_text(), "4x8-titan.toml")
    assert load_topology("4x8-titan.toml").ranks == 8


def test_a_node_type_of_the_users(tmp_path, monkeypatch):
    """A file in the user's folder gives every size up to its limits."""
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    (tmp_path / "topologies").mkdir()
    text = topology_text().replace("nodes = 2\n", "max_nodes = 16\n")
    written(tmp_path / "topologies", text, "my-nodes.toml")
    assert load_topology("16x2-my-nodes").ranks == 32
    with pytest.raises(InputError, match="at most 16x4"):
        load_topology("17x4-my-nodes")


def test_this_machine_is_a_topology_once_measured(tmp_path, monkeypatch):
    """`this-machine` alone is one rank; with a size, as many."""
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    with pytest.raises(InputError, match="moebench calibrate"):
        load_topology("1x2-this-machine")
    (tmp_path / "hardware").mkdir()
    written(tmp_path / "hardware", hardware_text(), "this-machine.toml")
    assert load_topology("this-machine").ranks == 1
    assert load_topology("1x4-this-machine").ranks == 4


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("titan-rtx", "titan-ltx", "unknown hardware 'titan-ltx' (did you mean titan-rtx?)"),
        ("nodes = 2", "nodes = 0", "greater than or equal to 1, got 0"),
        ("nodes = 2", "nodes = 2.0", "valid integer, got 2.0"),
        ("nics_per_node = 1", "nics = 1", "unknown key 'nics'"),
        ('"pcie"', '"token-ring"', "unknown link_kind 'token-ring'"),
        ('link_kind = "pcie"\n', "", "missing key link_kind"),
        ("schema_version = 1", "schema_version = 9", "schema_version: 9 is unknown"),
        ("schema_version = 1\n", "", "missing key schema_version"),
        ("nodes = 2\n", 'nodes = 2\nsizes = ["4x4"]\n', "at most 2x4"),
        ("nodes = 2\n", 'sizes = ["4by4"]\n', "'4by4' is not a size"),
        ('"80 Gb/s"', '"-80 Gb/s"', "-80 Gb/s is negative"),
        ("high = 1.0", "high = 1.2", "too large"),
        ('"nic.bandwidth"', '"nic.speed"', "unknown parameter 'nic.speed'"),
        ('"nic.bandwidth"', '"gpu.l2"', "unknown parameter 'gpu.l2'"),
    ],
)
def test_a_fault_in_a_topology_is_one_line(tmp_path, old, new, told):
    """File, key and what is allowed."""
    text = topology_text()
    assert old in text
    path = written(tmp_path, text.replace(old, new))
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}.*{re.escape(told)}") as caught:
        load_topology(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_link_parameter_is_named(tmp_path):
    """Numbers between nodes are needed where there are several, and only there."""
    path = written(tmp_path, topology_text({"nic.bandwidth": None}))
    with pytest.raises(InputError, match=r"missing parameter nic\.bandwidth"):
        load_topology(str(path))
    single = topology_text({"nic.bandwidth": None}).replace("nodes = 2", "nodes = 1")
    assert load_topology(str(written(tmp_path, single))).ranks == 4


def test_an_override_is_exact_and_says_where_it_comes_from():
    """--set replaces value and range, of links and of hardware, and changes the digests."""
    base = load_topology("4x8-titan-rtx")
    chosen = {"nic.bandwidth": "25GB/s", "gpu.memory.capacity": "48 GiB", "gpu.efficiency.copy": "0.9"}
    what_if = with_overrides(base, chosen)
    nic = what_if.link_parameters["nic.bandwidth"]
    assert (nic.low, nic.value, nic.high) == (25e9, 25e9, 25e9)
    assert nic.source == "--set nic.bandwidth=25GB/s"
    assert what_if.hardware.parameters["gpu.memory.capacity"].value == 48 * 2**30
    assert what_if.parameters()["gpu.efficiency.copy"].value == 0.9
    assert what_if.digest != base.digest
    assert what_if.hardware.digest != base.hardware.digest
    assert base.link_parameters["nic.bandwidth"].value == 12e9
    assert with_overrides(base, {}) == base


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("nic.bandwith", "25GB/s", "did you mean nic.bandwidth"),
        ("nic.bandwidth", "25GB", "expected bytes/s"),
        ("nic.bandwidth", "fast", "is not a quantity"),
        ("nic.bandwidth", "-1 GB/s", "is negative"),
        ("nic.bandwidth", "", "is not a quantity"),
        ("fabric.share", "1.5", "too large"),
        ("gpu.peak.fp32", "1e-300FLOP/s", "too small"),
        ("gpu.peak.fp32", "1e300PFLOP/s", "is not a finite number"),
        ("gpu.memory.bandwidth", "1e200B/s", "too large"),
        ("link.bandwidth", "1e-300B/s", "too small"),
        ("gpu.product.compute_share", "1e-300", "too small"),
        ("gpu.l2", "1e200B", "too large"),
        ("gpu.sms", "1e15", "too large"),
        ("fabric.share", "nan", "not a finite number"),
    ],
)
def test_a_wrong_override_is_refused(name, text, told):
    """The error names --set and the parameter."""
    with pytest.raises(InputError, match=f"^--set.*{re.escape(told)}"):
        with_overrides(load_topology("1x2-titan-rtx"), {name: text})
