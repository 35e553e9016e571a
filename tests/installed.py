"""Packages with systems as pip would have installed them: modules and metadata in a folder on the path."""

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from moebench import plugins
from moebench.systems import registry
from moebench.systems.plugins import ENTRY_POINTS


class Site:
    """A folder of installed packages, for this process and for the ranks and workers that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, distribution: str, systems: Mapping[str, str], files: Mapping[str, str]) -> None:
        """Lay down a package: its entry points `name -> module:object`, and its files by path."""
        for path, text in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(text, encoding="utf-8")
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        points = "\n".join(f"{name} = {value}" for name, value in systems.items())
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{points}\n")
        forget()

    def install_written(self, folder: Path) -> None:
        """Lay down a package that `moebench new-system` wrote: what its pyproject.toml says."""
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        (module,) = project["tool"]["setuptools"]["packages"]
        files = {f"{module}/{path.name}": path.read_text() for path in (folder / module).glob("*.py")}
        self.install(project["project"]["name"], project["project"]["entry-points"][ENTRY_POINTS], files)


def forget(folder: Path | None = None) -> None:
    """Other people's systems are looked for anew, and tried anew; modules of `folder` are imported anew."""
    registry.forget()
    plugins.forget()
    for name, module in list(sys.modules.items()):
        if folder is not None and folder in Path(getattr(module, "__file__", None) or "").parents:
            del sys.modules[name]
