"""The report of a run: one HTML file that needs nothing beside it and asks nothing of the network."""

import base64
import hashlib
import re
from importlib.resources import files
from pathlib import Path

from moebench.report.view import page
from moebench.results.store import RunFolder, write_atomically


def write_report(folder: RunFolder, path: Path | None = None) -> Path:
    """Write the report of a run and return where it is; by default report.html in the run's folder.

    Raises:
        InputError: the run's files can't be read, or the report can't be written.
    """
    target = path or folder.report
    write_atomically(target, render(page(folder)))
    return target


def render(view: dict) -> str:
    """The page of a view, with its style and script inside and a policy that allows nothing else."""
    import jinja2

    templates = files("moebench.report") / "templates"
    source, css, script = (
        (templates / name).read_text(encoding="utf-8") for name in ("report.html", "report.css", "report.js")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["css_string"] = css_string
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    safe = jinja2.utils.markupsafe.Markup
    return environment.from_string(source).render(
        view=view, css=safe(css), script=safe(script), script_hash=f"sha256-{digest}"
    )


def css_string(text: str) -> str:
    """A column's name in quotes, as style sheets write text: on a narrow page it stands beside each cell."""
    return '"' + re.sub(r'["\\\n\r\f<]', lambda match: f"\\{ord(match.group(0)):x} ", text) + '"'
