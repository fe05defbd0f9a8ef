"""Damaged, foreign and malicious files are refused with a reason, whatever their manifest says."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxshard import archive
from fxshard.archive import container
from fxshard.errors import FileError
from fxshard.files import parse_json
from tests.archive.hostile import MANIFEST, edited, entries, pack, places, put
from tests.plans.small_plans import small_plan
from tests.programs import small_program

BESIDE = tuple(
    f"data/{name}" for name in ("sample_inputs/model.pt", "weights/model_weights_config.json", "constants/model_constants_config.json")
)
"""Entries that only ``torch.export.load`` reads; it unpickles the first."""
GRAPH, PROGRAM, PLAN = "models/model.json", "extra/fxshard/program.json", "extra/fxshard/plan.json"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    archive.save(small_program(5), tmp_path / "m.pt2")
    return tmp_path / "m.pt2"


def _graph(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def apply(file: Any) -> None:
        change(file["graph_module"]["graph"])

    return apply


def _first(**changes: Any) -> Callable[[Any], None]:
    return _graph(lambda graph: graph["nodes"][0].update(changes))


def _argument(**value: Any) -> Callable[[Any], None]:
    return _graph(lambda graph: graph["nodes"][0]["inputs"][2].update(arg=value))


IN_THE_GRAPH = [
    (_first(target="torch.hub.load"), "not an operator that a program may call"),
    (_first(target="torch.ops.aten.from_file.default"), "is not an argument|cannot have these shapes and arguments"),
    (_first(target="torch.ops.aten.add_.Tensor"), "not an operator that a program may call"),
    (_first(target="torch.ops.aten.save.default"), "not an operator that a program may call"),
    (_first(target="torch.ops.aten.no_such.default"), "not an operator that a program may call"),
    (_first(target="_operator.attrgetter"), "not an operator that a program may call"),
    (_first(subgraph={}), "unknown field 'subgraph'"),
    (_argument(as_custom_obj={"name": "x", "class_fqn": "y"}), "an argument of a kind that a program does not have"),
    (_argument(as_sym_int={"as_expr": {"expr_str": "__import__('os')"}}), "unknown field 'as_expr'"),
    (_argument(as_sym_int={"as_name": "x"}), "the size 'x' is read before it is computed"),
    (_argument(as_graph={}), "an argument of a kind"),
    (_argument(as_device={"type": "cuda", "index": 0}), "no device but cpu"),
    (_argument(as_string="bi,io->bx"), "cannot have these shapes and arguments"),
    (_graph(lambda g: g["nodes"][1]["inputs"][2]["arg"].update(as_string="pp")), "the text 'pp' is not an argument"),
    (_graph(lambda g: g["nodes"].reverse()), "is read before it is computed"),
    (_graph(lambda g: g["tensor_values"]["x"].update(dtype=99)), "99 is not a dtype"),
    (_graph(lambda g: g["tensor_values"]["einsum_default"].update(sizes=[{"as_int": 9}])), "the file says otherwise"),
    (_graph(lambda g: g["tensor_values"]["x"].update(sizes=[{"as_int": 2**70}])), "at most 9223372036854775807"),
    (_graph(lambda g: g["tensor_values"]["x"].update(sizes=[{"as_int": 2**62}] * 2)), "an input cannot have these shapes"),
    (_graph(lambda g: g["outputs"].clear()), "does not hold together"),
    (_graph(lambda g: g["inputs"].reverse()), "does not have the program's inputs"),
    (_graph(lambda g: g["outputs"][0]["as_tensor"].update(name="lambda")), "the tensor 'lambda' is read before it is computed"),
]


@pytest.mark.parametrize(("change", "what"), IN_THE_GRAPH)
def test_a_changed_graph_is_refused(path: Path, change: Callable[[Any], Any], what: str) -> None:
    with pytest.raises(FileError, match=what) as caught:
        archive.load(edited(path, GRAPH, change)) and pytest.fail("loaded")
    assert str(path) in str(caught.value.where)


IN_THE_PROGRAM = [
    (lambda p: p.update(pickle="x"), "unknown field 'pickle'"),
    (lambda p: p["inputs"][0].update(kind="file"), "unknown kind 'file'"),
    (lambda p: p["inputs"][0].update(layout="RR"), "does not hold together"),
    (lambda p: p["inputs"][0].update(node="y"), "does not have the program's inputs"),
    (lambda p: p["collectives"][0].update(node="y"), "is not in the graph"),
    (lambda p: p["collectives"][0].update(serves=[[0, 9]]), "not in the graph, or not in the plan"),
    (lambda p: p["collectives"][0].update(axis="pp"), "no 'all_reduce' on axis 'pp'"),
    (lambda p: p["classes"].append(p["classes"][0]), "two size classes are the same"),
    (lambda p: p["classes"][0].update(graph="../model"), "the program has no models/../model.json"),
    (lambda p: p["ranks"].append(0), "expected 4 entries, found 5"),
    (lambda p: p.update(ranks=[0, 0, 1, 7]), "there is no size class 7"),
    (lambda p: p.update(ranks=[1, 0, 1, 0]), "does not hold together"),
    (lambda p: p["mesh"]["axes"].reverse(), "for mesh tp=2,dp=2, its plan for dp=2,tp=2"),
    (lambda p: p["structure"].update(outputs={"set": [0]}), "unknown field 'set'"),
    (lambda p: p["structure"].update(outputs=7), "not numbered in order"),
]


@pytest.mark.parametrize(("change", "what"), IN_THE_PROGRAM)
def test_a_changed_description_is_refused(path: Path, change: Callable[[Any], Any], what: str) -> None:
    with pytest.raises(FileError, match=what):
        archive.load(edited(path, PROGRAM, change))


def test_a_changed_manifest_is_refused(path: Path) -> None:
    good = path.read_bytes()
    for change, what in (
        ({"format": "other"}, "not a fxshard program"),
        ({"version": 3}, "format version 3: an older fxshard wrote it"),
        ({"torch": "2.99"}, "torch 2.99 wrote"),
    ):
        path.write_bytes(good)
        with pytest.raises(FileError, match=what):
            archive.load(edited(path, MANIFEST, lambda manifest, change=change: manifest.update(change)))


def test_wrong_entries_are_refused(path: Path) -> None:
    good = entries(path)
    without = {name: data for name, data in good.items() if name != PLAN}
    evil = pickle.dumps(print)
    buffer = io.BytesIO()
    torch.save(torch.ones(1), buffer)
    for data, options, what in (
        (good | {"data/weights/weight_0": evil}, {}, "holds 'archive/data/weights/weight_0'"),
        (good | {"../../evil": b""}, {}, "holds 'archive/../../evil'"),
        (good, {"root": "/archive/"}, "holds '/archive/"),
        (good | {"extra/fxshard/": b""}, {}, "which a program does not have"),
        (good | {PLAN: b"{}"}, {"vouch": False}, "damaged: its size is not the manifest's"),
        (without, {"vouch": False}, "lacks 'extra/fxshard/plan.json'"),
        (good | {"models/model_7.json": b"{}"}, {"vouch": False}, "which its manifest does not list"),
        (good | {"archive_version": b"1"}, {}, "the entry archive_version is not what fxshard writes there"),
        *((good | {name: b"x"}, {"vouch": False}, f"the entry {name} is damaged") for name in BESIDE),
        *((good | {name: evil}, {}, f"the entry {name} is not what fxshard writes there") for name in BESIDE),
        (good | {"models/model_7.json": good[GRAPH]}, {}, "holds 'models/model_7.json', which its program does not use"),
        (good | {"models/model.json": buffer.getvalue()}, {}, "not UTF-8|not JSON"),
    ):
        with pytest.raises(FileError, match=what):
            archive.load(pack(path, data, **options))


def test_malformed_archives_are_refused(path: Path) -> None:
    data = entries(path)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as open_archive:
        open_archive.writestr("archive/" + PLAN, b"{}")
    with pytest.raises(FileError, match="twice"):
        archive.load(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as open_archive:
        open_archive.writestr("archive/" + PLAN, bytes(10**7))
    with pytest.raises(FileError, match="absurdly large"):
        archive.load(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as open_archive:
        open_archive.writestr("archive/" + PLAN, data[PLAN])
    with pytest.raises(FileError, match="compressed in an unknown way"):
        archive.load(path)


@pytest.mark.parametrize(
    ("length", "count", "what"),
    [(30, 1, "the entry models/model_1.json is absurdly large"), (2000, 17, "the archive is absurdly large"), (2000, 1, "found a list")],
)
def test_text_that_would_fill_memory_is_not_parsed(path: Path, length: int, count: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MB of empty lists: compressed too well, in too many entries, or few enough to parse."""
    draw, read = random.Random(0), []
    unit = ",".join(draw.choice(("[]", "{}", "[0]")) for _ in range(length))
    text = f"[{','.join([unit] * (8_000_000 // len(unit)))}]".encode()
    pack(path, entries(path) | {f"models/model_{k}.json": text for k in range(1, count + 1)}, compression=zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(container, "parse_json", lambda *args: read.append(args) or parse_json(*args))
    with pytest.raises(FileError, match=what):
        archive.load(path)
    assert bool(read) == (what == "found a list")


def test_bombs_are_refused_before_they_take_memory(path: Path) -> None:
    """A manifest that lists an entry twice or with another size, a directory of 5 MB, JSON that would take gigabytes once parsed."""
    good = entries(path)
    for change, what in (
        (lambda m: m["entries"].append(m["entries"][0]), "lists an entry twice"),
        (lambda m: m["entries"][0].update(bytes=4), "its size is not the manifest's"),
    ):
        manifest = json.loads(good[MANIFEST])
        change(manifest)
        with pytest.raises(FileError, match=what):
            archive.load(pack(path, good | {MANIFEST: json.dumps(manifest).encode()}, vouch=False))
    with zipfile.ZipFile(path, "w") as open_archive:
        for number in range(80):
            open_archive.writestr(f"archive/{number:060000d}", b"")
    with pytest.raises(FileError, match="directory is absurdly large"):
        archive.load(path)
    with pytest.raises(FileError, match=r"absurdly large: read, it would take 0\.8 GiB"):
        parse_json("[" + "[]," * 8_000_000 + "0]", "file")


@pytest.mark.parametrize(
    ("target", "rest", "what"),
    [
        ("unbind.int", [], "gives 1099511627776 parts"),
        ("split.Tensor", [{"as_int": 1}], "gives 1099511627776 parts"),
        ("chunk.default", [{"as_int": 10**9}], "gives 1000000000 parts"),
        ("tensor_split.sections", [{"as_int": 10**9}], "gives 1000000000 parts"),
        ("geqrf.default", [], "geqrf.default cannot have these shapes"),
    ],
)
def test_shapes_that_would_take_memory_to_find(path: Path, target: str, rest: list[Any], what: str) -> None:
    """Parts of a tensor that would be counted one by one, and an operator whose shapes only its kernel knows."""

    def change(graph: Any) -> None:
        graph["tensor_values"]["x"]["sizes"] = [{"as_int": 2**40}, {"as_int": 8}]
        inputs = [{"as_tensor": {"name": "x"}}, *rest]
        names = ("self", "a", "b")
        graph["nodes"][0]["target"] = f"torch.ops.aten.{target}"
        graph["nodes"][0]["inputs"] = [{"name": n, "arg": one, "kind": 1} for n, one in zip(names, inputs, strict=False)]

    with pytest.raises(FileError, match=what):
        archive.load(edited(path, GRAPH, _graph(change)))


def test_a_plan_is_not_a_program(tmp_path: Path) -> None:
    """The error names the function that loads plans."""
    small_plan().save(tmp_path / "plan.json")
    with pytest.raises(FileError, match=r"JSON, like a plan") as caught:
        archive.load(tmp_path / "plan.json")
    assert f"fxshard.ShardingPlan.load({str(tmp_path / 'plan.json')!r})" in str(caught.value.remedy)


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "torch.pt")
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "other.pt2")
    (tmp_path / "text").write_text("hello")
    foreign = "which a program does not have"
    for name, what in (("torch.pt", foreign), ("other.pt2", foreign), ("text", "cut short or is not an archive")):
        with pytest.raises(FileError, match=what):
            archive.load(tmp_path / name)
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileError, match="cannot open"):
            archive.load(missing)


