"""The pages of a comparison and of many runs in a real browser: filters, orders, links, and no complaint."""

import json

import pytest

from moebench.compare.comparison import compare
from moebench.compare.history import read_runs
from moebench.compare.read import read_side
from moebench.compare.trend import trend
from moebench.report.comparison_view import write_comparison
from moebench.report.index_view import write_index
from tests.browser import Page, chromium_or_skip
from tests.moebench.compare.support import case, exact_rows, write_run

pytestmark = pytest.mark.browser
ROWS = "[...document.querySelectorAll('#verdict-same tbody tr')]"
SHOWN = f"{ROWS}.filter(r => !r.hidden).map(r => r.cells[0].textContent)"
TYPE = """(text => {{
    const field = document.querySelector('#verdict-same input');
    field.value = text;
    field.dispatchEvent(new Event('input'));
    return document.querySelector('#verdict-same output').textContent;
}})({})"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Two pages over five runs, in the last of which one of eight systems became slower."""
    folder = tmp_path_factory.mktemp("pages")
    for number in range(5):
        slow = {"step_time": 0.003} if number == 4 else {}
        rows = [exact_rows(case("slow"), **slow), *(exact_rows(case(f"s{n}"), step_time=10.0**-n) for n in range(7))]
        write_run(folder / f"r{number}", rows, created=f"2026-11-0{number + 1}T00:00:00+00:00")
    write_index(trend(read_runs(folder)), folder, folder / "index.html")
    write_comparison(compare(read_side(folder / "r0"), read_side(folder / "r4")), folder / "page.html")
    return folder


@pytest.fixture(scope="module")
def browser():
    """One for all tests."""
    with Page(chromium_or_skip(), 1280, 900) as page:
        yield page


@pytest.mark.parametrize(("name", "width", "dark"), [("page", 390, True), ("index", 390, False), ("index", 1280, True)])
def test_pages_are_quiet_and_keep_their_width(browser, pages, name, width, dark):
    """No error under their own policy, no request, nothing wider than the window, ids that are unique."""
    browser.appear(width, 900, dark)
    browser.open(pages / f"{name}.html")
    assert browser.complaints() == []
    assert browser.requests() == [(pages / f"{name}.html").resolve().as_uri()]
    assert browser.evaluate("window.innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == dark
    ids = browser.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_tables_filter_order_and_lead_to_their_sections(browser, pages):
    """Words narrow a table down and say how far; numbers are ordered by their units; a link opens a fold."""
    browser.appear(1280, 900)
    browser.open(pages / "page.html")
    assert not browser.evaluate("document.querySelector('#verdict-same details').open")
    browser.evaluate("document.querySelector('#overview a[href=\"#verdict-same\"]').click()")
    every = browser.evaluate(SHOWN)
    assert len(every) == 31
    assert browser.evaluate(TYPE.format(json.dumps("s1|s2 step_time"))) == "2 of 31 rows"
    assert {name.rpartition("/")[2] for name in browser.evaluate(SHOWN)} == {"s1", "s2"}
    assert browser.evaluate(TYPE.format(json.dumps("STEP_time -s1"))) == "6 of 31 rows"
    button = "document.querySelector('#verdict-same thead').rows[0].cells[2].querySelector('button')"
    browser.evaluate(f"{button}.click()")
    assert [name.rpartition("/")[2] for name in browser.evaluate(SHOWN)] == ["s6", "s5", "s4", "s3", "s2", "s0"]
    assert browser.evaluate(f"{button}.parentElement.getAttribute('aria-sort')") == "ascending"
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(SHOWN)[0].endswith("s0")
    assert browser.evaluate(TYPE.format(json.dumps(""))) == ""
    assert len(browser.evaluate(SHOWN)) == len(every)
