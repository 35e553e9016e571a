"""The report in a real browser: no complaint, no request, readable on a phone and on a desk, light and dark."""

import pytest

from tests.browser import Page, chromium_or_skip

pytestmark = pytest.mark.browser
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}


@pytest.fixture(scope="module")
def browser():
    """One for all tests."""
    with Page(chromium_or_skip(), *SIZES["desktop"]) as page:
        yield page


@pytest.fixture(params=[(size, dark) for size in SIZES for dark in (False, True)], ids=str)
def page(request, browser, report):
    """The report of a run, loaded anew in each size and colour scheme."""
    size, dark = request.param
    browser.appear(*SIZES[size], dark=dark)
    browser.open(report)
    return browser


def test_console_is_clean_and_nothing_is_requested(page, report):
    """The page runs without errors, under its own policy, and asks for nothing but itself."""
    assert page.complaints() == []
    assert page.requests() == [report.resolve().as_uri()]


def test_page_does_not_scroll_sideways(page):
    """Wide tables and figures scroll inside their own boxes."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_text_is_large_and_has_contrast(page):
    """Body text is at least 14 px, and ink on paper has a contrast of at least 7."""
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 14
    colours = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    assert contrast(*colours) >= 7


def test_every_figure_has_a_name_and_every_id_is_unique(page):
    """SVGs are images with a title and a description; no two elements share an id."""
    unnamed = (
        "[...document.querySelectorAll('figure svg')].filter(s => s.getAttribute('role') !== 'img' || "
        "s.getAttribute('aria-labelledby').split(' ').some(i => !document.getElementById(i)?.textContent)).length"
    )
    assert page.evaluate("document.querySelectorAll('figure svg').length") > 0
    assert page.evaluate(unnamed) == 0
    twice = "(x => x.length - new Set(x).size)([...document.querySelectorAll('[id]')].map(e => e.id))"
    assert page.evaluate(twice) == 0


def test_tables_sort_by_header(page):
    """A click on a header sorts its table, a second one the other way round."""
    table = "document.querySelectorAll('#machines details table')[0]"
    cells = f"[...{table}.tBodies[0].rows].map(r => r.cells[4].textContent.trim())"
    head = f"{table}.tHead.rows[0].cells[4].querySelector('button').click()"
    page.evaluate(head)
    up = page.evaluate(cells)
    page.evaluate(head)
    down = page.evaluate(cells)
    assert up == sorted(up)
    assert up != down
    assert down == sorted(down, reverse=True)


def test_keyboard_reaches_the_skip_link_first(page):
    """The first tab stop leads past the header."""
    page.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#claims"


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two CSS colours (WCAG 2.1)."""

    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
