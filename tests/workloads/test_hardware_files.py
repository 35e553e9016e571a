"""Hardware files: the packaged ones hold what they should, and every fault is one line with file, line and key."""

import re

import pytest

from moebench.workloads.errors import InputError
from moebench.workloads.load import hardware_names, load_hardware
from moebench.workloads.parameters import MEMORY_KINDS
from tests.workloads.files import CURVES, hardware_text, written

TURING_AND_VOLTA = ("titan-rtx", "rtx-2080-ti", "v100-pcie", "v100-sxm2")
GPUS = (*TURING_AND_VOLTA, "a100-40", "a100-80", "h800", "h20", "h100", "h200", "b200")


def test_every_gpu_of_the_papers_is_there():
    """The names that suites and users may write."""
    assert set(GPUS) <= set(hardware_names())
    assert not [name for name in hardware_names() if name.startswith("_")]


@pytest.mark.parametrize("name", GPUS)
def test_every_number_has_source_status_and_range(name):
    """Datasheet numbers are points, all others lie inside a range that is wider than a point."""
    hardware = load_hardware(name)
    assert hardware.kind == "gpu"
    assert set(hardware.curves) == set(MEMORY_KINDS)
    for parameter in hardware.parameters.values():
        assert parameter.source
        assert parameter.low <= parameter.value <= parameter.high
        assert parameter.is_uncertain == (parameter.status != "datasheet")


@pytest.mark.parametrize(
    ("name", "capacity_gib", "bandwidth", "fp32", "fp16", "sms"),
    [
        ("titan-rtx", 24, 672e9, 16.3e12, 130e12, 72),
        ("rtx-2080-ti", 11, 616e9, 13.4e12, 53.8e12, 68),
        ("v100-pcie", 32, 900e9, 14e12, 112e12, 80),
        ("v100-sxm2", 32, 900e9, 15.7e12, 125e12, 80),
        ("a100-40", 40, 1555e9, 19.5e12, 312e12, 108),
        ("a100-80", 80, 2039e9, 19.5e12, 312e12, 108),
        ("h800", 80, 3350e9, 67e12, 989e12, 132),
        ("h20", 96, 4000e9, 44e12, 148e12, 78),
        ("h100", 80, 3350e9, 67e12, 989e12, 132),
        ("h200", 140, 4800e9, 67e12, 989e12, 132),
        ("b200", 179, 8000e9, 80e12, 2250e12, 148),
    ],
)
def test_datasheet_rates(name, capacity_gib, bandwidth, fp32, fp16, sms):
    """Numbers of the vendors' sheets, dense, in SI units."""
    value = {key: parameter.value for key, parameter in load_hardware(name).parameters.items()}
    assert value["gpu.memory.capacity"] == pytest.approx(capacity_gib * 2**30)
    assert value["gpu.memory.bandwidth"] == pytest.approx(bandwidth)
    assert value["gpu.peak.fp32"] == pytest.approx(fp32)
    assert value["gpu.peak.fp16"] == pytest.approx(fp16)
    assert value["gpu.sms"] == sms


def test_tf32_is_a_peak_of_its_own():
    """A100's fp32 and TF32 differ by 8, and Volta and Turing have neither TF32 nor bf16."""
    a100 = load_hardware("a100-80").parameters
    assert a100["gpu.peak.tf32"].value == pytest.approx(8 * a100["gpu.peak.fp32"].value)
    for name in TURING_AND_VOLTA:
        assert not {"gpu.peak.tf32", "gpu.peak.bf16"} & set(load_hardware(name).parameters)


def test_a_file_of_the_users_loads(tmp_path):
    """By path, with the default curve for every kind, and a digest of its content."""
    path = written(tmp_path, hardware_text())
    hardware = load_hardware(str(path))
    assert hardware.name == "mine"
    assert hardware.curves["sort"].share == (0.5, 0.85)
    assert len(hardware.digest) == 64


