"""The zip archive of a program: its allowed entries, and the manifest with their hashes."""

from __future__ import annotations

import functools
import hashlib
import io
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO

from fxshard.archive.zip_layout import check_layout
from fxshard.errors import FileError
from fxshard.files import REMAKE, Field, Readers, atomic_file, check_parsed_size, parse_json, read_start, write_json

FORMAT, VERSION = "fxshard-program", 5
ROOT = "archive/"
MANIFEST, PLAN, PROGRAM = "extra/fxshard/manifest.json", "extra/fxshard/plan.json", "extra/fxshard/program.json"
PLANNING, PLANNED_GRAPH = "extra/fxshard/planning.json", "extra/fxshard/planning_graph.json"
WEIGHTS, RUNNER = "fxshard/weights.safetensors", "fxshard/compiled_runner.so"
_TORCH = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", ".data/version": b"6\n"}
_BESIDE_GRAPH = {
    "data/weights/{}_weights_config.json": b'{"config": {}}',
    "data/constants/{}_constants_config.json": b'{"config": {}}',
    "data/sample_inputs/{}.pt": b"",
}
_ALLOWED = re.compile(
    r"archive_format|archive_version|byteorder|\.data/version|extra/fxshard/(manifest|plan|program|planning|planning_graph)\.json|fxshard/weights\.safetensors"
    r"|models/model(_\d{1,6})?\.json|data/weights/model(_\d{1,6})?_weights_config\.json"
    r"|data/constants/model(_\d{1,6})?_constants_config\.json|data/sample_inputs/model(_\d{1,6})?\.pt"
    r"|fxshard/compiled_runner\.so|data/aotinductor/(?P<compiled>model(_\d{1,6})?)/(?P=compiled)\.wrapper(\.so|\.json|_metadata\.json)"
)
COMPILED = (".so", ".json", "_metadata.json")
"""How the names of the entries of compiled code end: the library, the operators that it calls through torch, and what is said of it."""
MAX_ENTRIES, MAX_BYTES, MAX_RATIO, MAX_DIRECTORY = 10_000, 2**27, 100, 2**22
"""Limits on what is read, without weights: number of entries, their total bytes, their compression ratio, and bytes of the zip's directory.

The JSON of one Llama layer takes about 50 KB per size class for inference, and up to 2 MB for training under the most scattered plans;
the latter compress 27 times. Once parsed, JSON takes about twenty times its size in memory, which ``parse_json`` limits.
"""
ALIGNMENT = 64
_LOCAL_HEADER, _ZIP64_EXTRA = 30, 20
NOT_A_PROGRAM = "give a file that fxshard export wrote"


def graph_name(number: int) -> str:
    """The name of a size class's graph; the first is what ``torch.export.load`` returns."""
    return "model" if number == 0 else f"model_{number}"


def graph_entry(name: str) -> str:
    return f"models/{name}.json"


def compiled_entry(name: str, end: str) -> str:
    """An entry of a size class's compiled code, where torch's loader of compiled packages looks; ``end``: one of COMPILED."""
    return f"data/aotinductor/{name}/{name}.wrapper{end}"


def fixed_entries(graphs: Iterable[str]) -> dict[str, bytes]:
    """The entries whose contents ``torch.export.load`` needs and every program has alike: empty tables, no pickled sample inputs."""
    return {**_TORCH, **{beside.format(name): data for name in graphs for beside, data in _BESIDE_GRAPH.items()}}


