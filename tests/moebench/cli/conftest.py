"""The command line as a fixture."""

import pytest

from tests.moebench.cli.support import Moebench


@pytest.fixture
def moebench(capsys):
    """`moebench("run", ...)` -> what it printed and its exit status."""
    return Moebench(capsys)
