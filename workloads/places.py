"""Where data files live: those of the package, and the user's own. Names and paths only; nothing is parsed here."""

import os
from pathlib import Path

from moebench.workloads.errors import InputError, one_of

HARDWARE, TOPOLOGIES, SUITES, MODELS, REPORTED = "hardware", "topologies", "suites", "models", "reported"
FOLDERS = dict.fromkeys((HARDWARE, TOPOLOGIES, SUITES, MODELS), ".toml") | {REPORTED: ".csv"}  # and what is in each
VARIABLE = "MOEBENCH_WORKLOADS"  # folders of the user's, besides the one of `user_folder`
THIS_MACHINE = "this-machine"
# Node types whose ranks are processes of this machine: joined by an emulated network, or by loopback alone.
EMULATED, UNSHAPED = "emulated", "unshaped"
ON_THIS_MACHINE = (THIS_MACHINE, EMULATED, UNSHAPED)
_ONE = {HARDWARE: "hardware", TOPOLOGIES: "node type", SUITES: "suite", MODELS: "model", REPORTED: "paper"}


def package_folder(folder: str) -> Path:
    """The package's folder of `hardware`, `topologies`, `suites` or `models`."""
    return Path(__file__).parent / folder


def user_folder(folder: str = "") -> Path:
    """The user's folder: under $MOEBENCH_HOME, else $XDG_CONFIG_HOME/moebench, else ~/.config/moebench."""
    home = os.environ.get("MOEBENCH_HOME")
    if home:
        return Path(home) / folder
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "moebench" / folder


def user_folders() -> tuple[Path, ...]:
    """Every folder of the user's: those that --workloads or $MOEBENCH_WORKLOADS name, then `user_folder`."""
    named = [Path(text) for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    return tuple(dict.fromkeys([*named, user_folder()]))


def check_user_folder(path: Path, where: str) -> None:
    """Refuse a folder of the user's that can't be one.

    Raises:
        InputError: it is not there, or has none of the folders that are looked for.
    """
    if not path.is_dir():
        raise InputError(f"{where}: no folder {path}")
    if not any((path / folder).is_dir() for folder in FOLDERS):
        raise InputError(f"{where}: {path} has none of the folders {', '.join(f'{name}/' for name in FOLDERS)}")


def user_file(folder: str, name: str, where: str = "") -> Path | None:
    """The file of a name in the user's folders.

    Raises:
        InputError: there are several.
    """
    found = [path for place in user_folders() if (path := place / folder / f"{name}{FOLDERS[folder]}").is_file()]
    if len({path.resolve() for path in found}) > 1:
        place = f"{where}: " if where else ""
        raise InputError(f"{place}{' and '.join(map(str, found))} have the same name; rename one")
    return found[0] if found else None


def user_names(folder: str) -> tuple[str, ...]:
    """Names of the files in the user's folders; one that starts with `_` is only extended."""
    files = (path for place in user_folders() for path in (place / folder).glob(f"*{FOLDERS[folder]}"))
    return tuple(sorted({path.stem for path in files if not path.stem.startswith("_")}))


def this_machine_hardware_path() -> Path:
    """Where `moebench calibrate` writes what it measured of this machine."""
    return user_folder(HARDWARE) / f"{THIS_MACHINE}.toml"


def names(folder: str) -> tuple[str, ...]:
    """Names of the files in `folder`, the package's and the user's; one that starts with `_` is only extended."""
    own = {path.stem for path in package_folder(folder).glob("*.toml") if not path.stem.startswith("_")}
    return tuple(sorted(own.union(user_names(folder))))


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
    own = package_folder(folder) / f"{name}.toml"
    if own.is_file() and name not in ON_THIS_MACHINE:
        return own
    user = user_file(folder, name, where)
    if user is not None or own.is_file():
        return user or own
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