def test_damaged_bytes(path: Path) -> None:
    """A file that is cut short or has changed bytes is refused, or loads as the same program if the byte has no meaning."""
    draw, good, same = random.Random(0), path.read_bytes(), archive.load(path).hash
    for round_ in range(200):
        data = bytearray(good)
        if round_ % 4 == 0:
            del data[draw.randrange(len(data)) :]
        else:
            start = draw.randrange(len(data) - 8) if round_ % 2 else draw.randrange(len(data) - 1600, len(data) - 8)
            data[start : start + draw.choice((1, 4))] = draw.randbytes(draw.choice((1, 4)))
        path.write_bytes(data)
        with contextlib.suppress(FileError):
            assert archive.load(path).hash == same


@pytest.mark.parametrize("name", [GRAPH, PROGRAM, PLAN])
def test_fields_replaced_at_random_load_or_are_refused(path: Path, name: str) -> None:
    """The manifest has the hashes of the changed entries, so that the readers of entries are under test."""
    draw, good = random.Random(name), entries(path)
    values: list[Any] = [..., None, -1, 0, 7, 2**70, 0.5, True, "", "x", "lambda", "S(9)", [], [[]], {}, {"as_none": True}, [1, "a"]]
    refused = 0
    for _ in range(150):
        value = json.loads(good[name])
        value = put(value, draw.choice(places(value)), draw.choice(values))
        try:
            archive.load(pack(path, good | {name: json.dumps(value).encode()}))
        except FileError:
            refused += 1
    assert refused > 40
