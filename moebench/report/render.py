"""Templates to pages: one HTML file each, which needs nothing beside it and asks nothing of the network."""

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from moebench.compare.escape import plain
from moebench.report.parts import Table
from moebench.report.tables import cell_html, table_html
from moebench.report.text import LONGEST


def render(name: str, view: Mapping[str, Any]) -> str:
    """The page of a view by the template of a name, with style and script inside and a policy that allows nothing else.

    Any text becomes one line that shows all it holds, whatever a file said (moebench.compare.escape).

    Args:
        view: `anchors` of it says where a cell that is Linked leads to.
    """
    import jinja2

    templates = files("moebench.report") / "templates"
    safe = jinja2.utils.markupsafe.Markup

    def read(file: str) -> str:
        return (templates / file).read_text(encoding="utf-8")

    def shown(value: Any) -> Any:
        return plain(value, LONGEST) if isinstance(value, str) and not isinstance(value, safe) else value

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read), finalize=shown, autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    script = read("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

    def table(of: Table) -> Any:
        return safe(table_html(of, view["anchors"]))

    def cell(text: str) -> Any:
        return safe(cell_html(text, view["anchors"]))

    return environment.get_template(f"{name}.html").render(
        view=view, css=safe(read("page.css")), script=safe(script), script_hash=f"sha256-{digest}", table=table,
        cell=cell,
    )  # fmt: skip
