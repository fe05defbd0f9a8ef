"""Units: the smallest multiples of sizes at which all cuts are even. Chunks of symbolic sizes equal those of numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard._torch_compat.sizes.symbols import SymbolEnv, surely, symbol_of
from fxshard.errors import SizesError
from fxshard.layout.layouts import chunk, nested_chunk
from fxshard.shapes import guards_of, units_of


def env() -> tuple[SymbolEnv, dict[str, object]]:
    made = SymbolEnv()
    return made, {"b": made.symbol("b", 4), "s": made.symbol("s", 16)}


def names(symbols: dict[str, object]) -> dict[str, object]:
    return {name: symbol_of(value) for name, value in symbols.items()}  # type: ignore[arg-type]


def test_units_of_products_and_sums() -> None:
    _, at = env()
    b, s = at["b"], at["s"]
    assert units_of([], names(at)) == {"b": 1, "s": 1}
    assert units_of([(b, 2), (b, 3)], names(at)) == {"b": 6, "s": 1}
    assert units_of([(b, 2), (b * s, 2)], names(at)) == {"b": 2, "s": 1}  # type: ignore[operator]
    assert units_of([(8 * s, 4)], names(at)) == {"b": 1, "s": 1}  # type: ignore[operator]
    assert units_of([(6 * s, 4)], names(at)) == {"b": 1, "s": 4}  # type: ignore[operator]
    assert units_of([(b * s, 4)], names(at)) == {"b": 4, "s": 1}  # type: ignore[operator]
    with pytest.raises(SizesError, match="s - 1 is cut into 2 parts"):
        units_of([(s - 1, 2)], names(at))  # type: ignore[operator]


@given(st.integers(1, 40), st.lists(st.integers(2, 3), min_size=1, max_size=2))
def test_chunks_of_symbols_equal_those_of_numbers(size: int, parts: list[int]) -> None:
    made = SymbolEnv()
    symbol = made.symbol("n", size)
    for indexes in itertools.product(*map(range, parts)):
        offset, length = nested_chunk(symbol, tuple(parts), indexes)  # type: ignore[arg-type]
        assert (offset.node.hint, length.node.hint) == nested_chunk(size, tuple(parts), indexes)


def test_even_chunks_are_written_without_a_minimum() -> None:
    made = SymbolEnv()
    half = made.symbol("half", 3)
    offset, length = chunk(2 * half, 2, 1)  # type: ignore[arg-type]
    assert (str(offset), str(length)) == (str(half), str(half))
    assert guards_of({"half": half}) == ()


@given(st.integers(1, 30), st.integers(2, 4))
def test_a_length_is_known_to_be_at_least_zero(size: int, parts: int) -> None:
    """Asking for this adds no guard. Whether the chunk has elements is not known: asking adds one."""
    made = SymbolEnv()
    symbol = made.symbol("n", size)
    for index in range(parts):
        length = chunk(symbol, parts, index)[1]  # type: ignore[arg-type]
        assert surely(length >= 0) and not surely(length > 0)
        assert bool(length >= 0) and bool(length > -1)
    assert guards_of({"n": symbol}) == ()
    assert bool(chunk(symbol, parts, parts - 1)[1] > 0) == (chunk(size, parts, parts - 1)[1] > 0)  # type: ignore[arg-type]
    assert len(guards_of({"n": symbol})) == 1