def test_the_digest_follows_the_content_not_the_text(tmp_path):
    """Comments and order change nothing; a number does."""
    first = load_hardware(str(written(tmp_path, hardware_text())))
    commented = load_hardware(str(written(tmp_path, "# said otherwise\n" + hardware_text())))
    changed = {"gpu.memory.bandwidth": 'value = "673 GB/s", status = "datasheet"'}
    other = load_hardware(str(written(tmp_path, hardware_text(changed))))
    assert first.digest == commented.digest != other.digest


def test_a_file_extends_a_packaged_one(tmp_path):
    """Named parameters are replaced, the rest is kept, notes add up."""
    text = 'schema_version = 1\nextends = "titan-rtx"\ntitle = "Mine"\nnotes = ["watercooled"]\n'
    text += '[parameters]\n"gpu.memory.capacity" = { value = "48 GiB", status = "datasheet", source = "mine" }\n'
    mine, base = load_hardware(str(written(tmp_path, text))), load_hardware("titan-rtx")
    assert mine.parameters["gpu.memory.capacity"].value == 48 * 2**30
    assert mine.parameters["gpu.memory.bandwidth"] == base.parameters["gpu.memory.bandwidth"]
    assert mine.curves == base.curves
    assert mine.notes == (*base.notes, "watercooled")


def test_files_that_extend_each_other_are_refused(tmp_path):
    """A circle is an error, not a hang."""
    for name, other in (("one", "two"), ("two", "one")):
        written(tmp_path, f'schema_version = 1\nextends = "{other}"\n', f"{name}.toml")
    with pytest.raises(InputError, match="extends itself"):
        load_hardware(str(tmp_path / "one.toml"))


def test_this_machine_says_how_to_measure_it(tmp_path, monkeypatch):
    """Before `moebench calibrate` the error names the command; afterwards the file is found."""
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    with pytest.raises(InputError, match="run `moebench calibrate`"):
        load_hardware("this-machine")
    (tmp_path / "hardware").mkdir()
    written(tmp_path / "hardware", hardware_text(), "this-machine.toml")
    assert load_hardware("this-machine").title == "Test GPU"
    assert "this-machine" in hardware_names()


