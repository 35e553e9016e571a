"""Finding systems by name, built-in and from other packages."""

from importlib.metadata import EntryPoint

import pytest

from moebench.systems import registry
from moebench.systems.interface import System
from moebench.systems.reference import Reference
from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec


class Plugin(Reference):
    """A system of another package."""

    name = "plugin"


class Clash(Plugin):
    """Takes a name that exists."""

    name = "hetumoe"


INSTANCE, NOT_A_SYSTEM = Plugin(), 5


@pytest.fixture
def installed(monkeypatch):
    """Makes entry points appear installed."""

    def install(*values):
        points = [EntryPoint(value.rpartition(":")[2].lower(), value, registry.ENTRY_POINTS) for value in values]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)
        registry.systems.cache_clear()

    yield install
    registry.systems.cache_clear()


def test_the_built_in_systems():
    """Each is a System under its own name."""
    found = registry.systems()
    assert list(found)[:4] == ["reference", "deepspeed", "deepspeed_sparse", "hetumoe"]
    assert "tutel" in found
    for name, system in found.items():
        assert isinstance(system, System)
        assert system.name == name
        assert system.title
        assert system.source
    assert registry.reference() is found["reference"]


def test_an_unknown_system_lists_the_valid_ones():
    """The error helps."""
    with pytest.raises(InputError, match=r"did you mean hetumoe\?\); choose one of: deepspeed, deepspeed_sparse"):
        registry.get("hetu-moe")


def test_a_name_may_carry_options():
    """A variant is made when asked for, and not listed; what it lacks is said."""
    variant = registry.get("tutel+exchange=2d+degree=4")
    assert isinstance(variant, System)
    assert variant.name == "tutel+degree=4+exchange=2d"
    assert registry.get(variant.name).name == variant.name
    assert registry.stem_of(variant.name) == "tutel"
    assert variant.name not in registry.systems()
    for name, words in (
        ("tutel+depth=4", "option of system tutel 'depth'.*degree, exchange, r"),
        ("tutel+degree=4+degree=2", "write each option once"),
        ("tutel+degree", "as .name=value, not 'degree'"),
        ("hetumoe+degree=4", "hetumoe has no options"),
        ("tutle+degree=4", "unknown system 'tutle'"),
    ):
        with pytest.raises(InputError, match=words):
            registry.get(name)


@pytest.mark.parametrize("attribute", ["Plugin", "INSTANCE"])
def test_a_plugin_is_found(installed, attribute):
    """An entry point may name a class or an instance."""
    installed(f"{__name__}:{attribute}")
    assert type(registry.get("plugin")) is Plugin


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["Clash"], "two systems are named 'hetumoe': one of moebench, one of .*:Clash"),
        (["Plugin", "INSTANCE"], "two systems are named 'plugin'"),
        (["Absent"], "entry point absent = .* can't be loaded: AttributeError"),
        (["NOT_A_SYSTEM"], "is not a system; it lacks name, title, source, supports, as_shipped, build"),
    ],
)
def test_a_bad_plugin_is_an_error(installed, values, words):
    """Clashes and broken entry points are named, never skipped."""
    installed(*(f"{__name__}:{value}" for value in values))
    with pytest.raises(InputError, match=words):
        registry.systems()


def test_conventions_by_name():
    """`common` is the same for all, `as-shipped` the system's own; another name is refused."""
    system, gate = registry.get("deepspeed"), GateSpec("switch", 1)
    assert registry.conventions_of(system, gate, "common") is COMMON
    assert registry.conventions_of(system, gate, "as-shipped").drop_order == "random"
    with pytest.raises(InputError, match="as-shipped, common"):
        registry.conventions_of(system, gate, "shipped")
