"""Finding systems by name, built-in and from other packages."""

from importlib.metadata import EntryPoint

import pytest

from moebench.systems import plugins, registry
from moebench.systems.interface import System
from moebench.systems.plugins import PluginError, Unusable
from moebench.systems.reference import Reference
from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec


class Plugin(Reference):
    """A system of another package."""

    name = "plugin"


class Nameless(Plugin):
    """Has no title."""

    title = " "


class NotCallable(Plugin):
    """Its `build` is a number."""

    build = 3


INSTANCE, NOT_A_SYSTEM = Plugin(), 5


@pytest.fixture
def installed(monkeypatch):
    """Makes entry points appear installed: `name=object of this file`."""

    def install(*values):
        pairs = [value.split("=") for value in values]
        points = [EntryPoint(name, f"{__name__}:{value}", plugins.ENTRY_POINTS) for name, value in pairs]
        monkeypatch.setattr(plugins, "entry_points", lambda group: points)
        registry.forget()

    yield install
    monkeypatch.undo()
    registry.forget()


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
    """An entry point may name a class or an instance; it is listed after ours."""
    installed(f"plugin={attribute}")
    assert type(registry.get("plugin")) is Plugin
    assert registry.names() == (*(system.name for system in registry.BUILT_IN), "plugin")
    assert registry.package_of("plugin") == __name__
    assert registry.package_of("hetumoe") is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("plugin=Absent", f"{__name__}:Absent can't be loaded: AttributeError"),
        ("plugin=NOT_A_SYSTEM", "is not a system; it lacks name, title, source, supports, as_shipped, build"),
        ("other=Plugin", "is named 'plugin', its entry point 'other'; both must be the same"),
        ("plugin=Nameless", "has a title that is no text: ' '"),
        ("plugin=NotCallable", "has a build that can't be called"),
    ],
)
def test_a_bad_plugin_stands_there_with_the_reason(installed, value, words):
    """It is listed, and whatever is asked of it raises; the others can be used."""
    installed(value)
    found = registry.systems()
    assert found["hetumoe"].name == "hetumoe"
    bad = found[value.partition("=")[0]]
    assert isinstance(bad, Unusable)
    assert words in bad.reason
    with pytest.raises(PluginError, match=r"can't|lacks|must|no text"):
        bad.supports(None, COMMON)


@pytest.mark.parametrize(("value", "words"), [("hetumoe=Plugin", "rename this one"), ("Plug.in=Plugin", "lower-case")])
def test_a_name_that_is_taken_or_none_is_left_out(installed, value, words):
    """Ours keeps its name, and the other one is told apart with its package."""
    installed(value)
    assert type(registry.get("hetumoe")) is not Plugin
    assert set(registry.systems()) == {system.name for system in registry.BUILT_IN}
    (left_out,) = registry.misnamed()
    assert left_out.package == __name__
    assert words in left_out.reason


def test_a_name_of_two_packages_is_unusable(installed):
    """Nobody can know which is meant."""
    installed("plugin=Plugin", "plugin=INSTANCE")
    assert "both have a system of the name plugin" in registry.get("plugin").reason


class AnyConventions(Plugin):
    """Says something else where it should give Conventions."""

    def as_shipped(self, gate):
        return "mine"


def test_conventions_that_are_none_are_an_error():
    """Which names the system."""
    with pytest.raises(TypeError, match="as_shipped of plugin gives 'mine'"):
        registry.conventions_of(AnyConventions(), GateSpec("switch"), "as-shipped")


def test_conventions_by_name():
    """`common` is the same for all, `as-shipped` the system's own; another name is refused."""
    system, gate = registry.get("deepspeed"), GateSpec("switch", 1)
    assert registry.conventions_of(system, gate, "common") is COMMON
    assert registry.conventions_of(system, gate, "as-shipped").drop_order == "random"
    with pytest.raises(InputError, match="as-shipped, common"):
        registry.conventions_of(system, gate, "shipped")
