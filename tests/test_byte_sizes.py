"""Numbers of bytes as text: parsed from users, and printed."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fxshard.byte_sizes import exact_size, parse_size, read_size, size_text
from fxshard.errors import OptionError


def test_parsing() -> None:
    texts = ("80000", "80GB", "1.5GiB", "1 KiB", "512 B", "20gb", "2TB")
    assert [parse_size(t) for t in texts] == [80000, 80 * 10**9, 3 * 2**29, 1024, 512, 20 * 10**9, 2 * 10**12]
    for text in ("", "GB", "-1", "1TBs", "1.2.3", "1e9", "nan"):
        with pytest.raises(OptionError, match="number of bytes"):
            parse_size(text)


def test_options() -> None:
    assert [read_size(v, "memory_limit") for v in ("20GB", 7, 2.5)] == [20e9, 7, 2.5]
    for value in ("a lot", -1, True, None, float("inf"), [1]):
        with pytest.raises(OptionError, match=r"cannot read (memory_limit=|'a lot')") as caught:
            read_size(value, "memory_limit")
        assert caught.value.where == "memory_limit" and "80GB" in str(caught.value.remedy)


def test_printing() -> None:
    sizes = (0, 1, 999, 1000, 9_994_999, 9_995_000, 99_949_999, 99_960_000, 999_499_999, 999_500_000, 4_446_412_812, 10**15)
    assert [size_text(n) for n in sizes] == [
        *("0 bytes", "1 byte", "999 bytes", "1.00 KB", "9.99 MB", "10.0 MB", "99.9 MB", "100 MB", "999 MB", "1.00 GB", "4.45 GB"),
        "1000 TB",
    ]
    assert exact_size(4_446_412_812) == "4.45 GB (4,446,412,812 bytes)" and exact_size(12) == "12 bytes"


@given(st.integers(0, 10**14))
def test_a_printed_size_parses_to_nearly_itself(size: int) -> None:
    text = size_text(size).replace(" bytes", "").replace(" byte", "")
    assert parse_size(text) == pytest.approx(size, rel=5.1e-3, abs=0.5)