def test_the_xdg_folder_is_the_users_when_no_home_is_set(tmp_path, monkeypatch):
    """$XDG_CONFIG_HOME/moebench holds the user's files."""
    monkeypatch.delenv("MOEBENCH_HOME", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "moebench" / "hardware"
    folder.mkdir(parents=True)
    written(folder, hardware_text(), "this-machine.toml")
    assert load_hardware("this-machine").name == "this-machine"


def test_a_users_file_does_not_shadow_a_packaged_one(tmp_path, monkeypatch):
    """The same name always means the same GPU."""
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    (tmp_path / "hardware").mkdir()
    written(tmp_path / "hardware", hardware_text(), "titan-rtx.toml")
    assert load_hardware("titan-rtx").title != "Test GPU"


BANDWIDTH, SHARE, SYNC = "gpu.memory.bandwidth", "gpu.product.compute_share", "host.sync"
FAULTS = [
    (BANDWIDTH, 'value = "-672 GB/s", status = "datasheet"', "-672 GB/s is negative"),
    (BANDWIDTH, 'value = "0 GB/s", status = "datasheet"', "too small"),
    (BANDWIDTH, 'value = "672 GB", status = "datasheet"', "a quantity of bytes, expected bytes/s"),
    (BANDWIDTH, 'value = 672, status = "datasheet"', "has no unit"),
    (BANDWIDTH, 'value = "nan GB/s", status = "datasheet"', "not a finite number"),
    (BANDWIDTH, 'value = "6 GB/s", low = "5 GB/s", high = "7 GB/s", status = "datasheet"', "a datasheet number has no"),
    (SHARE, 'value = nan, low = 0.1, high = 1, status = "derived"', "not a finite number"),
    (SHARE, 'value = 0.5, low = 0.1, high = inf, status = "derived"', "not a finite number"),
    (SHARE, 'value = 5, low = 0.1, high = 6, status = "derived"', "too large"),
    (SHARE, 'value = true, low = 0.1, high = 1, status = "derived"', "True is not a quantity"),
    ("gpu.sms", 'value = 71.5, status = "datasheet"', "not a whole number"),
    (SYNC, 'value = "5 us", low = "9 us", high = "9 us", status = "assumed"', "must be low <= value <= high"),
    (SYNC, 'value = "5 us", low = "1 us", high = "4 us", status = "assumed"', "must be low <= value <= high"),
    (SYNC, 'value = "5 us", low = "1 us", status = "assumed"', "needs a range"),
    (SYNC, 'value = "5 us", status = "measured"', "needs a range"),
    (SYNC, 'value = "5 us", status = "guessed"', "choose one of: assumed, datasheet, derived, measured"),
    (SYNC, 'value = "5 us", lower = "1 us", status = "assumed"', "unknown key 'lower'"),
    (SYNC, 'low = "1 us", status = "assumed"', "missing key value"),
    (SYNC, None, "missing parameter host.sync"),
    ("host.sink", 'value = "5 us", low = "1 us", high = "9 us", status = "assumed"', "did you mean host.sync?"),
    ("gpu.peak.fp32", None, "no peak rate"),
]


@pytest.mark.parametrize(("name", "row", "told"), FAULTS)
def test_a_fault_is_one_line_that_names_the_file(tmp_path, name, row, told):
    """Each fault says what is wrong and, where there is a choice, what is allowed."""
    path = written(tmp_path, hardware_text({name: row}))
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}.*{re.escape(told)}") as caught:
        load_hardware(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_source_is_refused(tmp_path):
    """A number without a source is no number."""
    reasons = {', source = "  "': "source is empty", "": "missing key source", ', source = ""': "at least 1"}
    for source, reason in reasons.items():
        row = f'"gpu.sms" = {{ value = 72, status = "datasheet"{source} }}\n'
        path = written(tmp_path, hardware_text(curves=row + CURVES))
        with pytest.raises(InputError, match=reason):
            load_hardware(str(path))


def test_the_error_names_the_line(tmp_path):
    """Line numbers are those of the file."""
    text = hardware_text({BANDWIDTH: 'value = "-1 GB/s", status = "datasheet"'})
    line = next(n for n, row in enumerate(text.splitlines(), 1) if BANDWIDTH in row)
    path = written(tmp_path, text)
    with pytest.raises(InputError, match=f', line {line}: parameters."gpu.memory.bandwidth": -1 GB/s is negative'):
        load_hardware(str(path))


@pytest.mark.parametrize(
    ("curves", "told"),
    [
        (CURVES.replace('"1 MB", "16 MB"', '"16 MB", "1 MB"'), "at must rise"),
        (CURVES.replace('"1 MB", "16 MB"', '"1 MB"'), "at has 1 entries, share 2"),
        (CURVES.replace("0.5", "-0.5"), "must be above 0"),
        (CURVES.replace("0.5", "0.05"), r'curves.memory: between 1 MB and 16 MB the share grows faster than the size'),
        (CURVES.replace("0.5", "nan"), "finite"),
        (CURVES.replace("curves.memory", "curves.memories"), "unknown curve 'memories'"),
        (CURVES.replace("curves.memory", "curves.copy"), "no curve of pointwise"),
        (CURVES.replace('"1 MB"', '"1 GB/s"'), "expected bytes"),
        ("", "no curve of pointwise"),
    ],
)
def test_a_faulty_curve_is_refused(tmp_path, curves, told):
    """Curves rise along their sizes, have a share for each, and cover every kind."""
    with pytest.raises(InputError, match=told):
        load_hardware(str(written(tmp_path, hardware_text(curves=curves))))


def test_unknown_hardware_lists_what_there_is():
    """The nearest name comes first."""
    with pytest.raises(InputError, match=r"'titan_rtx' \(did you mean titan-rtx\?\); choose one of: a100-40"):
        load_hardware("titan_rtx")
    with pytest.raises(InputError, match=r"no hardware file .*nowhere\.toml"):
        load_hardware("nowhere.toml")
