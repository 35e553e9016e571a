"""Text of other people made fit to be shown: nothing breaks a line, a table, a page, or hides what it says."""

import hashlib
import re

LONGEST = 240  # characters of a name; longer ones keep both ends and a digest, so that they stay apart

_PLAIN = re.compile(r"[\x20-\x7e]*")
_MARKDOWN = {ord(c): f"&#{ord(c)};" for c in "\\`*_{}[]()#+-.!|~:@$<>&\"'"}


def plain(text: str, longest: int = LONGEST) -> str:
    """One printable line, too long a text cut in its middle.

    What Python counts as not printable becomes an escape: control characters, marks that reorder or hide their
    neighbours (right-to-left overrides, joiners), line separators, lone surrogates.
    """
    text = cut(text, longest)
    if _PLAIN.fullmatch(text):
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def cut(text: str, longest: int = LONGEST) -> str:
    """At most some `longest` characters: both ends, the length, and a digest of the whole."""
    if len(text) <= longest:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
    middle = f"...[{len(text)} characters, {digest}]..."
    each = max((longest - len(middle)) // 2, 8)
    return text[:each] + middle + text[-each:]


def markdown(text: str) -> str:
    """A cell of a Markdown table that shows exactly the text: as code, so that `@name` calls nobody."""
    return f"<code>{plain(text).translate(_MARKDOWN)}</code>" if text else ""


def prose(text: str) -> str:
    """The same outside of code: a reason, a remark; `@` and `#` stay apart from what follows."""
    shown = plain(text, 4 * LONGEST).translate(_MARKDOWN)
    return shown.replace("&#64;", "&#64;\u2060").replace("&#35;", "&#35;\u2060")


def _escaped(character: str) -> str:
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    code = ord(character)
    return short or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}")
