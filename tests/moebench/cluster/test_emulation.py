"""What --emulate and its companions mean."""

import re
import tomllib

import pytest

from moebench.cluster.detect import Launched
from moebench.cluster.emulation import MOST, emulated, measured
from moebench.workloads.errors import InputError
from moebench.workloads.places import EMULATED, THIS_MACHINE, TOPOLOGIES, UNSHAPED, package_folder

PLACE = Launched("torchrun", 0, 2, 0, 2, "localhost", 29500)


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ((None,), (None, {})),
        (("2x4",), ("2x4-emulated", {})),
        (("2x4", "1gbit", "512kb"), ("2x4-emulated", {"nic.bandwidth": "1 Gb/s", "switch.buffer": "512 KiB"})),
        (("1x3", "2.5 MBit"), ("1x3-emulated", {"nic.bandwidth": "2.5 Mb/s"})),
        (("2x2", "25 MB/s", "16 MiB"), ("2x2-emulated", {"nic.bandwidth": "25 MB/s", "switch.buffer": "16 MiB"})),
        (("2x2", None, None, True), ("2x2-unshaped", {})),
    ],
)
def test_options_are_a_topology_and_its_parameters(options, meant):
    """Rates and sizes as the kernel's traffic control writes them, or as --set does."""
    assert emulated(*options) == meant


def test_the_largest_size_is_that_of_the_topologies():
    """So that nothing is refused which they take, and nothing started which they don't."""
    files = {name: package_folder(TOPOLOGIES) / f"{name}.toml" for name in (THIS_MACHINE, EMULATED, UNSHAPED)}
    found = {name: tomllib.loads(path.read_text()) for name, path in files.items()}
    assert {found[EMULATED]["max_nodes"], found[UNSHAPED]["max_nodes"], found[THIS_MACHINE]["gpus_per_node"]} == {MOST}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("2by4",), "--emulate 2by4: write NODESxRANKS"),
        (("0x4",), "write NODESxRANKS"),
        (("\N{ARABIC-INDIC DIGIT TWO}x2",), "write NODESxRANKS"),
        (("2x4\n",), "write NODESxRANKS"),
        (("100x100",), "--emulate 100x100: at most 16x16"),
        (("17x1",), "--emulate 17x1: at most 16x16"),
        (("1x17", None, None, True), "--emulate 1x17: at most 16x16"),
        (("9" * 5000 + "x1",), "at most 16x16"),
        ((None, "1gbit"), "--nic-rate is about an emulated cluster"),
        ((None, None, None, True), "--unshaped is about an emulated cluster"),
        (("2x4", None, "512kb", True), "leave --switch-buffer out"),
        (("2x4", "fast"), "--nic-rate fast: write a rate such as 1gbit"),
        (("2x4", "1gbits"), "--nic-rate 1gbits: write a rate such as 1gbit"),
        (("2x4", "-1"), "--nic-rate -1: write a rate such as 1gbit"),
        (("2x4", "0gbit"), "--nic-rate 0gbit: an emulated NIC is held to 8kbit to 1000gbit"),
        (("2x4", "5kbit"), "--nic-rate 5kbit: an emulated NIC is held to"),
        (("2x4", "9999999gbit"), "--nic-rate 9999999gbit: an emulated NIC is held to"),
        (("2x4", None, "1gbit"), "--switch-buffer 1gbit: write a size such as 512kb"),
        (("2x4", None, "1kb"), "--switch-buffer 1kb: a port of the emulated switch holds 2.96kb to 1024mb"),
        (("2x4", None, "99999mb"), "--switch-buffer 99999mb: a port of the emulated switch holds"),
    ],
)
def test_options_without_a_meaning_are_refused(options, told):
    """The error names the option."""
    with pytest.raises(InputError, match=re.escape(told)):
        emulated(*options)


def test_an_emulated_cluster_is_measured_or_predicted():
    """auto measures; sim predicts the same topology."""
    assert measured(None, "2x4-emulated", "auto", ()) == ("cluster", ("2x4-emulated",))
    assert measured(None, "2x4-emulated", "sim", ()) == ("sim", ("2x4-emulated",))


def test_launched_ranks_measure_what_they_are_said_to_be():
    """A topology by name, else this machine's own where all ranks are on one node without a GPU."""
    assert measured(PLACE, None, "auto", ("1x2-my",)) == ("cluster", ("1x2-my",))
    assert measured(PLACE, None, "cluster", ()) == ("cluster", ("1x2-this-machine",))


@pytest.mark.parametrize(
    ("place", "topology", "engine", "asked", "told"),
    [
        (None, "2x4-emulated", "auto", ("4x8-titan-rtx",), "leave --topology out"),
        (None, "2x4-emulated", "local", (), "use --engine cluster"),
        (PLACE, "2x4-emulated", "auto", (), "run it without torchrun"),
        (PLACE, None, "sim", (), "--engine sim needs no other ranks"),
        (Launched("srun", 0, 4, 0, 2, "n0", 1), None, "auto", (), "--topology is missing"),
    ],
)
def test_what_does_not_fit_together_is_refused(place, topology, engine, asked, told):
    """Launchers, engines and topologies that contradict each other."""
    with pytest.raises(InputError, match=told):
        measured(place, topology, engine, asked)
