"""Which cases a suite and the user's filters make."""

from dataclasses import replace

import pytest

from moebench.cases.plan import QUICK_SAMPLES, Filters, Machines, plan, quickened
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_topology
from tests.moebench.suites import small_overall


@pytest.fixture(scope="module")
def hetu():
    return small_overall()


@pytest.fixture(scope="module")
def cases(hetu):
    return plan(hetu, Filters())


def test_every_gate_runs_under_the_default_assumptions(hetu, cases):
    """All gates, batch sizes, sizes and systems appear under the first choice of everything."""
    (experiment,) = hetu.experiments
    default = [c for c in cases if c.is_default and c.conventions == "common"]
    expected = len(experiment.gates) * len(experiment.batch_sizes) * len(experiment.sizes) * len(experiment.systems)
    assert len(default) == expected
    assert {c.workload.gate for c in default} == set(experiment.gates)
    assert {c.assumptions["gpu"] for c in default} == {experiment.node_types[0]}


def test_only_sweep_gates_run_under_other_assumptions(hetu, cases):
    """The full cross of node types, expert rules and input gradients runs for the swept gate only."""
    (experiment,) = hetu.experiments
    swept = [c for c in cases if not c.is_default]
    assert {c.workload.gate.label for c in swept} == set(experiment.sweep_gates)
    assert {c.assumptions["gpu"] for c in swept} == set(experiment.node_types)
    assert {c.workload.input_gradient for c in swept} == {True, False}


def test_sweeps_and_as_shipped_can_be_narrowed(hetu):
    """To some systems under other assumptions, to some gates as shipped; in a hurry to the swept gates."""
    (experiment,) = hetu.experiments
    narrow = replace(experiment, sweep_systems=("hetumoe",), shipped_gates=("gshard",))
    found = plan(replace(hetu, experiments=(narrow,)), Filters())
    assert {c.system for c in found if not c.is_default} == {"hetumoe"}
    assert {c.system for c in found if c.is_default} == set(experiment.systems)
    assert {c.workload.gate.label for c in found if c.conventions == "as-shipped"} == {"gshard"}
    asked = plan(replace(hetu, experiments=(narrow,)), Filters(systems=("deepspeed",), gates=("switch",)))
    assert {c.system for c in asked if not c.is_default} == {"deepspeed"}
    assert {c.workload.gate.label for c in plan(hetu, Filters(quick=True))} == set(experiment.sweep_gates)


def test_as_shipped_conventions_run_under_the_default_assumptions_only(cases):
    """As shipped stands beside the default, never in the sweep."""
    assert {c.is_default for c in cases if c.conventions == "as-shipped"} == {True}


def test_each_computation_is_planned_once(cases):
    """Two expert rules that give the same number on a topology share a case, which is the default's where it can be."""
    keys = [(c.system, c.workload, c.topology, c.conventions) for c in cases]
    assert len(keys) == len(set(keys))
    assert len({c.hash for c in cases}) == len({c.name for c in cases}) == len(cases)
    here = [c for c in cases if c.topology == "4x8-titan-rtx" and c.workload.input_gradient]
    shared = [c for c in here if c.workload.experts == 32]
    assert shared
    assert all(c.is_default for c in shared)


def test_experts_follow_the_rule(cases):
    """max(16, world): 16 up to two nodes of 8, one a GPU above."""
    default = {c.size: c.workload.experts for c in cases if c.is_default}
    assert default == {"1x8": 16, "2x8": 16, "4x8": 32, "8x8": 64}


def test_default_cases_come_first(cases):
    """A stopped run holds the cases that judge a claim before the sweep."""
    flags = [c.is_default for c in cases]
    assert flags == sorted(flags, reverse=True)


def test_filters_repeat_and_combine(hetu):
    """Each filter keeps the named values only."""
    named = {"gates": ("switch", "topk"), "batch_sizes": (8, 32), "systems": ("hetumoe",)}
    found = plan(hetu, Filters(**named, topologies=("2x8-titan-rtx",)))
    assert {c.workload.gate.label for c in found} == {"switch", "topk-4"}
    assert {c.workload.batch_size for c in found} == {8, 32}
    assert {c.system for c in found} == {"hetumoe"}
    assert {c.topology for c in found} == {"2x8-titan-rtx"}


