"""The page of a comparison: what it says first, its tables, its links, and names that nobody should write."""

import math
import re
from dataclasses import replace

import pytest

from moebench.compare.comparison import Finding, compare
from moebench.compare.read import read_side
from moebench.compare.side import Key
from moebench.report.comparison_view import MOST_OF_ONE, comparison_page, write_comparison
from moebench.report.interval_bars import drawing, scale_of
from tests.moebench.compare.support import case, exact_rows, noisy, pytest_file, sample_rows, write_run
from tests.moebench.report.hostile import TEXTS, complaints


@pytest.fixture
def both(tmp_path):
    """Two runs: one case more launches, one faster, one gone, one measured and slower."""
    timed = case("timed", engine="local")
    base = write_run(
        tmp_path / "base",
        [exact_rows(case()), exact_rows(case("two")), exact_rows(case("gone")), sample_rows(timed, noisy(1))],
    )
    head = write_run(
        tmp_path / "head",
        [exact_rows(case(), launches=44.0), exact_rows(case("two"), step_time=0.001),
         sample_rows(timed, noisy(2, median_s=0.003))],
    )  # fmt: skip
    return compare(read_side(base), read_side(head))


def test_the_page_says_first_what_it_comes_to(both, tmp_path):
    """The outcome, a line a verdict in the order in which a reader wants them, then a table each."""
    view = comparison_page(both, tmp_path / "page.html")
    assert (view["outcome"], view["headline"]) == ("failed", "2 quantities are slower, in 2 cases")
    verdicts = ["slower", "missing", "faster", "same"]
    assert [re.sub("<[^>]*>", "", row[0])[2:] for row in view["overview"].rows] == verdicts
    assert [section["name"] for section in view["sections"]] == verdicts
    slower = view["sections"][0]["table"]
    assert [row[0] for row in slower.rows] == [case("timed", engine="local").name, case().name]  # the largest first
    assert slower.rows[1][1:4] == ["launches", "40", "44"]
    assert "<svg" in slower.rows[0][4]
    assert "+10 %" in slower.rows[1][4]


def test_each_number_has_its_rows_in_both_runs(both, tmp_path):
    """Lines of both results files; and a link to the case where the run's own report lies beside."""
    base = both.base.path / "results.jsonl"
    view = comparison_page(both, tmp_path / "page.html")
    timed, launches = view["sections"][0]["table"].rows
    assert launches[-2:] == ["2", "2"]
    assert '"launches"' in base.read_text().splitlines()[1]
    first, last = map(int, timed[-2].split("–"))
    assert last - first == 3 * 14 - 1
    assert launches[2].address == ""
    (both.base.path / "report.html").write_text("")
    launches = comparison_page(both, tmp_path / "pages" / "page.html")["sections"][0]["table"].rows[1]
    assert re.fullmatch(r"\.\./base/report\.html#c[0-9a-f]{8}", launches[2].address)


def test_the_file_is_written_whole_and_asks_for_nothing(both, tmp_path):
    """One page under its own policy; every link inside leads somewhere."""
    write_comparison(both, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in text
    ids = set(re.findall(r'id="?([^"\s>]+)', text))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= ids


def test_hostile_names_stay_text(tmp_path):
    """Names of ten megabytes, markup, reordering marks: each is one row that shows what it is."""
    for side, factor in (("a", 1), ("b", 2)):
        names = {f"{n} {text}": [1e-3 * factor * (1 + 1e-4 * k) for k in range(14)] for n, text in enumerate(TEXTS)}
        pytest_file(tmp_path / side / "0.json", names)
        pytest_file(tmp_path / side / "1.json", names)
    found = compare(read_side(tmp_path / "a"), read_side(tmp_path / "b"))
    write_comparison(found, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert complaints(text) == []
    assert len(comparison_page(found, tmp_path / "page.html")["sections"][0]["table"].rows) == len(TEXTS)


def test_a_number_that_is_none_has_no_drawing(tmp_path):
    """NaN samples, one sample, a change from zero: words, and a page."""
    one, odd = case("single", engine="local"), case("odd", engine="local")
    groups = [exact_rows(case(), launches=0.0), sample_rows(one, [[1e-3]]), sample_rows(odd, noisy(3))]
    base = read_side(write_run(tmp_path / "a", groups))
    groups = [exact_rows(case()), sample_rows(one, [[2e-3]]), sample_rows(odd, noisy(4))]
    head = read_side(write_run(tmp_path / "b", groups))
    (key,) = [key for key in head.samples if key.case == odd.name]
    head.samples[key] = replace(head.samples[key], problem="a sample is not a finite number")
    found = compare(base, head)
    write_comparison(found, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    for words in ("from 0", "one repetition proves nothing", "a sample is not a finite number"):
        assert words in text
    assert not re.search(r"\bnan\b|\binf\b", text[: text.rindex("<script>")].lower())


def test_a_large_comparison_keeps_its_size(both):
    """Of many findings those that changed most are shown, and the page says how many there are."""
    both.findings = [
        Finding(Key(f"case {n}", "sim", "step_time"), "s", "slower", change=n / 1e4) for n in range(20_000)
    ]
    (section,) = comparison_page(both, both.base.path / "p.html")["sections"]
    assert len(section["table"].rows) == MOST_OF_ONE
    assert section["table"].rows[0][0] == "case 19999"
    assert "20,000 quantities, of which the 2,000 that changed most" in section["told"]


def test_the_scale_holds_nearly_all_changes():
    """A round number that 95 of 100 changes fit into; one outside stands at the end as an arrow."""
    findings = [Finding(Key("c", "sim", "m"), "s", "slower", change=0.001 * n) for n in range(100)]
    findings.append(Finding(Key("c", "sim", "m"), "s", "slower", change=math.inf))
    assert scale_of(findings) == 0.1
    assert scale_of([]) == 0.01
    assert "circle" in drawing(findings[50], 0.1)
    assert "circle" not in drawing(Finding(Key("c", "sim", "m"), "s", "slower", change=5.0), 0.1)
    assert drawing(findings[-1], 0.1) == ""
