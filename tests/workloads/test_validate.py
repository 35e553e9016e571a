"""`validate`: what a file of any kind holds."""

from pathlib import Path

import pytest

from moebench.workloads.errors import InputError
from moebench.workloads.places import package_folder
from moebench.workloads.validate import validate
from tests.workloads.files import hardware_text, suite_text, topology_text, written

PACKAGED = sorted(
    path
    for folder in ("hardware", "topologies", "suites", "models")
    for path in package_folder(folder).glob("*.toml")
    if not path.stem.startswith("_")
)


@pytest.mark.parametrize("path", PACKAGED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_packaged_file_is_valid(path, measured_machine):
    """One line that names the file and what it is."""
    told = validate(path)
    assert told.startswith(str(path))
    assert "\n" not in told


def test_each_kind_is_told_apart(tmp_path):
    """By the keys and parameters that only that kind has."""
    assert ": hardware, Test GPU; 13 parameters (3 datasheet" in validate(written(tmp_path, hardware_text()))
    assert ": topology 2x4-mine, 8 ranks" in validate(written(tmp_path, topology_text()))
    assert ": suite mine, Test; experiments: tiny" in validate(written(tmp_path, suite_text()))
    extended = 'schema_version = 1\nextends = "h100"\n[parameters]\n'
    row = '"gpu.l2" = { value = "1 MB", status = "datasheet", source = "x" }\n'
    assert ": hardware, NVIDIA H100" in validate(written(tmp_path, extended + row))


def test_a_relative_path_works(tmp_path, monkeypatch):
    """A file in the working folder, without a separator in its name."""
    written(tmp_path, topology_text())
    monkeypatch.chdir(tmp_path)
    assert "topology 2x4-mine" in validate(Path("mine.toml"))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("mine.toml", "schema_version = 1\nfoo = 1\n", "neither hardware, topology, suite nor model"),
        ("mine.toml", topology_text().replace("titan-rtx", "titan"), "unknown hardware 'titan'"),
        ("mine.toml", suite_text().replace("titan-rtx", "titan"), "experiments.tiny: unknown topology '1x2-titan'"),
        ("mine.toml", suite_text().replace('"1x2"', '"999x8"'), "at most 128x8"),
        ("mine.yaml", "a: b", "what kind of file is this"),
        ("mine.csv", "a,b", "what kind of file is this"),
    ],
)
def test_a_fault_is_told(tmp_path, name, text, told):
    """The loaders' error, and for suites the topologies that they name."""
    with pytest.raises(InputError, match=told):
        validate(written(tmp_path, text, name))


def test_other_kinds_are_read_by_whoever_knows_them(tmp_path):
    """A reader is chosen by suffix."""
    path = written(tmp_path, "id\n", "claims.csv")
    assert validate(path, {".csv": lambda found: f"{found.name}: claims"}) == "claims.csv: claims"
