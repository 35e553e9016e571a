"""Output paths of every verb that writes a file."""

import pytest


@pytest.mark.parametrize("path", ["", "."])
@pytest.mark.parametrize("arguments", [("calibrate",), ("report", "run"), ("trace", "run", "case")])
def test_an_output_without_a_name_is_refused(moebench, arguments, path):
    """Before anything is read or measured."""
    said = moebench.refused(*arguments, "-o", path)
    assert "names no file" in said or "is a directory" in said
