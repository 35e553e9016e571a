"""Text of other people as the text of a page: nothing in it is markup, reorders its neighbours or hides."""

from typing import TYPE_CHECKING

from moebench.compare.escape import plain

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 2_000  # characters that are shown of one text


def text_of(text: str, longest: int = LONGEST) -> str:
    """Any text as one line for an element or an attribute in double quotes."""
    return escape(plain(str(text), longest))


def escape(text: str) -> str:
    """Text whose characters stand for themselves; most hold none that needs it."""
    if "&" in text or "<" in text or ">" in text or '"' in text:
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&#34;")
    return text


def css_string(text: str) -> str:
    """A column's name in quotes, as style sheets write text: on a narrow page it stands beside each cell."""
    escaped = "".join(f"\\{ord(c):x} " if c in '"\\\n\r\f<' else c for c in text)
    return f'"{escaped}"'


def printable(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Result rows whose texts can be drawn and shown: one printable line each, long ones cut."""
    for name in frame.columns.difference(["draws", "detail"]):
        if frame[name].dtype not in ("object", "category"):
            continue
        fit = {text: plain(text) for text in frame[name].unique() if isinstance(text, str)}
        changed = {text: new for text, new in fit.items() if new != text}
        if changed:
            kind = frame[name].dtype.name
            frame[name] = frame[name].astype("object").map(lambda text, to=changed: to.get(text, text)).astype(kind)
    return frame
