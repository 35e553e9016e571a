"""Reported numbers load as claims; a bad file is refused with file, line and column."""

import pytest

from moebench.claims.reported import COLUMNS, RELATIONS, claims_of, compared_with, load_claims, papers
from moebench.workloads.errors import InputError

GOOD = "c1,overall,step_speedup,max-over,a,b,gate=switch;batch_size=32,8.1,ratio,printed,abstract,"


HEADER = ",".join(COLUMNS)


def write(tmp_path, *lines, header=HEADER):
    file = tmp_path / "mine.csv"
    file.write_text("\n".join([header, *lines]) + "\n")
    return file


def test_every_packaged_row_becomes_a_claim():
    """All four papers load, every id is unique over them, and H1 is what the abstract prints."""
    claims = [claim for paper in papers() for claim in claims_of(paper)]
    assert papers() == ("hetu", "lancet", "megascale", "moesys")
    assert len({claim.id for claim in claims}) == len(claims)
    h1 = next(claim for claim in claims if claim.id == "hetu-h1")
    assert (h1.relation, h1.value, h1.unit, h1.evidence) == ("max-over", 8.1, "ratio", "printed")
    assert h1.scope == {"gate": "switch", "batch_size": "32"}
    assert {claim.relation for claim in claims} == set(RELATIONS)


def test_best_other_is_what_the_paper_compared_with():
    """The baselines of `best-other` are recorded for every paper that uses the word."""
    for paper in papers():
        if any(claim.baseline == "best-other" for claim in claims_of(paper)):
            assert compared_with(paper)
    assert {name.partition("+")[0] for name in compared_with("hetu")} == {"deepspeed", "fastmoe", "tutel"}
    assert compared_with("nobody") == ()


def test_a_finding_is_a_word(tmp_path):
    """A finding keeps its word as text."""
    (claim,) = load_claims(write(tmp_path, "f,e,finding,finding,a,b,,slower,word,secondary,x,"))
    assert claim.value == "slower"


def test_lines_count_quoted_newlines(tmp_path):
    """The line is that where the row begins, also after a cell that spans two."""
    two = GOOD[:-1] + ',"a note\nof two lines"'
    bad = GOOD.replace("c1", "c2").replace("8.1", "x")
    with pytest.raises(InputError, match=r"mine\.csv, line 4, column value: 'x' is not a number"):
        load_claims(write(tmp_path, two, bad))


def test_what_is_normalised_to_itself_is_a_definition(tmp_path):
    """A ratio that equals 1 by construction is marked, so that it never counts."""
    lines = [GOOD.replace("max-over", "equal").replace("8.1", "1.00"), GOOD.replace("c1", "c2")]
    assert [claim.is_definition for claim in load_claims(write(tmp_path, *lines))] == [True, False]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (GOOD.replace("8.1", "fast"), "line 2, column value: 'fast' is not a number"),
        (GOOD.replace("8.1", "inf"), "line 2, column value: 'inf' is not a finite number"),
        (GOOD.replace("8.1", ""), "line 2, column value: is empty"),
        (GOOD.replace("max-over", "max"), "line 2, column relation: unknown relation 'max'"),
        (GOOD.replace("ratio", "times"), "line 2, column unit: unknown unit 'times'"),
        (GOOD.replace("ratio", "word"), "line 2, column unit: a finding has the unit word"),
        (GOOD.replace("printed", "rumour"), "line 2, column evidence: unknown evidence 'rumour'"),
        (GOOD.replace("gate=switch", "gate"), "line 2, column config: 'gate' is not key=value"),
        (GOOD.replace("batch_size=32", "gate=gshard"), "line 2, column config: gate stands there twice"),
        (GOOD + ",more", "line 2: 13 cells, the header has 12"),
        (GOOD.replace("abstract", '"abs'), "not CSV"),
        (GOOD + "\n" + GOOD, "line 3, column id: 'c1' stands on line 2 already"),
    ],
)
def test_a_bad_row_names_line_and_column(tmp_path, line, words):
    """Each fault is one line with file, line, column and what is allowed."""
    with pytest.raises(InputError) as error:
        load_claims(write(tmp_path, line))
    assert words in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'mine.csv'}, line ")
    assert "\n" not in str(error.value)


def test_a_bad_header_names_the_column(tmp_path):
    """A missing or unknown column is refused, with those there should be."""
    with pytest.raises(InputError, match=r"mine\.csv, line 1: missing column id"):
        load_claims(write(tmp_path, header="name,value"))
    with pytest.raises(InputError, match=r"mine\.csv, line 1: unknown column 'notes'.*note"):
        load_claims(write(tmp_path, header=",".join(COLUMNS) + ",notes"))
    with pytest.raises(InputError, match="No such file"):
        load_claims(tmp_path / "absent.csv")
    (tmp_path / "latin.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        load_claims(tmp_path / "latin.csv")


def test_an_unknown_paper_lists_the_papers():
    """Asking for a paper that has no file says which have."""
    with pytest.raises(InputError, match=r"unknown paper 'switch'.*hetu, lancet, megascale, moesys"):
        claims_of("switch")
