"""check_layout: a zip file without gaps, so that all its readers see the same entries.

Python's ``zipfile`` reads the directory that lies before the end record, wherever that record says it is; torch's reader reads it where the
record says. A file with two directories would be one archive to fxshard's checks, and another to ``torch.export.load`` and to C++.
Records: section 4.3 of PKWARE's APPNOTE.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import IO, Any
from zipfile import ZipInfo

ENTRY, LOCATOR, END64, END = (
    struct.Struct("<4s2xHH4xLLLHH"),
    struct.Struct("<4sLQL"),
    struct.Struct("<4sQHHLLQQQQ"),
    struct.Struct("<4sHHHHLLH"),
)
HAS_DESCRIPTOR = 0x8
"""Flag of an entry whose sizes follow its data; a writer sets it only for a file in which it cannot seek."""
EXTRA, LONG_SIZES, LONG = struct.Struct("<HH"), struct.Struct("<QQ"), 2**32 - 1
"""The number and length of an extra field; the one with the number 1: the sizes whole and compressed, where a header says ``LONG``."""


def check_layout(file: IO[bytes], infos: Sequence[ZipInfo]) -> None:
    """Raises ValueError unless ``infos`` (as ``zipfile`` read them), the directory that lists them and the end record fill the file from
    its first byte to its last, each entry's header says what the directory says of it, and the records agree on where the directory is.
    Moves the position in ``file``."""
    place = 0
    for info in sorted(infos, key=lambda one: one.header_offset):
        *said, compressed, whole, name, extra = _record(file, place, ENTRY, b"PK\3\4")
        if info.header_offset != place or info.flag_bits & HAS_DESCRIPTOR:
            raise ValueError(f"the entry {info.filename!r} does not follow the one before it")
        file.seek(place + ENTRY.size)
        named = file.read(name) == info.orig_filename.encode()
        sizes = _long_sizes(file, place + ENTRY.size + name, extra) if (compressed, whole) == (LONG, LONG) else (whole, compressed)
        if not named or (*said, *sizes) != (info.flag_bits, info.compress_type, info.CRC, info.file_size, info.compress_size):
            raise ValueError(f"the header of the entry {info.filename!r} contradicts the directory")
        place += ENTRY.size + name + extra + info.compress_size
    if _directory(file) != (len(infos), place):
        raise ValueError("its directory is not between its entries and its end")


def _long_sizes(file: IO[bytes], place: int, length: int) -> tuple[int, ...]:
    """(whole, compressed), from the only field with the number 1 among the extra fields at ``place``."""
    end, found = place + length, list[tuple[int, ...]]()
    while place < end:
        number, size = _read(file, place, EXTRA)
        if number == 1:
            found.append(_read(file, place + EXTRA.size, LONG_SIZES))
        place += EXTRA.size + size
    if place != end or len(found) != 1:
        raise ValueError("the sizes of an entry are not said once")
    return found[0]


def _directory(file: IO[bytes]) -> tuple[int, int]:
    """(number of entries, offset) of the directory, which ends where the records of the end begin."""
    end = file.seek(0, 2) - END.size
    disk, first, here, count, length, offset, comment = _record(file, end, END, b"PK\5\6")
    if disk or first or comment or here != count:
        raise ValueError("its end record is not that of a single file")
    said = count, length, offset
    if _read(file, end - LOCATOR.size, LOCATOR)[0] == b"PK\6\7":
        end -= LOCATOR.size + END64.size
        *_, count, length, offset = _record(file, end, END64, b"PK\6\6")
        place = _record(file, end + END64.size, LOCATOR, b"PK\6\7")[1]
        limits = 2**16 - 1, 2**32 - 1, 2**32 - 1
        if place != end or any(
            short not in (long, limit) for short, long, limit in zip(said, (count, length, offset), limits, strict=True)
        ):
            raise ValueError("its end records contradict one another")
    if offset + length != end:
        raise ValueError("its directory does not end where its end record begins")
    return count, offset


def _record(file: IO[bytes], place: int, record: struct.Struct, mark: bytes) -> tuple[Any, ...]:
    """The fields of a record after its mark."""
    found, *fields = _read(file, place, record)
    if found != mark:
        raise ValueError(f"there is no record {mark!r} at byte {place}")
    return tuple(fields)


def _read(file: IO[bytes], place: int, record: struct.Struct) -> tuple[Any, ...]:
    if place < 0:
        raise ValueError("it is too short")
    file.seek(place)
    data = file.read(record.size)
    if len(data) < record.size:
        raise ValueError("it is cut short")
    return record.unpack(data)