@dataclass(frozen=True)
class Listed:
    """What the manifest says of an entry, or of a rank's file beside the archive."""

    bytes: int
    sha256: str

    @classmethod
    def of_file(cls, path: Path) -> Listed:
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def write(
    path: str | Path, own: Mapping[str, bytes], graphs: Mapping[str, bytes], weights: Path | None, rank_files: Sequence[Listed] = ()
) -> None:
    """Writes the archive atomically: fxshard's ``own`` entries and the graphs. ``weights`` is a safetensors file to copy in, ``rank_files``
    those of the ranks beside it. The same input gives the same bytes."""
    entries = {**_TORCH, **own}
    for name, graph in graphs.items():
        entries |= {graph_entry(name): graph} | fixed_entries((name,))
    listed = {name: Listed(len(data), hashlib.sha256(data).hexdigest()) for name, data in entries.items()}
    if weights is not None:
        listed[WEIGHTS] = Listed.of_file(weights)
    rows = [{"name": name, **vars(facts)} for name, facts in listed.items()]
    beside = {"rank_files": [vars(one) for one in rank_files]} if rank_files else {}
    manifest = write_json({"format": FORMAT, "version": VERSION, "torch": torch_version(), "entries": rows, **beside})
    with atomic_file(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, data in {MANIFEST: manifest.encode(), **entries}.items():
            archive.writestr(_info(name), data, compress_type=zipfile.ZIP_DEFLATED if name.endswith(".json") else zipfile.ZIP_STORED)
        if weights is not None:
            _write_weights(archive, weights)
        archive.close()
        _check_readable(temporary, entries, str(path))


def _check_readable(written: Path, entries: Mapping[str, bytes], path: str) -> None:
    """Raises FileError for a program that ``open_archive`` would refuse, or whose graphs take more memory than is read."""
    try:
        for name in filter(lambda one: one.endswith(".json"), entries):
            check_parsed_size(entries[name].decode(), name)
        with open_archive(written):
            pass
    except FileError as error:
        remedy = "export fewer layers a program, or sizes that all ranks share evenly, so that there are fewer size classes"
        raise FileError(f"the program is too large for a file: {error.what}", where=path, remedy=remedy) from error


def _info(name: str) -> zipfile.ZipInfo:
    """An entry without time or machine, so that files are reproducible."""
    info = zipfile.ZipInfo(ROOT + name)
    info.create_system, info.external_attr = 3, 0o644 << 16
    return info


def _write_weights(archive: zipfile.ZipFile, weights: Path) -> None:
    """Stores the weights uncompressed at an aligned offset, so that they can be memory-mapped."""
    info = _info(WEIGHTS)
    info.file_size = weights.stat().st_size
    assert archive.fp is not None
    start = archive.fp.tell() + _LOCAL_HEADER + len(info.filename) + _ZIP64_EXTRA + 4
    padding = -start % ALIGNMENT
    info.extra = struct.pack("<HH", 0x4246, padding) + b"\0" * padding
    with weights.open("rb") as source, archive.open(info, "w", force_zip64=True) as target:
        shutil.copyfileobj(source, target, 2**24)


@functools.cache
def torch_version() -> str:
    """``2.13``: a program can only be read with the minor version of torch that wrote it. Its metadata says it without an import."""
    return ".".join(version("torch").split("+")[0].split(".")[:2])


class Container:
    """An archive whose entries are allowed and listed in its manifest; made by ``open_archive``."""

    def __init__(self, archive: zipfile.ZipFile, path: str) -> None:
        self.archive, self.path = archive, path
        self.known: dict[str, bytes] = {}
        self.infos = _checked_infos(archive, path)
        if MANIFEST not in self.infos:
            raise FileError("the archive is not a fxshard program: it has no manifest", where=path, remedy=NOT_A_PROGRAM)
        self.listed, self.rank_files = _read_manifest(parse_json(self._bytes(MANIFEST), f"{path}: manifest"))
        _check_names(set(self.infos) - {MANIFEST}, set(self.listed), path)
        for name, facts in self.listed.items():
            if facts.bytes != self.infos[name].file_size:
                raise FileError(f"the entry {name} is damaged: its size is not the manifest's", where=path, remedy=REMAKE)
            if not name.endswith((".safetensors", ".so")):  # large, and hashed when they are read
                self.read(name)

    def _bytes(self, name: str) -> bytes:
        with self.stream(name) as entry:
            return entry.read(self.infos[name].file_size + 1)

    def read(self, name: str) -> bytes:
        """An entry's bytes; raises FileError if their hash differs from the manifest's."""
        if name not in self.listed:
            raise FileError(f"the program has no {name}", where=self.path, remedy=REMAKE)
        if name in self.known:
            return self.known[name]
        data = self._bytes(name)
        if hashlib.sha256(data).hexdigest() != self.listed[name].sha256:
            raise FileError(f"the entry {name} is damaged: its hash is not the manifest's", where=self.path, remedy=REMAKE)
        self.known[name] = data
        return data

    def has(self, name: str) -> bool:
        return name in self.listed

    def check_entries(self, graphs: Iterable[str]) -> None:
        """Raises FileError unless the archive holds exactly what a program with these graphs has, and torch's own entries are as fxshard
        writes them: ``torch.export.load`` would unpickle what else they held."""
        graphs = tuple(graphs)
        fixed = fixed_entries(graphs)
        needed = {PLAN, PROGRAM, *map(graph_entry, graphs), *self._compiled(graphs)}
        needed |= {PLANNING, PLANNED_GRAPH} if self.has(PLANNING) else set()
        for name in sorted(needed - set(self.listed)):
            raise FileError(f"the program has no {name}", where=self.path, remedy=REMAKE)
        known = {*fixed, *needed, WEIGHTS}
        if extra := set(self.listed) - known:
            raise FileError(f"the archive holds {min(extra)!r}, which its program does not use", where=self.path, remedy=NOT_A_PROGRAM)
        for name, data in fixed.items():
            if self.read(name) != data:
                raise FileError(f"the entry {name} is not what fxshard writes there", where=self.path, remedy=NOT_A_PROGRAM)

    def check_rank_files(self, ranks: int) -> None:
        """Raises FileError if the manifest lists weights of ranks, but not of so many."""
        if (count := len(self.rank_files)) not in (0, ranks):
            what = f"the manifest lists the weights of {count} ranks, the program's mesh has {ranks}"
            raise FileError(what, where=self.path, remedy=NOT_A_PROGRAM)

    def _compiled(self, graphs: Sequence[str]) -> set[str]:
        """The entries of compiled code that a program with these graphs has: all or none."""
        entries = {RUNNER, *(compiled_entry(name, end) for name in graphs for end in COMPILED)}
        return entries if entries & set(self.listed) else set()

    @contextmanager
    def stream(self, name: str) -> Iterator[IO[bytes]]:
        """An entry opened for reading; zip errors become a FileError."""
        try:
            with self.archive.open(self.infos[name]) as entry:
                yield entry
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError, *_ZLIB) as error:
            raise FileError(f"the entry {name} is damaged: {error}", where=self.path, remedy=REMAKE) from error

    def offset(self, name: str) -> int:
        """Offset of a stored entry's bytes in the file, from its local header, which may be longer than the zip's directory says."""
        info = self.infos[name]
        with open(self.path, "rb") as file:
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\3\4":
            raise FileError(f"the entry {name} is damaged: it has no header", where=self.path, remedy=REMAKE)
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        return int(info.header_offset + _LOCAL_HEADER + name_length + extra_length)


