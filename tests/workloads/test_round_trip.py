"""Schema round trips: what is written as TOML comes back as the same data."""

import tomllib
from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.workloads.layer import ACTIVATIONS, DTYPES
from moebench.workloads.load import load_hardware, load_suite, load_topology
from moebench.workloads.machine import Curve, Parameter
from moebench.workloads.parameters import HARDWARE_SPECS, LINK_SPECS, MEMORY_KINDS, Spec
from moebench.workloads.units import COUNT, UNITS
from tests.workloads.files import toml_file, written

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(str.strip)
plain = st.from_regex(r"[a-z][a-z0-9_-]{0,12}", fullmatch=True)


@st.composite
def parameters(draw, spec: Spec):
    """A valid Parameter of a spec, with the file's row for it."""
    status = draw(st.sampled_from(["datasheet", "measured", "derived", "assumed"]))
    unit = draw(st.sampled_from(sorted(UNITS[spec.dimension])))
    scale = UNITS[spec.dimension][unit]
    most = min(spec.most, 1e15) / scale
    if spec.dimension == COUNT:
        numbers = st.integers(1, 10_000).map(float)
    else:
        least = max(min(1e-6, most / 2), spec.least * (1 + 1e-9) / scale)
        numbers = st.floats(min_value=least, max_value=most * (1 - 1e-9))
    low, value, high = sorted(draw(st.tuples(numbers, numbers, numbers)))
    row = {"value": _text(value, unit), "status": status, "source": draw(texts)}
    if status == "datasheet":
        low = high = value
    else:
        row |= {"low": _text(low, unit), "high": _text(high, unit)}
    made = Parameter(value * scale, low * scale, high * scale, unit, scale, status, row["source"].strip())
    return made, row


def _text(number: float, unit: str):
    """A quantity as a file has it; plain numbers are the unit 1."""
    return number if unit == "1" else f"{number!r} {unit}"


@st.composite
def machines(draw, specs):
    """Every required parameter of `specs`, a peak rate, and a few others."""
    extra = draw(st.sets(st.sampled_from(sorted(specs)), max_size=4)) | {"gpu.peak.fp32"}
    chosen = [spec for name, spec in specs.items() if spec.required or name in extra]
    return {spec.name: draw(parameters(spec)) for spec in chosen}


@st.composite
def curves(draw):
    """A valid Curve over bytes, with the file's table for it."""
    at = sorted(draw(st.sets(st.integers(1, 10**12), min_size=1, max_size=5)))
    share = draw(st.lists(st.floats(0.001, 100), min_size=len(at), max_size=len(at)))
    for i in range(1, len(at)):  # more bytes never take less time
        share[i] = min(share[i], share[i - 1] * at[i] / at[i - 1])
    table = {"at": [f"{n} B" for n in at], "share": share, "status": "assumed", "source": draw(texts)}
    return Curve(tuple(map(float, at)), tuple(share), "assumed", table["source"]), table


two_curves = st.fixed_dictionaries({"memory": curves(), "sort": curves()})


@settings(max_examples=25)
@given(machines(HARDWARE_SPECS), texts, st.lists(texts, max_size=3), two_curves)
def test_hardware_survives_its_file(tmp_path_factory, made, title, notes, drawn):
    """Values, ranges, units, statuses, sources and curves come back as they were written."""
    data = {
        "schema_version": 1,
        "title": title,
        "kind": "gpu",
        "notes": notes,
        "parameters": {name: row for name, (_, row) in made.items()},
        "curves": {name: table for name, (_, table) in drawn.items()},
    }
    hardware = load_hardware(str(written(tmp_path_factory.mktemp("hardware"), toml_file(data))))
    assert hardware.parameters == {name: parameter for name, (parameter, _) in made.items()}
    assert hardware.curves == {kind: drawn["sort" if kind == "sort" else "memory"][0] for kind in MEMORY_KINDS}
    assert (hardware.title, hardware.notes) == (title, tuple(notes))


