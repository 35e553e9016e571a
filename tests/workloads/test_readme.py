"""The examples of workloads/README.md are files that load."""

import re
from pathlib import Path

import pytest

import moebench.workloads
from moebench.workloads.validate import validate
from tests.workloads.files import written

README = Path(moebench.workloads.__file__).parent / "README.md"
EXAMPLES = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
KINDS = ("hardware", "topology", "suite")


@pytest.mark.parametrize(("kind", "text"), list(zip(KINDS, EXAMPLES, strict=True)), ids=KINDS)
def test_an_example_is_valid(tmp_path, kind, text):
    """As a reader would paste it."""
    assert f": {kind}" in validate(written(tmp_path, text))