@pytest.mark.parametrize(("asked", "found"), [("4x8", 4), ("v100-pcie", 4), ("8x8-rtx-2080-ti", 1)])
def test_a_topology_filter_takes_names_sizes_and_node_types(hetu, asked, found):
    """`4x8` keeps a size of every node type, `v100-pcie` every size of a node type."""
    assert len({c.topology for c in plan(hetu, Filters(topologies=(asked,)))}) == found


def test_a_node_type_that_is_asked_for_runs_every_gate(hetu):
    """A user who names a machine gets the default layer of every gate on it, not the sweep alone."""
    found = plan(hetu, Filters(topologies=("v100-pcie",)))
    assert {c.workload.gate.name for c in found} == {"switch", "gshard", "topk"}


def test_another_topology_joins_as_an_assumption(hetu):
    """A topology outside of the suite runs, and is no default."""
    found = plan(hetu, Filters(topologies=("2x8-h100",)))
    what = {(c.topology, c.size, c.assumptions["gpu"], c.is_default) for c in found}
    assert what == {("2x8-h100", "2x8", "h100", False)}


def test_another_registered_system_joins(hetu):
    """A system that the suite doesn't list may be asked for."""
    assert {c.system for c in plan(hetu, Filters(systems=("reference",)))} == {"reference"}


def test_variants_join_by_name(hetu):
    """A system with options in its name, from the user in any order, in a suite as the name has them."""
    found = plan(hetu, Filters(systems=("tutel+exchange=2d+degree=4", "tutel")))
    assert {c.system for c in found} == {"tutel", "tutel+degree=4+exchange=2d"}
    with pytest.raises(InputError, match="option of system tutel 'depth'"):
        plan(hetu, Filters(systems=("tutel+depth=4",)))
    listed = replace(hetu.experiments[0], systems=("tutel+degree=4", "tutel+r=0"))
    assert {c.system for c in plan(replace(hetu, experiments=(listed,)), Filters())} == set(listed.systems)
    listed = replace(listed, systems=("tutel+exchange=2d+degree=4",))
    with pytest.raises(InputError, match=r"write system .* as 'tutel\+degree=4\+exchange=2d'"):
        plan(replace(hetu, experiments=(listed,)), Filters())


def test_quick_is_the_default_layer_with_few_draws(hetu):
    """--quick: first choices, common conventions, few draws."""
    found = plan(hetu, Filters(quick=True))
    assert all(c.is_default and c.conventions == "common" for c in found)
    assert quickened(hetu).samples == QUICK_SAMPLES
    assert quickened(replace(hetu, samples=4)).samples == 4


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        (Filters(experiments=("overal",)), ("unknown experiment 'overal'", "overall")),
        (Filters(systems=("hetumo",)), ("unknown system 'hetumo'", "did you mean hetumoe?", "deepspeed")),
        (Filters(gates=("swich",)), ("unknown gate 'swich'", "gshard", "switch", "topk-4")),
        (Filters(batch_sizes=(7,)), ("unknown batch size 7", "16", "64")),
        (Filters(dtypes=("bf16",)), ("unknown dtype 'bf16'", "fp32")),
        (Filters(topologies=("4x8-titan",)), ("unknown topology '4x8-titan'", "4x8-titan-rtx")),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_the_valid_ones(hetu, filters, words):
    """Every filter refuses what it doesn't know and says what there is."""
    with pytest.raises(InputError) as error:
        plan(hetu, filters)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_a_suite_with_an_unknown_system_is_an_error(hetu):
    """A suite file that lists a system nobody registered is refused, with its experiment."""
    suite = replace(hetu, experiments=(replace(hetu.experiments[0], systems=("fairseq",)),))
    with pytest.raises(InputError, match="experiment overall: unknown system 'fairseq'"):
        plan(suite, Filters())


