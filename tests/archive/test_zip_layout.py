"""A zip file that two readers could understand differently is refused: torch's reader is the other one."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxshard
from fxshard.archive.zip_layout import END, check_layout
from fxshard.errors import FileError


def packed(contents: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in contents.items():
            with archive.open(name, "w", force_zip64=len(data) % 2 == 1) as entry:
                entry.write(data)
    return file.getvalue()


def check(data: bytes) -> None:
    file = io.BytesIO(data)
    check_layout(file, zipfile.ZipFile(file).infolist())


def directory_of(data: bytes) -> tuple[int, int]:
    """(length, offset) of a small zip's directory."""
    fields = END.unpack(data[-END.size :])
    return fields[5], fields[6]


def with_two_directories(hidden: bytes, shown: bytes) -> bytes:
    """A file in which torch finds the entries of ``hidden`` and Python those of ``shown``; both directories have the same length."""
    length, offset = directory_of(hidden)
    length_shown, offset_shown = directory_of(shown)
    assert length == length_shown
    before = offset + length
    shift = before + offset_shown - offset  # what zipfile adds to the offsets that the directory says
    directory, place = bytearray(shown[offset_shown : offset_shown + length]), 0
    while place < length:
        name, extra, comment = struct.unpack_from("<HHH", directory, place + 28)
        (start,) = struct.unpack_from("<L", directory, place + 42)
        struct.pack_into("<l", directory, place + 42, start + before - shift)
        place += 46 + name + extra + comment
    end = bytearray(shown[-END.size :])
    struct.pack_into("<L", end, 16, offset)
    return hidden[:before] + shown[:offset_shown] + bytes(directory) + bytes(end)


CONTENTS = st.dictionaries(st.text("abc/", min_size=1, max_size=5), st.binary(max_size=40), min_size=1, max_size=4)


@given(CONTENTS, st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]), st.data())
def test_what_zipfile_writes_has_no_gaps_and_an_inserted_byte_is_one(
    contents: dict[str, bytes], compression: int, data: st.DataObject
) -> None:
    whole = packed(contents, compression)
    check(whole)
    at = data.draw(st.integers(0, directory_of(whole)[1]))  # in what follows, zipfile itself may find the fault
    with pytest.raises(ValueError):
        check(whole[:at] + data.draw(st.sampled_from([b"\0", b"P"])) + whole[at:])


@given(CONTENTS, st.data())
def test_a_header_says_what_the_directory_says(contents: dict[str, bytes], data: st.DataObject) -> None:
    """Flags, method, checksum, sizes and name of an entry, the sizes also where they stand in an extra field."""
    whole = bytearray(packed(contents))
    info = data.draw(st.sampled_from(zipfile.ZipFile(io.BytesIO(bytes(whole))).infolist()))
    beyond = range(30, 30 + len(info.orig_filename) + (20 if info.file_size % 2 else 0))
    whole[info.header_offset + data.draw(st.sampled_from([*range(6, 10), *range(14, 26), *beyond]))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError):
        check(bytes(whole))


def test_large_files_have_more_end_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written as if 10 bytes were too many for the records of small files."""
    with monkeypatch.context() as patched:
        patched.setattr(zipfile, "ZIP64_LIMIT", 10)
        whole = packed({"a": b"some", "b": b"more"})
    assert b"PK\6\6" in whole
    check(whole)
    for place, what in (
        (len(whole) - END.size - 12, "contradict"),
        (len(whole) - END.size - 20 - 56, "no record"),
        (len(whole) - 6, "contradict"),
    ):
        changed = bytearray(whole)
        changed[place] ^= 1
        file = io.BytesIO(bytes(changed))
        with pytest.raises(ValueError, match=what):
            check_layout(file, zipfile.ZipFile(io.BytesIO(whole)).infolist())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("program") / "m.pt2"
    fxshard.export(nn.Linear(4, 4), (torch.zeros(2, 4),), fxshard.Mesh({"tp": 1}, hardware="cpu")).save(path)
    return path.read_bytes()


def test_a_program_that_torch_would_read_differently(program: bytes, tmp_path: Path) -> None:
    """The directory that torch reads has sample inputs, which ``torch.export.load`` would unpickle; the one that Python reads has none."""
    with zipfile.ZipFile(io.BytesIO(program)) as archive:
        shown = {name: archive.read(name) for name in archive.namelist()}
    inputs = "archive/data/sample_inputs/model.pt"
    path = tmp_path / "two.pt2"
    path.write_bytes(with_two_directories(packed({**shown, inputs: b"a pickle"}), packed(shown)))
    with zipfile.ZipFile(path) as archive:
        assert archive.read(inputs) == b""
    assert torch._C.PyTorchFileReader(str(path)).get_record("data/sample_inputs/model.pt") == b"a pickle"
    with pytest.raises(FileError, match="could be read in two ways"):
        fxshard.load(path)


@pytest.mark.parametrize(
    "add", [lambda data: b"#!/bin/sh\n" + data, lambda data: data + b"\0", lambda data: packed({"x": b"hidden"})[:37] + data]
)
def test_bytes_before_and_after_a_program(program: bytes, add: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(add(program))
    with pytest.raises(FileError, match=r"two ways|is not an archive"):
        fxshard.load(path)
