import gzip
from dataclasses import replace

import pytest

from moebench.cases.case import Case
from moebench.sim.engine import trace_key
from moebench.sim.recorded import find_case, load_programs
from moebench.trace.serialise import programs_to_json
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec, LayerWorkload
from tests.moebench.sim.sim_machines import ProgramBuilder, topology


def case(system="deepspeed", batch_size=8, engine="sim"):
    workload = LayerWorkload(GateSpec("switch"), batch_size, 16, 8, 8, 8)
    return Case("hetu", "overall", system, workload, "1x8-test", "1x8", engine)


CASES = [case(), case("hetumoe"), case("hetumoe", 16)]


def test_a_case_is_found_by_its_name_or_a_part_that_only_it_has():
    """Whole names win over parts."""
    assert find_case(CASES[1].name, CASES) is CASES[1]
    assert find_case("b16", CASES) is CASES[2]
    longer = case("deepspeed_sparse")
    assert find_case(CASES[0].name, [*CASES, longer]) is CASES[0]


def test_a_part_of_several_names_lists_them():
    """The user says which."""
    with pytest.raises(InputError, match=r"2 cases match 'hetumoe'.*b8/1x8-test/e8/hetumoe.*b16/1x8-test/e8/hetumoe"):
        find_case("hetumoe", CASES)


def test_one_case_of_two_experiments_is_one():
    """The suite hetu's breakdowns repeat cases of its first experiment, which the README names without it."""
    again = replace(CASES[1], experiment="breakdown", assumptions={"gpu": "test"}, is_default=False)
    assert find_case("switch/b8/1x8-test/e8/hetumoe", [*CASES, again]) is CASES[1]
    assert find_case(again.name, [*CASES, again]) is again
    other = replace(again, workload=replace(again.workload, capacity_factor=2.0))
    with pytest.raises(InputError, match="2 cases match"):
        find_case("switch/b8/1x8-test/e8/hetumoe", [*CASES, other])


def test_an_unknown_name_lists_near_ones():
    """A typing error finds its way; no case at all is said too."""
    with pytest.raises(InputError, match=r"no case matches '.*deepsped'; near ones: overall/switch/b8/1x8"):
        find_case("overall/switch/b8/1x8-test/e8/deepsped", CASES)
    with pytest.raises(InputError, match="near ones: overall/switch/b16/1x8-test/e8/hetumoe, "):
        find_case("b16/1x8-test/hetumo", CASES)
    with pytest.raises(InputError, match="none of the 3 cases is near; `moebench explain RUN` lists all"):
        find_case("nothing-like-it", CASES)
    with pytest.raises(InputError, match="none of the 0 cases is near"):
        find_case("x", [])


def test_whole_parts_win_over_text():
    """The end of a name, then whole parts of it, before text that another name also contains."""
    both = [*CASES, case("deepspeed_sparse")]
    assert find_case("switch/b8/1x8-test/e8/deepspeed", both) is CASES[0]
    assert find_case("deepspeed", both) is CASES[0]
    assert find_case("b1", [*CASES, case("hetumoe", 1)]).workload.batch_size == 1
    with pytest.raises(InputError, match="3 cases match 'b8'"):
        find_case("b8", both)


def test_programs_come_back_as_they_were_stored(tmp_path):
    """The engine's file, read through the serialiser."""
    builder = ProgramBuilder(0, 8)
    builder.product(4, 4, 4)
    where = topology(1, 8)
    path = tmp_path / f"{trace_key(CASES[0], where)}.json.gz"
    path.write_bytes(gzip.compress(programs_to_json([builder.program()]).encode()))
    assert load_programs(tmp_path, CASES[0], where) == (builder.program(),)
    whole, disorder = path.read_bytes(), replace(builder.program(), ops=(replace(builder.program().ops[0], index=7),))
    damaged = bytes([*whole[:20], *(255 - byte for byte in whole[20:60]), *whole[60:]])
    stranger = gzip.compress(programs_to_json([disorder]).encode())
    for content in (b"torn", whole[:40], damaged, stranger, gzip.compress(b'{"schema_version": 3}')):
        path.write_bytes(content)
        with pytest.raises(InputError, match=path.name):
            load_programs(tmp_path, CASES[0], where)


def test_a_case_without_programs_says_why(tmp_path):
    """Measured cases have none; others did not run."""
    with pytest.raises(InputError, match="it ran on engine local; only sim records programs"):
        load_programs(tmp_path, case(engine="local"), topology(1, 8))
    with pytest.raises(InputError, match="not run yet, or it is unsupported"):
        load_programs(tmp_path, case(), topology(1, 8))