def test_experts_that_no_rank_division_fits_are_an_error(hetu):
    """Experts not divisible by ranks: the error names experiment, topology and both numbers."""
    with pytest.raises(
        InputError, match=r"topology 1x6-titan-rtx: experts = 16 is not divisible by ranks = 6"
    ) as refused:
        plan(hetu, Filters(topologies=("1x6-titan-rtx",)))
    assert "rule 'max(16, world)' of its key layer.experts" in str(refused.value)
    assert "such as 1x8" in str(refused.value)


def test_top_k_above_experts_is_an_error(hetu):
    """A gate can't choose more experts than there are."""
    experiment = hetu.experiments[0]
    layer = replace(experiment.layer, experts=("world",))
    suite = replace(hetu, experiments=(replace(experiment, layer=layer, sizes=("1x2",)),))
    with pytest.raises(InputError, match="top_k = 4 must be between 1 and experts = 2"):
        plan(suite, Filters())


def test_auto_simulates_other_machines(cases):
    """A case on hardware that is not this machine runs in sim."""
    assert {c.engine for c in cases} == {"sim"}


def test_local_refuses_another_machine(hetu):
    """--engine local on a described machine is an error, not a number with the wrong name."""
    with pytest.raises(InputError, match="engine local measures one process on this machine"):
        plan(hetu, Filters(), "local")


def test_an_unknown_engine_lists_the_engines(hetu):
    """An engine that there is not is not accepted."""
    with pytest.raises(InputError, match=r"unknown engine 'gpu'.*auto, cluster, local, sim"):
        plan(hetu, Filters(), "gpu")


def test_auto_measures_on_this_machine(hetu):
    """One rank on this machine runs in local, several in cluster."""
    described = load_topology("1x1-titan-rtx")
    here = replace(described, name="1x1-this-machine", hardware=replace(described.hardware, name="this-machine"))
    machines = Machines(load=lambda name: here)
    assert {c.engine for c in plan(hetu, Filters(topologies=("1x1-this-machine",)), "auto", machines)} == {"local"}
    two = replace(here, name="1x2-this-machine", gpus_per_node=2)
    machines = Machines(load=lambda name: two)
    assert {c.engine for c in plan(hetu, Filters(topologies=("1x2-this-machine",)), "auto", machines)} == {"cluster"}


def test_overrides_reach_the_machine_and_the_hash(hetu):
    """--set changes the parameter and makes another case of it."""
    filters = Filters(overrides={"nic.bandwidth": "25GB/s"}, quick=True)
    machines = Machines(filters.overrides)
    changed = plan(hetu, filters, "auto", machines)
    assert machines("4x8-titan-rtx").link_parameters["nic.bandwidth"].value == 25e9
    assert not {c.hash for c in changed} & {c.hash for c in plan(hetu, Filters(quick=True))}


def test_two_machines_of_one_name_are_refused(tmp_path):
    """Two files of one name in two folders would share their rows; the second is refused, not swapped in."""
    paths = []
    for folder, latency in (("a", "1us"), ("b", "2us")):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "mine.toml")
        paths[-1].write_text(
            'schema_version = 1\nextends = "titan-rtx"\nnodes = 1\n[parameters]\n'
            f'"link.latency" = {{ value = "{latency}", low = "1us", high = "2us", status = "assumed", source = "s" }}\n'
        )
    machines = Machines()
    first = machines(str(paths[0]))
    assert machines(str(paths[0])) is first
    with pytest.raises(InputError, match=f"another machine of this run is named {first.name}"):
        machines(str(paths[1]))


def test_reported_numbers_that_are_not_there_are_refused(hetu):
    """Before anything runs: the name in a suite's `reported` must be one of the papers'."""
    with pytest.raises(InputError, match=r"hetu\.toml: unknown reported 'nosuch'; choose one of: .*hetu"):
        plan(replace(hetu, reported="nosuch"), Filters())


def test_too_many_local_experts_are_refused(hetu):
    """A rank's loop over its experts stays within bounds, whatever the rule says."""
    (experiment,) = hetu.experiments
    layer = replace(experiment.layer, experts=("16384",))
    with pytest.raises(InputError, match="experts = 16384 on ranks = 8: at most 1024 on a rank"):
        plan(replace(hetu, experiments=(replace(experiment, layer=layer),)), Filters(topologies=("1x8",), quick=True))
