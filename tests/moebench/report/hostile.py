"""Texts that nobody should put into a results file, and what no page may hold of them."""

import re

TEXTS = [
    "quotes \" ' `",
    "<script>alert(1)</script>",
    "</style></title><img src=x onerror=alert(1)>",
    "two\nlines\r\nand | a bar",
    "\u202egnirts desrever\u2066",
    "\x1b[31mred\x00\x07 \ufeff\u200b",
    "$\\frac{1}{0$ & &amp; {{ 7 * 7 }} {% raw %}",
    "=1+1",
    "x" * 10_000_000,
]


def complaints(page: str) -> list[str]:
    """What is wrong with a page that shows such texts; empty where nothing is."""
    own_script = page.rindex("<script>")  # the page's own is the only one, and the last thing in it
    shown, invisible = page[:own_script], "[\x00-\x08\x0b-\x1f\u200b\u202a-\u202e\u2066-\u2069\ufeff]"
    found = [tag for tag in ("<script", "<img", "onerror=alert(1)>") if tag in shown]
    found += ["characters that hide or reorder"] if re.search(invisible, shown) else []
    found += ["over 5 MB"] if len(page.encode()) > 5e6 else []
    return found
