"""A machine that has been calibrated, in name: what runs on it is real, its file is made up."""

import pytest

from tests.workloads.files import hardware_text, written


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    """This machine's hardware file lies in a folder of the test's own."""
    home = tmp_path / "home"
    (home / "hardware").mkdir(parents=True)
    written(home / "hardware", hardware_text().replace('"gpu"', '"cpu"'), "this-machine.toml")
    monkeypatch.setenv("MOEBENCH_HOME", str(home))
    return home
