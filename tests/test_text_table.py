"""Tables that fit a width: long cells keep both ends, and columns with one value become a line above."""

from __future__ import annotations

import sys

import hypothesis.strategies as st
from expecttest import assert_expected_inline
from hypothesis import given

from fxshard.text_table import MAX_CELL, _short_line, fitted, in_short, labelled, listed, shorten

words = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=90)


@given(st.lists(st.tuples(words, words, words, words), min_size=1, max_size=4), st.integers(50, 120))
def test_width(rows: list[tuple[str, ...]], width: int) -> None:
    table = fitted(rows, ("node", "reads", "line", "bytes"), width, same=False)
    assert max(map(len, table.splitlines())) <= width and len(table.splitlines()) == len(rows) + 2


def test_long_cells_are_shortened() -> None:
    rows = [
        ("layers.0.attention.wq.weight", "S(0), " * 20, "dp", "/home/me/code/model.py:70: q = rotate(self.wq(x), cos, sin)"),
        ("short", "R", "dp", ""),
    ]
    assert_expected_inline(
        fitted(rows, ("node", "reads", "axis", "line"), 90),
        """\
all: axis dp
node                          reads                         line
----------------------------  ----------------------------  -----------------------------
layers.0.attention.wq.weight  S(0), S(0), S... S(0), S(0),  code/model.py:70: q = rota...
short                         R""",
    )


def test_a_source_line_keeps_its_number() -> None:
    """Shortened to 20 characters, to file and number, and below that."""
    line = "a_folder/the_model.py:1170: q = rotate(self.wq(x), cos, sin)"
    table = fitted([("n" * 60, f"/home/{line}")], ("node", "line"), 82)
    assert table.splitlines()[2].split()[-1] == "...the_model.py:1170"
    assert [_short_line(line, length) for length in (80, 40, 29, 27, 26, 20)] == [
        line,
        "a_folder/the_model.py:1170: q = rotat...",
        "a_folder/the_model.py:1170...",
        "a_folder/the_model.py:1170",
        "a_folder/the_model.py:1170",
        "...the_model.py:1170",
    ]


def test_one_row_keeps_its_columns() -> None:
    assert fitted([("a", "b", "")], ("x", "y", "z")) == "x    y\n---  ---\na    b"


def test_helpers() -> None:
    assert shorten("abcdefghij", 10) == "abcdefghij" and shorten("abcdefghijk", 9) == "abc...ijk"
    assert listed(["a", "b", "c"], 9) == "a, b, c" and listed([f"layer{i}" for i in range(9)], 30) == "layer0, layer1 and 7 more"
    assert in_short("/home/me/code/model.py:70: x = 'a/b.py:3'") == "code/model.py:70: x = 'a/b.py:3'"
    assert in_short("model.py:7: y") == "model.py:7: y" and in_short("fxshard::op") == "fxshard::op"
    assert labelled([("a", "one two three"), ("long", "x")], 12) == "a     one\n      two\n      three\nlong  x"


def test_a_number_keeps_its_unit_when_lines_are_wrapped() -> None:
    lines = labelled([("memory", "activation 12.9 MB, input 16.4 KB, output 4 bytes")], 33).splitlines()
    assert [line.strip() for line in lines] == ["memory  activation 12.9 MB, input", "16.4 KB, output 4 bytes"]


def test_one_long_cell_does_not_widen_all_lines_without_end() -> None:
    """In a pipe nothing is cut to the terminal's width, but a file may hold a name of a megabyte and thousands of lines."""
    rows = [("n" * 10**6, "x"), *((str(number), "y") for number in range(1000))]
    assert max(map(len, fitted(rows, ("name", "what"), width=sys.maxsize).splitlines())) < 2 * MAX_CELL