@contextmanager
def open_archive(path: str | Path) -> Iterator[Container]:
    """Opens a program's archive; raises FileError for a file that is missing, truncated, foreign or unsafe."""
    try:
        file = _ArchiveFile(path)
        try:
            archive = zipfile.ZipFile(file)
        except BaseException:
            file.close()
            raise
    except zipfile.BadZipFile as error:
        if read_start(path, 64).lstrip().startswith(b"{"):
            remedy = f"read a plan with fxshard.ShardingPlan.load({str(path)!r}); programs come from fxshard.export"
            raise FileError("the file is JSON, like a plan, not a program", where=str(path), remedy=remedy) from error
        raise FileError(f"the file is cut short or is not an archive: {error}", where=str(path), remedy=REMAKE) from error
    except (OSError, ValueError, NotImplementedError, *_ZLIB) as error:
        raise FileError(f"cannot open the file: {error}", where=str(path), remedy="check the path and its permissions") from error
    with file, archive:
        file.limit = None
        yield Container(archive, str(path))


class _ArchiveFile(io.BufferedReader):
    """A file that refuses single reads of more than ``limit`` bytes, so that a huge directory is refused before it is read."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(io.FileIO(path))
        self.limit: int | None = MAX_DIRECTORY

    def read(self, size: int | None = -1, /) -> bytes:
        if self.limit is not None and size is not None and size > self.limit:
            raise zipfile.BadZipFile(f"its directory is absurdly large, {size} bytes")
        return super().read(size)


_ZLIB = (zlib.error, struct.error, OverflowError)


def _checked_infos(archive: zipfile.ZipFile, path: str) -> dict[str, zipfile.ZipInfo]:
    """Entries by name, without the root folder; raises FileError for any that a program cannot have."""
    infos = archive.infolist()
    if len(infos) > MAX_ENTRIES:
        raise FileError(f"the archive has {len(infos)} entries", where=path, remedy=NOT_A_PROGRAM)
    found: dict[str, zipfile.ZipInfo] = {}
    total = 0
    for info in infos:
        name = info.filename.removeprefix(ROOT)
        if not info.filename.startswith(ROOT) or not _ALLOWED.fullmatch(name) or info.orig_filename != info.filename:
            raise FileError(f"the archive holds {info.filename!r}, which a program does not have", where=path, remedy=NOT_A_PROGRAM)
        if name in found:
            raise FileError(f"the archive holds {name!r} twice", where=path, remedy=NOT_A_PROGRAM)
        _check_size(info, name, path)
        total += info.file_size if name != WEIGHTS else 0
        if total > MAX_BYTES:
            raise FileError(f"the archive is absurdly large: {total} bytes or more besides weights", where=path, remedy=NOT_A_PROGRAM)
        found[name] = info
    assert archive.fp is not None
    try:
        check_layout(archive.fp, infos)
    except (OSError, ValueError) as error:
        remedy = "give the file as fxshard export wrote it, with nothing before, between or after its entries"
        raise FileError(f"the archive could be read in two ways: {error}", where=path, remedy=remedy) from error
    return found


def _check_size(info: zipfile.ZipInfo, name: str, path: str) -> None:
    stored = info.compress_type == zipfile.ZIP_STORED
    if info.flag_bits & 0x1 or not (stored or info.compress_type == zipfile.ZIP_DEFLATED):
        raise FileError(f"the entry {name} is encrypted or compressed in an unknown way", where=path, remedy=NOT_A_PROGRAM)
    if stored and info.file_size != info.compress_size:
        raise FileError(f"the entry {name} has two different sizes", where=path, remedy=NOT_A_PROGRAM)
    if name == WEIGHTS:
        if not stored:
            raise FileError("the weights are compressed", where=path, remedy=NOT_A_PROGRAM)
    elif info.file_size > MAX_RATIO * max(info.compress_size, 1):
        raise FileError(f"the entry {name} is absurdly large: {info.file_size} bytes when unpacked", where=path, remedy=NOT_A_PROGRAM)


def _read_manifest(root: Field) -> tuple[dict[str, Listed], tuple[Listed, ...]]:
    """The entries by name, and the ranks' files."""
    root.check_version(FORMAT, VERSION, "program", NOT_A_PROGRAM, f"export it again; this fxshard reads version {VERSION}")
    written = root.get("torch", Field.text)
    if written != torch_version():
        remedy = f"export it again, or install torch {written}"
        raise root.fail(f"torch {written} wrote the program, this is torch {torch_version()}", remedy)
    root.known(("format", "version", "torch", "entries", "rank_files"))
    facts: Readers = {"bytes": Field.whole, "sha256": Field.text}
    rows = [one.record({"name": Field.text, **facts}) for one in root.get("entries", Field.items)]
    listed = {row.pop("name"): Listed(**row) for row in rows}
    if len(listed) != len(rows):
        raise root.fail("the manifest lists an entry twice")
    return listed, root.get("rank_files", lambda f: f.tuple_of(lambda one: Listed(**one.record(facts))), ())


def _check_names(present: set[str], listed: set[str], path: str) -> None:
    for names, what in ((present - listed, "holds {!r}, which its manifest does not list"), (listed - present, "lacks {!r}")):
        if names:
            raise FileError(f"the archive {what.format(min(names))}", where=path, remedy=REMAKE)
