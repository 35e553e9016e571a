"""`moebench launch`: lines to copy, or JSON; what has no meaning is refused."""

import json


def test_lines_to_copy(moebench):
    """A comment that says where, then the line."""
    said = moebench("launch", "--suite", "hetu", "--topology", "2x8-titan-rtx")
    assert said.status == 0
    comments, lines = said.out.splitlines()[::2], said.out.splitlines()[1::2]
    assert all(comment.startswith("# ") for comment in comments)
    assert [line.split()[0] for line in lines] == ["torchrun", "sbatch"]


def test_json(moebench):
    """Objects with a name and a line."""
    found = json.loads(moebench("launch", "--suite", "hetu", "--topology", "2x8-titan-rtx", "--json").out)
    assert [entry["name"] for entry in found] == ["torchrun", "sbatch"]
    assert all("moebench run --suite hetu --topology 2x8-titan-rtx" in entry["line"] for entry in found)


def test_what_can_not_be_launched(moebench):
    """An unknown topology or suite, and a single rank."""
    assert "unknown topology" in moebench.refused("launch", "--suite", "hetu", "--topology", "2x8-titan")
    assert "suite" in moebench.refused("launch", "--suite", "hetoo", "--topology", "2x8-titan-rtx")
    assert "is one rank" in moebench.refused("launch", "--suite", "hetu", "--topology", "1x1-titan-rtx")
