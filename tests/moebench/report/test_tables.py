"""Tables of a page: cells that lead to rows, texts that stay texts, columns named for narrow pages."""

import re

from moebench.report.parts import Drawn, Linked, Table
from moebench.report.tables import anchor_of, anchors_of, table_html, with_lines
from moebench.report.text import css_string, text_of

HOSTILE = "<script>alert(1)</script>\"'\n\u202egnp.exe"
CASES = Table(["case", "ms"], [["a/b", "1"], ["a/c (cold)", "2"], ["a/d", "3"]], "Every case")


def test_a_number_leads_to_the_row_of_its_case():
    """The row of a case has an anchor, the same on every page, and the lines of its rows; a cell links there."""
    cases = with_lines(CASES, {"a/b": (1, 35), "a/c": (36, 36)})
    anchors = anchors_of([cases])
    listed = table_html(cases, anchors)
    assert cases.columns[-1] == "lines"
    assert [row[-1] for row in cases.rows] == ["1–35", "36–36", ""]
    assert listed.count(f"<tr id={anchor_of('a/b')}>") == 1
    table = Table(["what", "ms"], [["x", Linked("1.0", "a/b")], ["y", Linked("2.0", "not there")]], "Numbers")
    html = table_html(table, anchors)
    assert f'<td><a href="#{anchor_of("a/b")}">1.0</a>' in html
    assert html.count("<a ") == 1


def test_a_case_that_stands_in_two_rows_has_one_anchor():
    """Ids are unique on a page."""
    table = with_lines(Table(["case"], [["a"], ["a"]], "Twice"), {})
    assert table_html(table, anchors_of([table])).count("id=") == 1


def test_a_link_may_lead_to_another_page():
    """With an address of its own, escaped."""
    html = table_html(Table(["x", "y"], [["y", Linked("1", "", 'r"&.html#c1')]], "T"))
    assert '<a href="r&#34;&amp;.html#c1">1</a>' in html


def test_no_text_leaves_its_cell():
    """Markup, quotes, line breaks and marks that reorder are shown, in cells, heads, captions and style."""
    rows = [[HOSTILE, Linked(HOSTILE, HOSTILE)], ["x" * 10**7, Drawn("<b>1</b>")]]
    table = Table([HOSTILE, "n"], rows, HOSTILE)
    html = table_html(table)
    assert "<script" not in html
    assert not re.search("[\u202a-\u202e\x00-\x09\x0b-\x1f]", html)
    assert len(html) < 10_000
    assert "<b>1</b>" in html
    assert text_of('a<b>"&') == "a&lt;b&gt;&#34;&amp;"


def test_a_column_is_named_in_style_whatever_it_holds():
    """Quotes, backslashes and closing tags are written as style sheets write them."""
    assert css_string('a "b" \\ </style>') == r'"a \22 b\22  \5c  \3c /style>"'
