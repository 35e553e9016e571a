"""`import topology`: links come out of nccl-tests as they went in, and what a log leaves open is asked for."""

import pytest

from moebench.imports.nccl_log import read_log
from moebench.imports.topology import import_topology
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_topology
from tests.moebench.cli.support import Moebench
from tests.moebench.imports.nccl_logs import write_log

INSIDE = {"link.bandwidth": 1.2, "collective.fixed": 0.7, "link.latency": 0.7, "link.message": 0.7}
BETWEEN = {"nic.bandwidth": 0.8, "nic.latency": 1.5, "nic.message": 1.5}


def factors(path, like="h100"):
    """The parameters of a written file over those of the node type, and the file's."""
    found, base = load_topology(str(path)), load_topology(f"1x8-{like}")
    return {name: p.value / base.link_parameters[name].value for name, p in found.link_parameters.items()}, found


@pytest.mark.parametrize("collective", ["all_to_all", "all_reduce", "all_gather"])
def test_links_inside_a_node_are_found_again(tmp_path, collective):
    """From times that the network model gives under changed links, 2 % of noise: within 5 %, and in their ranges."""
    log = write_log(tmp_path / "one.log", "1x8-h100", collective, INSIDE)
    found = import_topology([read_log(log)], "h100")
    (tmp_path / "ours.toml").write_text(found.text)
    told, topology = factors(tmp_path / "ours.toml")
    assert topology.name == "1x8-ours"
    for name, factor in INSIDE.items():
        assert told[name] == pytest.approx(factor, rel=0.05), name
        p = topology.link_parameters[name]
        assert p.low < factor * load_topology("1x8-h100").link_parameters[name].value < p.high
    assert told["nic.bandwidth"] == 1.0
    ((_, mean, most),) = found.errors
    assert mean < 0.02
    assert most < 0.06


def test_links_between_nodes_are_found_again(tmp_path, monkeypatch):
    """With a log of one node beside one of four; the fabric is in the NICs' rate, and no more nodes are claimed."""
    logs = [
        write_log(tmp_path / "one.log", "1x8-h100", "all_to_all", INSIDE),
        write_log(tmp_path / "four.log", "4x8-h100", "all_to_all", {**INSIDE, **BETWEEN, "fabric.share": 1 / 0.85}),
    ]
    (tmp_path / "ours.toml").write_text(import_topology([read_log(log) for log in logs], "h100").text)
    told, topology = factors(tmp_path / "ours.toml")
    for name, factor in (INSIDE | BETWEEN).items():
        assert told[name] == pytest.approx(factor, rel=0.05), name
    assert topology.link_parameters["fabric.share"].value == 1.0
    assert topology.ranks == 32
    (tmp_path / "topologies").mkdir()
    (tmp_path / "ours.toml").rename(tmp_path / "topologies/ours.toml")
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    assert load_topology("2x8-ours").ranks == 16
    with pytest.raises(InputError, match="8x8-ours is too large; at most 4x8"):
        load_topology("8x8-ours")


def test_a_node_with_two_protocols_and_a_bridge_is_scaled_as_a_whole(tmp_path):
    """All rates of a PCIe node by one factor; a log without a head says what it is on the command line."""
    log = write_log(tmp_path / "one.log", "1x4-titan-rtx", "all_to_all", {"link.bandwidth": 2, "bridge.bandwidth": 2},
                    head=False)  # fmt: skip
    with pytest.raises(InputError, match="say with --size how many"):
        read_log(log, "alltoall")
    read = read_log(log, "alltoall", (1, 4))
    (tmp_path / "ours.toml").write_text(import_topology([read], "titan-rtx").text)
    told, topology = factors(tmp_path / "ours.toml", "titan-rtx")
    assert told["link.bandwidth"] == pytest.approx(2, rel=0.1)
    assert topology.name == "1x4-ours"


def test_the_command_writes_a_file_that_runs_take(tmp_path, capsys, monkeypatch):
    """A case is planned on it; a second import does not write over it."""
    moebench = Moebench(capsys)
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "a2a 1.log", "1x8-h100", "all_to_all")
    said = moebench("import", "topology", "a2a 1.log", "--like", "h100")
    assert said.status == 0
    assert "a2a-1.toml: topology 1x8-a2a-1, 8 ranks of NVIDIA H100" in said.out
    assert "the network model with these links is off by" in said.out
    assert "1x8-a2a-1" in moebench("run", "--suite", "smoke", "--topology", "a2a-1.toml", "--dry-run").out
    assert "is there already" in moebench.refused("import", "topology", "a2a 1.log", "--like", "h100")
    assert "unknown node type 'h1000' (did you mean h100?)" in moebench.refused(
        "import", "topology", "a2a 1.log", "--like", "h1000", "-o", "x.toml"
    )
    assert "h100 is the name of a node type of moebench's own" in moebench.refused(
        "import", "topology", "a2a 1.log", "--like", "h100", "-o", "h100.toml"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a2a 1.log", "a2a-1.toml"]


def test_a_line_that_no_test_prints_is_told(tmp_path):
    """Words for numbers; digits without end are no line of numbers at all."""
    log = write_log(tmp_path / "one.log", "1x8-h100", "all_to_all")
    *before, _ = read_log(log).points
    text = log.read_text()
    row = next(line for line in text.splitlines() if not line.startswith("#"))
    for cell, told in ((5, "time 'x'"), (6, "bandwidth 'x'"), (7, "bandwidth 'x'")):
        cells = row.split()
        log.write_text(text.replace(row, " ".join([*cells[:cell], "x", *cells[cell + 1 :]])))
        with pytest.raises(InputError, match=rf"one.log, line \d+: {told} is not what nccl-tests print"):
            read_log(log)
    log.write_text(text + row.replace(row.split()[0], "9" * 5000, 1) + f"\n# Rank {'9' * 5000} on h device 0 [0] H\n")
    assert read_log(log).points[:-1] == tuple(before)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ((" 0\n", " 3\n"), r"line 13: #wrong is 3; times of wrong results say nothing"),
        (("NVIDIA", "NVIDIA"), None),
        (("node-0 device  7", "node-1 device  7"), r"different numbers of GPUs \(node-0 7, node-1 1\)"),
        (("Collective test starting: alltoall_perf", "x"), "which collective it times is not clear; say it with"),
        (("float", "flo at"), "0 sizes found; latency and bandwidth show in at least 4 of them"),
    ],
)
def test_a_log_that_says_too_little_or_wrong_is_told(tmp_path, change, told):
    """File, line, and what to say or run."""
    log = write_log(tmp_path / "one.log", "1x8-h100", "all_to_all")
    log.write_text(log.read_text().replace(*change))
    if told is None:
        assert (read_log(log).collective, read_log(log).gpu) == ("all_to_all", "NVIDIA H100 80GB HBM3")
        return
    with pytest.raises(InputError, match=told):
        read_log(log)


def test_all_reduce_is_known_by_its_columns(tmp_path):
    """Without its name: a sum whose busbw is 2 (n - 1) / n of algbw."""
    log = write_log(tmp_path / "one.log", "1x8-h100", "all_reduce")
    log.write_text(log.read_text().replace("all_reduce_perf", "test"))
    assert read_log(log).collective == "all_reduce"
    with pytest.raises(InputError, match=r"its lines of ranks say 1x8, not --size 2x4"):
        read_log(log, size=(2, 4))
