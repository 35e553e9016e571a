"""Other people's systems: a faulty one harms its own rows alone, and is named with its package and the reason."""

import json
from dataclasses import replace

import pytest

from moebench import plugins
from moebench.cases.layers import refusal
from moebench.cases.plan import Filters
from moebench.checks import correctness
from moebench.checks.correctness import check_gates
from moebench.results.rows import SUBJECTS
from moebench.run import begin, execute, prepare
from moebench.sim import foreign
from moebench.sim.engine import Group
from moebench.sim.foreign import run_foreign
from moebench.systems import registry
from moebench.systems.plugins import Unusable
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite, load_topology
from tests import faulty
from tests.moebench.fake_engine import Watch
from tests.workloads.files import EXPERIMENT, suite_text, written


def suite_of(folder, names, conventions=("common",)):
    """A suite of one tiny layer and the systems named."""
    text = EXPERIMENT.replace('["reference"]', json.dumps(list(names))).replace('"switch", "topk-2"', '"switch"')
    text += f"conventions = {json.dumps(list(conventions))}\n"
    return load_suite(str(written(folder, suite_text(text))))


@pytest.mark.slow
def test_faulty_systems_fail_their_own_rows_alone(tmp_path, site):
    """One run of all faults: ours have numbers, each of theirs its status, and a reason that names the package."""
    site.install("faulty-systems", faulty.SYSTEMS, faulty.FILES)
    job = begin(prepare(suite_of(tmp_path, ["reference", *faulty.FOUND, "hetumoe"]), Filters()), tmp_path / "run")
    outcome = execute(job, Watch(), jobs=1)
    rows = {row.system: row for row in job.folder.rows(*SUBJECTS) if row.sample is None}
    assert outcome.done == outcome.cases == len(faulty.FOUND) + 2
    found = {name: row.status for name, row in rows.items()}
    assert found == {name: status for name, (status, _) in faulty.FOUND.items()} | dict.fromkeys(
        ("reference", "hetumoe"), "passed"
    )
    for name, (status, words) in faulty.FOUND.items():
        if status != "passed":
            assert rows[name].reason.startswith("package faulty-systems 1.0: "), name
            assert words in rows[name].reason, name
            assert "\n" not in rows[name].reason
    assert "Traceback (most recent call last)" in rows["raises"].detail["report"]
    assert job.folder.record["environment"]["plugins"]["raises"] == "faulty-systems 1.0"


def test_an_import_that_never_ends_is_given_up(site, monkeypatch):
    """In a process of its own, and the system is unusable from then on."""
    monkeypatch.setattr(plugins, "LOAD_S", 1.0)
    site.install("faulty-systems", faulty.SYSTEMS, faulty.FILES)
    plugins.vet(["hangs_at_import"])
    system = registry.get("hangs_at_import")
    assert isinstance(system, Unusable)
    assert "asking what it supports, failed: rank 0 was not done after 1 s" in system.reason


def test_a_layer_that_never_ends_fails_its_check(site, monkeypatch):
    """After the time limit of checks."""
    monkeypatch.setattr(correctness, "TIMEOUT_S", 1.0)
    site.install("faulty-systems", faulty.SYSTEMS, faulty.FILES)
    (status,) = check_gates("hangs", ["switch"]).values()
    assert status.status == "failed"
    assert "not done after 1 s" in status.reason


def test_a_trace_that_never_ends_is_given_up_and_no_other_of_that_system_tried(tmp_path, site, monkeypatch):
    """Its process ends itself, whatever it is in the midst of."""
    monkeypatch.setattr(foreign, "LONGEST_S", 1.0)
    site.install("faulty-systems", faulty.SYSTEMS, faulty.FILES)
    ready = prepare(suite_of(tmp_path, ["reference"]), Filters())
    case = replace(ready.cases[0], system="hangs_in_trace")
    groups = [Group(key, (case,), (ready.topologies[case.topology],)) for key in "ab"]
    first, second = run_foreign(groups, ready.suite, None)
    assert first[0].reason == "its program was not done after 1 s"
    assert second[0].reason == "another of its programs was not done after 1 s"


def test_nothing_is_imported_for_a_run_that_does_not_name_it(tmp_path, site):
    """A package that would end the process is in nobody's way."""
    site.install("ends-all", {"ends_all": "ends_all:System"}, {"ends_all.py": "import os\nos._exit(9)\n"})
    assert "ends_all" in registry.names()
    assert len(prepare(suite_of(tmp_path, ["reference"]), Filters()).cases) == 1


def test_real_ranks_are_not_started_for_a_system_that_raises_when_asked(tmp_path, site):
    """Its case is failed with the error, before any rank is there."""
    site.install("faulty-systems", faulty.SYSTEMS, faulty.FILES)
    (case,) = prepare(suite_of(tmp_path, ["reference"]), Filters()).cases
    status, reason = refusal(replace(case, system="no_reason"), load_topology("1x2-titan-rtx"))
    assert status == "failed"
    assert reason.startswith("TypeError: supports of no_reason gives False")


@pytest.mark.parametrize("name", ["hetumoe", "lancet"])
def test_a_name_of_ours_stays_ours(site, name):
    """Of systems for layers and for whole models: whose rows they are is not changed by who takes the name."""
    site.install("takes-names", {name: "faulty:Raises"}, faulty.FILES)
    assert registry.packages() == {}
    assert registry.package_of(name) is None
    assert [lost.name for lost in registry.misnamed()] == [name]


def test_two_packages_with_one_name_are_told_apart_by_neither(site):
    """Nobody can know which is meant; both are named."""
    site.install("first", {"twin": "faulty:Raises"}, faulty.FILES)
    site.install("second", {"twin": "faulty:Raises"}, {})
    twin = registry.get("twin")
    assert isinstance(twin, Unusable)
    assert twin.package == "first 1.0 and second 1.0"
    assert "uninstall one" in twin.reason


def test_an_unusable_system_has_its_options_too(site):
    """Its variant can't be used for the same reason; a name that nobody has is still an error."""
    site.install("late", {"late": "late:System"}, {"late.py": "raise RuntimeError('not today')\n"})
    assert registry.get("late+degree=4").name == "late+degree=4"
    assert registry.package_of("late+degree=4") == "late 1.0"
    with pytest.raises(InputError, match=r"choose one of: .*late"):
        registry.get("lake")
