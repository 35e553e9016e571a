"""Reading TOML: malformed text is located, and keys are found again in their lines."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.workloads.errors import InputError
from moebench.workloads.toml_file import dotted, line_of, read_toml
from tests.workloads.files import written


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("schema_version = 1\ntitle = \n", 2, "title"),
        ("schema_version = 1\ntitle = 'a'\ntitle = 'b'\n", 3, "title"),
        ("schema_version = 1\n\nnodes = 08\n", 3, "nodes"),
        ('schema_version = 1\ntitle = "open\n', 2, "title"),
        ('schema_version = 1\nsizes = ["1x2"', 2, "sizes"),
    ],
)
def test_malformed_toml_names_file_line_and_key(tmp_path, text, line, key):
    """What the parser found, where it found it."""
    path = written(tmp_path, text)
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}, line {line}, key {key}: malformed TOML: "):
        read_toml(path)


def test_what_cannot_be_read_is_an_input_error(tmp_path):
    """A missing file, a folder, and bytes that are not UTF-8."""
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_toml(path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_toml(binary)


TEXT = """# comment
schema_version = 1
"title" = "x"

[parameters]
"nic.bandwidth" = { value = "1 GB/s", source = "a" }
[parameters."link.bandwidth"]
value = "1 GB/s"

[[experiments]]
name = "one"
[experiments.layer]
d_model = 1
routing.kind = "iid"
[[experiments]]
name = "two"
  [experiments.layer] # indented
  d_model = 2
"""


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (["title"], 3),
        (["parameters"], 5),
        (["parameters", "nic.bandwidth"], 6),
        (["parameters", "nic.bandwidth", "low"], 6),
        (["parameters", "link.bandwidth", "value"], 8),
        (["parameters", "link.bandwidth", "low"], 7),
        (["experiments", 0, "layer", "d_model"], 13),
        (["experiments", 0, "layer", "routing", "kind"], 14),
        (["experiments", 1], 15),
        (["experiments", 1, "layer", "d_model"], 18),
        (["experiments", 2], None),
        (["nothing"], None),
    ],
)
def test_a_key_is_found_in_its_line(keys, line):
    """Quoted and dotted keys, tables, arrays of tables, inline tables."""
    assert line_of(TEXT, keys) == line


def test_a_key_path_is_shown_as_toml_writes_it():
    """Keys with dots are quoted, list entries have an index."""
    assert dotted(["parameters", "nic.bandwidth", "low"]) == 'parameters."nic.bandwidth".low'
    assert dotted(["experiments", 1, "layer"]) == "experiments[1].layer"


@given(st.text(max_size=200))
def test_any_text_parses_or_is_an_input_error(tmp_path_factory, text):
    """No text leads to another exception."""
    path = tmp_path_factory.mktemp("any") / "any.toml"
    path.write_text("schema_version = 1\n" + text, encoding="utf-8", errors="replace")
    try:
        file = read_toml(path)
    except InputError as error:
        message = str(error)
    else:
        message = file.where(["schema_version"])
    assert message.startswith(str(path))


def test_a_byte_order_mark_is_no_fault(tmp_path):
    """Some editors write one; lines are counted as without it."""
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbfschema_version = 1\nname = 'x'\n")
    file = read_toml(path)
    assert file.data == {"name": "x"}
    assert file.where(["name"]).endswith("a.toml, line 2: name")
