"""Where data files live: those of the package, and the user's own. Names and paths only; nothing is parsed here."""

import os
from pathlib import Path

from moebench.workloads.errors import InputError, one_of

HARDWARE, TOPOLOGIES, SUITES = "hardware", "topologies", "suites"
THIS_MACHINE = "this-machine"
# Node types whose ranks are processes of this machine: joined by an emulated network, or by loopback alone.
EMULATED, UNSHAPED = "emulated", "unshaped"
ON_THIS_MACHINE = (THIS_MACHINE, EMULATED, UNSHAPED)
_ONE = {HARDWARE: "hardware", TOPOLOGIES: "node type", SUITES: "suite"}


def package_folder(folder: str) -> Path:
    """The package's folder of `hardware`, `topologies` or `suites`."""
    return Path(__file__).parent / folder


def user_folder(folder: str = "") -> Path:
    """The user's folder: under $MOEBENCH_HOME, else $XDG_CONFIG_HOME/moebench, else ~/.config/moebench."""
    home = os.environ.get("MOEBENCH_HOME")
    if home:
        return Path(home) / folder
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "moebench" / folder


def this_machine_hardware_path() -> Path:
    """Where `moebench calibrate` writes what it measured of this machine."""
    return user_folder(HARDWARE) / f"{THIS_MACHINE}.toml"


def names(folder: str) -> tuple[str, ...]:
    """Names of the files in `folder`, the package's and the user's; one that starts with `_` is only extended."""
    found = {
        path.stem
        for place in (package_folder(folder), user_folder(folder))
        for path in place.glob("*.toml")
        if not path.stem.startswith("_")
    }
    return tuple(sorted(found))


def find(folder: str, name: str, where: str = "", beside: Path | None = None) -> Path:
    """The file of a name, or the path itself where `name` is one (it ends with .toml or has a separator).

    The package's names cannot be taken over by files of the user's, but for what `moebench calibrate` measures.

    Args:
        beside: folder that a relative path is read from; the working folder by default.

    Raises:
        InputError: no such file, with the valid names; or a file of the user's whose name is one of the package's.
    """
    place = f"{where}: " if where else ""
    if name.endswith(".toml") or os.sep in name:
        path = (beside or Path()) / Path(name).expanduser()
        if not path.is_file():
            raise InputError(f"{place}no {_ONE[folder]} file {path}")
        _refuse_taken_name(folder, path, place)
        return path
    folders = [package_folder(folder), user_folder(folder)]
    for candidate in reversed(folders) if name in ON_THIS_MACHINE else folders:
        path = candidate / f"{name}.toml"
        if path.is_file():
            return path
    if (folder, name) == (HARDWARE, THIS_MACHINE):
        path = this_machine_hardware_path()
        raise InputError(f"{place}this machine has not been measured: run `moebench calibrate` (it writes {path})")
    raise one_of(_ONE[folder], name, names(folder), where)


def _refuse_taken_name(folder: str, path: Path, place: str) -> None:
    """Results are told apart by names, so that a name of the package's always means the package's own file."""
    own = package_folder(folder) / f"{path.stem}.toml"
    if path.stem in ON_THIS_MACHINE or not own.is_file() or path.samefile(own):
        return
    raise InputError(f"{place}{path}: {path.stem} is the name of a {_ONE[folder]} of moebench's own; rename the file")
