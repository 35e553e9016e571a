"""Outputs: nothing that a run says can leave its place in a table, a page or an XML file."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.compare.comparison import compare
from moebench.compare.documents import to_json, to_junit, to_markdown
from moebench.compare.escape import LONGEST, markdown, plain, prose
from moebench.compare.read import read_side
from moebench.compare.show import print_comparison
from tests.moebench.compare.support import case, exact_rows, pytest_file, write_run

EVIL = [
    'quotes " and \' and `',
    "<script>alert(1)</script>",
    "two\nlines\r\nand | a bar",
    "\u202egnirts desrever\u2066",
    "\x1b[31mred\x1b[0m \x00 \x07",
    "[red]rich[/red] @everyone #1 **bold** ![x](http://x)",
    "zero\u200bwidth \ufeff \ud800",
    "x" * 10_000_000,
]


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """A comparison of two files whose names are what a person should never write; all slower."""
    folder = tmp_path_factory.mktemp("evil")
    names = [f"{index} {text}" for index, text in enumerate(EVIL)]
    for side, factor in (("a", 1), ("b", 2)):
        for process in (0, 1):
            data = [1e-3 * factor * (1 + 1e-4 * k + 1e-3 * process) for k in range(14)]
            pytest_file(folder / side / f"{process}.json", dict.fromkeys(names, data))
    return compare(read_side(folder / "a"), read_side(folder / "b"))


def test_no_text_of_a_run_leaves_its_cell_in_markdown(evil):
    """As many rows as findings, each with the same number of cells, and no markup, mention or control character."""
    text = to_markdown(evil)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "slower" in line]
    assert len(rows) == len(EVIL)
    assert {row.count("|") for row in rows} == {8}
    assert "<script" not in text
    assert "@everyone" not in text
    assert "![" not in text
    assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e\u2066-\u2069\u200b\ufeff]", text)
    assert len(text) < 40_000
    text.encode()


def test_no_text_of_a_run_breaks_the_terminal(evil, capsys):
    """One line a finding, no escape sequence, nothing reversed."""
    print_comparison(evil)
    out = capsys.readouterr().out
    assert sum("slower" in line for line in out.splitlines()) == len(EVIL) + 1
    assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e\u2066-\u2069]", out)
    assert "[red]rich" in out  # as it stands, not as a style


def test_junit_is_xml_whatever_the_names_are(evil):
    """It parses, counts its failures, and holds each name once."""
    root = ElementTree.fromstring(to_junit(evil))
    (suite,) = root
    assert suite.get("failures") == str(len(EVIL)) == suite.get("tests")
    assert len({test.get("classname") for test in suite.iter("testcase")}) == len(EVIL)
    assert any("<script>" in test.get("classname") for test in suite.iter("testcase"))


def test_json_holds_everything(evil):
    """One document, texts as they are shown, numbers as they are."""
    document = json.loads(json.dumps(to_json(evil), allow_nan=False))
    assert document["exit_status"] == 1
    assert document["counts"] == {"slower": len(EVIL)}
    assert all(finding["change"] == pytest.approx(1.0) for finding in document["findings"])


def test_junit_says_what_is_skipped(tmp_path):
    """Not decided is skipped, faster is a remark, the same is silent."""
    base = read_side(write_run(tmp_path / "a", [exact_rows(case()), exact_rows(case("two"))]))
    head = read_side(write_run(tmp_path / "b", [exact_rows(case(), launches=1.0)]))
    (suite,) = ElementTree.fromstring(to_junit(compare(base, head)))
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert [kind.tag for test in suite.iter("testcase") for kind in test] == ["skipped", "system-out"]


def test_markdown_of_a_quiet_comparison(tmp_path):
    """A heading that says it passed, and no table of findings."""
    side = read_side(write_run(tmp_path / "a", [exact_rows(case())]))
    text = to_markdown(compare(side, side))
    assert text.startswith("### moebench: passed\n\nnothing is slower")
    assert "| verdict |" not in text


def test_a_change_from_zero_has_no_percent(tmp_path, capsys):
    """An infinite ratio is words, and null in JSON."""
    base = read_side(write_run(tmp_path / "a", [exact_rows(case(), launches=0.0)]))
    head = read_side(write_run(tmp_path / "b", [exact_rows(case())]))
    found = compare(base, head)
    print_comparison(found)
    assert "from 0" in capsys.readouterr().out
    assert "inf" not in to_markdown(found)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=400))
def test_a_plain_text_is_one_short_printable_line(text):
    """Any text: printable, one line, bounded, and different texts of a length stay different."""
    shown = plain(text)
    assert "\n" not in shown
    assert all(c.isprintable() for c in shown)
    assert len(cut_out := re.sub(r"\\(x..|u....|U........)", ".", shown)) <= LONGEST + 40, cut_out
    shown.encode()


@given(st.text(alphabet="|`*_<>&@#[]()\\\n~\"' aé", max_size=50))
def test_markdown_keeps_the_text_and_nothing_else(text):
    """What a reader sees is the text; no character of Markdown is left."""
    import html

    inner = markdown(text).removeprefix("<code>").removesuffix("</code>")
    assert html.unescape(inner) == plain(text)
    assert not set(inner) & set("|`*_<>@[]()\\~")
    assert not set(prose(text)) & set("|`*_<>@[]()\\~\n")


def test_findings_that_only_inform_are_shown_on_request(tmp_path):
    """Parts of a whole don't count, and appear with --all."""
    rows = exact_rows(case())
    part = replace(rows[0], metric="region_time", detail={"region": "gate", "phase": "forward"})
    base = read_side(write_run(tmp_path / "a", [[*rows, part]]))
    head = read_side(write_run(tmp_path / "b", [[*rows, replace(part, value=1.0)]]))
    found = compare(base, head)
    assert found.exit_status(strict=True) == 0
    assert "region" not in to_markdown(found)
    assert "slower &#40;shown only&#41;" in to_markdown(found, everything=True)
