"""Systems of other packages on the command line."""

import json

from tests import faulty


def test_list_names_what_can_not_be_used(site, moebench):
    """Each with its package and why; a name of ours stays ours, and standard error says whose was left out."""
    files = {"late.py": "raise RuntimeError('not today')\n", "own.py": faulty.MODULE}
    site.install("mixed-bag", {"late": "late:System", "raises": "own:Raises", "hetumoe": "own:Raises"}, files)
    said = moebench("list", "systems", "--json")
    found = {entry["name"]: entry for entry in json.loads(said.out)}
    assert found["late"]["package"] == found["raises"]["package"] == "mixed-bag 1.0"
    assert found["late"]["title"].startswith("can't be used: late:System can't be loaded: RuntimeError: not today")
    assert found["raises"]["title"] == "Reference (loop over experts)"
    assert found["hetumoe"]["package"] == "moebench"
    left_out = (
        "moebench: package mixed-bag 1.0: its system hetumoe is left out: a system of moebench's own is named hetumoe; "
        "rename this one\n"
    )
    assert said.err == left_out
    assert moebench("run", "--suite", "smoke", "--system", "hetumoe", "--dry-run").err == left_out