@settings(max_examples=25)
@given(machines(LINK_SPECS), st.integers(1, 1000), st.integers(1, 16), st.integers(1, 16))
def test_a_topology_survives_its_file(tmp_path_factory, made, nodes, gpus, nics):
    """Shape and numbers come back as they were written."""
    data = {
        "schema_version": 1,
        "title": "nodes",
        "hardware": "titan-rtx",
        "nodes": nodes,
        "gpus_per_node": gpus,
        "nics_per_node": nics,
        "link_kind": "pcie",
        "parameters": {name: row for name, (_, row) in made.items()},
    }
    topology = load_topology(str(written(tmp_path_factory.mktemp("topology"), toml_file(data))))
    assert (topology.nodes, topology.gpus_per_node, topology.nics_per_node) == (nodes, gpus, nics)
    assert topology.link_parameters == {name: parameter for name, (parameter, _) in made.items()}


layers = st.fixed_dictionaries(
    {
        "d_model": st.integers(1, 10**5),
        "d_ffn": st.integers(1, 10**5),
        "sequence": st.integers(0, 10**6),
        "dtype": st.sampled_from(DTYPES),
        "capacity_factor": st.floats(0.01, 100),
        "activation": st.sampled_from(ACTIVATIONS),
        "experts": st.lists(st.sampled_from(["16", "world", "2*world", "max(16, world)"]), min_size=1, max_size=3),
        "input_gradient": st.lists(st.booleans(), min_size=1, max_size=2),
        "routing": st.fixed_dictionaries(
            {"kind": st.sampled_from(["iid", "exact", "zipf"]), "seed": st.integers(0, 2**31), "alpha": st.floats(0, 4)}
        ),
    }
)
FIGURE = {"kind": "speedup", "x": "batch_size", "y": "step_time", "column": "size", "row": "gate"}
experiments = st.fixed_dictionaries(
    {
        "name": plain,
        "title": texts,
        "question": texts,
        "metric": st.just("step_time"),
        "systems": st.lists(plain, min_size=1, max_size=3),
        "gates": st.lists(st.sampled_from(["switch", "gshard", "topk-3", "topk-4"]), min_size=1, unique=True),
        "batch_sizes": st.lists(st.integers(0, 1024), min_size=1, max_size=4),
        "sizes": st.lists(st.sampled_from(["1x1", "2x8", "180x8"]), min_size=1, max_size=3),
        "node_types": st.lists(plain, min_size=1, max_size=3),
        "conventions": st.lists(st.sampled_from(["common", "as-shipped"]), min_size=1, max_size=2),
        "not_published": st.lists(texts, max_size=2),
        "caveats": st.lists(texts, max_size=2),
        "layer": layers,
    }
).map(lambda drawn: drawn | {"figure": FIGURE | {"baseline": drawn["systems"][-1]}})


@settings(max_examples=40)
@given(st.lists(experiments, min_size=1, max_size=3, unique_by=lambda e: e["name"]), texts, st.integers(1, 10**5))
def test_a_suite_survives_its_file(tmp_path_factory, drawn, title, samples):
    """Every field of every experiment comes back as it was written."""
    data = {"schema_version": 1, "title": title, "paper": "p", "samples": samples, "experiments": drawn}
    text = toml_file(data)
    assert tomllib.loads(text)["experiments"] == drawn
    suite = load_suite(str(written(tmp_path_factory.mktemp("suite"), text)))
    assert (suite.title, suite.samples) == (title, samples)
    for written_one, loaded in zip(drawn, suite.experiments, strict=True):
        assert [gate.label for gate in loaded.gates] == written_one["gates"]
        found = asdict(loaded) | {"gates": written_one["gates"]}
        found["layer"] |= {"routing": {k: v for k, v in found["layer"]["routing"].items() if k != "path"}}
        del found["sweep_gates"], found["sweep_systems"], found["shipped_gates"]
        assert found.pop("kind") == "layer"
        assert _plain(found) == written_one


def _plain(value):
    """Tuples as lists, as TOML has them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
