"""Names of data files: the package's always mean the package's own files."""

import pytest

from moebench.workloads.errors import InputError
from moebench.workloads.load import load_hardware, load_suite, load_topology
from moebench.workloads.places import package_folder
from tests.workloads import files


@pytest.mark.parametrize(
    ("name", "text", "load"),
    [
        ("titan-rtx.toml", files.topology_text(), load_topology),
        ("titan-rtx.toml", files.hardware_text(), load_hardware),
        ("hetu.toml", files.suite_text(), load_suite),
    ],
)
def test_a_file_can_not_take_over_a_name_of_the_package(tmp_path, name, text, load):
    """Its results would be taken for those of the package's machine or suite; the error says to rename it."""
    path = files.written(tmp_path, text, name)
    with pytest.raises(InputError, match=r"is the name of a .* of moebench's own; rename the file"):
        load(str(path))
    assert load(str(path.rename(tmp_path / "mine.toml")))


@pytest.mark.parametrize(
    ("folder", "name", "load"),
    [("topologies", "h100", load_topology), ("hardware", "h100", load_hardware), ("suites", "hetu", load_suite)],
)
def test_the_packages_own_file_may_be_named_by_its_path(folder, name, load):
    """A path to the file that the name means is that file."""
    assert load(str(package_folder(folder) / f"{name}.toml"))
