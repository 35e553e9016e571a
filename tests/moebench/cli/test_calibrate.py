import pytest
from click.testing import CliRunner

import moebench.calibrate
from moebench.cli.calibrate import command
from moebench.kernels.cost import Product
from moebench.local import child
from moebench.local.child import ChildFailed
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_hardware, load_topology


@pytest.fixture(scope="module")
def measured():
    """A calibration of seconds: few sizes, few products, one short pass in each of two processes."""
    products = (Product(32, 32, 32), Product(256, 256, 256), Product(256, 8, 128))
    one_core = child.usable_cores()[:1]
    heard = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moebench.calibrate, "SIZES", (1 << 12, 1 << 18, 1 << 20))
        patch.setattr(moebench.calibrate, "PRODUCTS", products)
        patch.setattr(moebench.calibrate, "PASSES", 1)
        patch.setattr(moebench.calibrate, "BUDGET_S", 1e-3)
        patch.setattr(child, "usable_cores", lambda: one_core)
        calibration = moebench.calibrate.calibrate(heard.append)
    assert heard == sorted(heard)
    assert heard[-1] == 1
    return calibration


@pytest.fixture
def short(monkeypatch, tmp_path, measured):
    """The command, with a home of its own, hears what was measured once for all tests here."""
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))

    def calibrate(progress):
        progress(1.0)
        return measured

    monkeypatch.setattr(moebench.calibrate, "calibrate", calibrate)


def test_calibrate_writes_the_hardware_that_this_machine_names(short):
    """After it the topology loads, with every parameter measured, in its range, and the summary on standard output."""
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 0, result.output
    hardware = load_topology("1x1-this-machine").hardware
    assert hardware.kind == "cpu"
    for name, parameter in hardware.parameters.items():
        assert parameter.status == "measured", name
        assert parameter.low <= parameter.value <= parameter.high, name
    assert "GFLOP/s" in result.stdout
    assert "this-machine.toml" in result.stdout


def test_calibrate_writes_where_it_is_told(short, tmp_path):
    """-o names the file, and nothing else is written."""
    path = tmp_path / "own" / "box.toml"
    result = CliRunner().invoke(command, ["-o", str(path)])
    assert result.exit_code == 0, result.output
    assert load_hardware(str(path)).title
    assert not (tmp_path / "home").exists()
    assert [p.name for p in path.parent.iterdir()] == ["box.toml"]


def test_an_unwritable_file_is_an_error_before_anything_is_measured(monkeypatch, tmp_path):
    """The error names the file; no minute is lost."""
    monkeypatch.setattr(moebench.calibrate, "calibrate", lambda *_: pytest.fail("measured for nothing"))
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(command, ["-o", str(tmp_path / "file" / "x.toml")])
    assert isinstance(result.exception, InputError)
    assert "x.toml" in str(result.exception)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_no_folder_is_left_by_a_measurement_that_fails(monkeypatch, tmp_path):
    """Folders are made when there is something to write, not before."""

    def fail(progress):
        raise ChildFailed("no")

    monkeypatch.setattr(moebench.calibrate, "calibrate", fail)
    for folder in ("new", "n" * 300):
        result = CliRunner().invoke(command, ["-o", str(tmp_path / "deep" / folder / "x.toml")])
        assert result.exit_code
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_fails_leaves_no_file(monkeypatch, tmp_path):
    """The reason is shown and an older file stays as it was."""
    path = tmp_path / "box.toml"
    path.write_text("older")

    def broken(*_):
        raise ChildFailed("the process was killed")

    monkeypatch.setattr(moebench.calibrate, "calibrate", broken)
    result = CliRunner().invoke(command, ["-o", str(path)])
    assert result.exit_code != 0
    assert "was killed" in result.output
    assert path.read_text() == "older"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--emulate", "17x2"], "--emulate 17x2: at most 16x16"),
        (["--emulate", "2x100"], "--emulate 2x100: at most 16x16"),
        (["--emulate", "9" * 5000 + "x1"], "at most 16x16"),
        (["--ranks", "17"], "--ranks 17: at most 16"),
        (["--emulate", "1x1"], "--emulate 1x1 is one rank"),
        (["--emulate", "2x1", "--nic-rate", "0gbit"], "--nic-rate 0gbit: an emulated NIC is held to"),
        (["--emulate", "2x1", "--switch-buffer", "1kb"], "--switch-buffer 1kb: a port of the emulated switch holds"),
        (["--emulate", "2x1", "--ranks", "2"], "say either --emulate NODESxRANKS or --ranks N"),
    ],
)
def test_a_cluster_that_no_run_takes_is_not_measured(moebench, monkeypatch, tmp_path, arguments, words):
    """Told in a line, before anything is started or written."""
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    assert words in moebench.refused("calibrate", *arguments)
    assert not (tmp_path / "home").exists()
