"""Systems of other packages: which there are and whose, and loading one when it is asked for.

A package declares them in its entry-point group `moebench.systems`, each under its own name: an instance of a system,
or a class without arguments. The names are read from the package's metadata and nothing is imported for them, so that a
package that can't be imported is in the way of nobody who does not name its systems. `Unusable` stands for what can't
be used: it has the name, and whatever else is asked of it raises the reason.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from moebench.systems.interface import System

ENTRY_POINTS = "moebench.systems"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")  # as suites write it
_MEMBERS = ("title", "source", "supports", "as_shipped", "build")


class PluginError(RuntimeError):
    """Another package's system can't be used; the text says why."""


@dataclass(frozen=True)
class Plugin:
    """A system that a package says it has; nothing of it is imported yet."""

    point: EntryPoint

    @property
    def name(self) -> str:
        """Of the system."""
        return self.point.name

    @property
    def package(self) -> str:
        """Whose it is: `my-moe 0.1.0`; of one without metadata the module."""
        dist = self.point.dist
        return self.point.module if dist is None else f"{dist.name} {dist.version}"

    def load(self) -> "System":
        """Import it; one that can't be used is an `Unusable`."""
        from moebench.systems.interface import System

        try:
            loaded = self.point.load()
            system = loaded() if isinstance(loaded, type) else loaded
        except (Exception, SystemExit) as error:
            said = " ".join(str(error).split())
            return self.unusable(f"{self.point.value} can't be loaded: {type(error).__name__}: {said}")
        missing = [name for name in ("name", *_MEMBERS) if not hasattr(system, name)]
        if missing or not isinstance(system, System):
            return self.unusable(f"{self.point.value} is not a system; it lacks {', '.join(missing)}")
        problem = _problem(system, self.name)
        return system if problem is None else self.unusable(f"{self.point.value} {problem}")

    def unusable(self, reason: str) -> "Unusable":
        """What stands for it."""
        return Unusable(self.name, self.package, reason)


class Unusable:
    """The place of a system that can't be used."""

    def __init__(self, name: str, package: str, reason: str) -> None:
        self.name, self.package, self.reason = name, package, reason
        self.source = f"package {package}"
        self.title = f"can't be used: {reason}"

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        """Raises PluginError: always."""
        raise PluginError(self.reason)

    supports = as_shipped = build = _refuse


def declared(own_names: Callable[[], Collection[str]]) -> tuple[dict[str, "Plugin | Unusable"], tuple[Unusable, ...]]:
    """The systems of all installed packages by name, and those that have no place under theirs.

    Args:
        own_names: the names that are moebench's own; asked for only where there is any other.
    """
    found: dict[str, Plugin | Unusable] = {}
    without: list[Unusable] = []
    every = [Plugin(point) for point in entry_points(group=ENTRY_POINTS)]
    taken = own_names() if every else ()
    for plugin in sorted(every, key=lambda plugin: (plugin.name, plugin.package, plugin.point.value)):
        if plugin.name in taken:
            without.append(plugin.unusable(f"a system of moebench's own is named {plugin.name}; rename this one"))
        elif not NAME.fullmatch(plugin.name):
            without.append(plugin.unusable("its name must be lower-case letters, digits, - and _"))
        elif plugin.name in found:
            others = f"{found[plugin.name].package} and {plugin.package}"
            found[plugin.name] = Unusable(
                plugin.name, others, f"both have a system of the name {plugin.name}; uninstall one of them"
            )
        else:
            found[plugin.name] = plugin
    return found, tuple(without)


def _problem(system: "System", name: str) -> str | None:
    """What a system says of itself that makes no sense; None where all does."""
    if system.name != name:
        return f"is named {system.name!r}, its entry point {name!r}; both must be the same"
    for member in ("title", "source"):
        if not isinstance(getattr(system, member), str) or not getattr(system, member).strip():
            return f"has a {member} that is no text: {getattr(system, member)!r}"
    uncallable = [member for member in ("supports", "as_shipped", "build") if not callable(getattr(system, member))]
    return f"has a {uncallable[0]} that can't be called" if uncallable else None
