"""Every source of a packaged number says by itself where the number comes from."""

import re
import tomllib
from pathlib import Path

import pytest

import moebench.workloads

ROOT = Path(moebench.workloads.__file__).parent
FILES = sorted([*ROOT.glob("hardware/*.toml"), *ROOT.glob("topologies/*.toml")])
# What points at another line or file.
ELSEWHERE = re.compile(
    r"^(see|as|same|ditto|likewise|fits? of)\b|\bcurves\.|\bthe same [\d.]+ |\b(as|see) (above|below)\b"
)


def sources(path):
    """Key and source of every number and curve of a file."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    for part in ("parameters", "curves"):
        for name, entry in document.get(part, {}).items():
            if "source" in entry:
                yield name, entry["source"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_source_stands_alone(path):
    """It is read in a report or a JSON document, far from the lines around it."""
    assert {name: text for name, text in sources(path) if ELSEWHERE.search(text)} == {}


def test_what_points_elsewhere_is_found():
    """The pattern finds the wording that a reader could not follow."""
    for text in ("see curves.sort", "same fit", "the same 9.4 us", "as gather; atomics", "fit of H100 SXM"):
        assert ELSEWHERE.search(text), text
