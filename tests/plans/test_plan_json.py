# ruff: noqa: E501  (golden text)
"""The plan's JSON: a plan reads back equal; damaged and foreign files are refused with the place and the reason."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings

from fxshard.errors import FileError, PlanError
from fxshard.layout.redistribution import steps
from fxshard.memory_profile import KINDS
from fxshard.plans.plan_data import Certificate, Redistribution
from fxshard.plans.plan_json import dumps
from fxshard.plans.sharding_plan import ShardingPlan
from tests.plans.small_plans import L, plans, small_plan

SMALL = json.loads(dumps(small_plan()))
SEAL = SMALL.pop("sha256")


def test_golden_text() -> None:
    assert_expected_inline(
        dumps(small_plan()),
        """\
{
"sha256": "ad61b5fcdb0e13bbb00661c9ae742a42dddc7afd0edfc62979874d860fc2f716",
"format": "fxshard-plan",
"version": 7,
"partial": false,
"mesh": {"axes": [["dp", 2], ["tp", 2]], "hardware": "h100"},
"train": false,
"graph_hash": "abababababababababababababababababababababababababababababababab",
"certificate": {"unit": "microseconds", "objective": 10.75, "lower_bound": 10.75, "cut": false},
"memory": {"gradient": 0, "parameter": 64},
"memory_limit": 1073741824,
"inputs": [
 {"kind": "parameter", "name": "lin.weight", "node": "w"},
 {"kind": "input", "name": "args[0]", "node": "x"}
],
"outputs": [
 {"kind": "output", "name": "outputs[0]", "node": "mm"}
],
"nodes": [
 {"name": "w", "op": "placeholder", "inputs": [], "outputs": ["RS(0)"], "shapes": [[8, 4]], "dtypes": ["float32"], "compute": 0.0},
 {"name": "x", "op": "placeholder", "inputs": [], "outputs": ["S(0)S(1)"], "shapes": [[6, 8]], "dtypes": ["float32"], "compute": 0.0},
 {"name": "mm", "op": "aten.mm.default", "inputs": ["S(0)S(1)", "RS(0)"], "outputs": ["S(0)P"], "shapes": [[6, 4]], "dtypes": ["float32"], "compute": 3.25},
 {"name": "output", "op": "output", "inputs": ["S(0)R"], "outputs": [], "shapes": [], "dtypes": [], "compute": 0.0}
],
"redistributions": [
 {"value": "mm", "shape": [6, 4], "itemsize": 4, "source": "S(0)P", "target": "S(0)R", "steps": [{"kind": "all_reduce", "axis": "tp", "from": "P", "to": "R"}], "readers": [["output", 0]], "cost": 7.5}
],
"fallbacks": [
 {"node": "mm", "reason": "no rule for it"}
],
"picked": [],
"lines": [
 {"line": "model.py:7: return self.lin(x)", "nodes": ["mm", "w"]}
],
"collectives": [
 {"kind": "all_reduce", "axis": "tp", "bytes": 48, "cost": 7.5, "from": "S(0)P", "to": "S(0)R", "entry": 0, "step": 0}
]
}
""",
    )


def test_the_hash_is_that_of_the_text_without_its_line() -> None:
    first, seal, *rest = dumps(small_plan()).splitlines(keepends=True)
    assert seal == f'"sha256": "{hashlib.sha256((first + "".join(rest)).encode()).hexdigest()}",\n'
    spaced = json.dumps(SMALL | {"sha256": SEAL}, indent=1)
    assert ShardingPlan.from_json(spaced) == ShardingPlan.from_json(first + "".join(rest)) == small_plan()


def test_the_largest_numbers_can_be_shown() -> None:
    plan = ShardingPlan.from_json(json.dumps(_with("memory", dict.fromkeys(KINDS, 2**63 - 1)) | {"memory_limit": 2**63 - 1}))
    assert " of 9223372 TB a device" in str(plan)


def test_source_lines_are_saved_but_not_compared() -> None:
    plan = small_plan()
    moved = dataclasses.replace(plan, lines={"mm": "elsewhere/model.py:9: return self.lin(x)"})
    assert moved == plan and moved.hash == plan.hash and dumps(moved) != dumps(plan)
    assert ShardingPlan.from_json(dumps(moved)).lines == moved.lines


def test_steps_through_folded_layouts_are_written() -> None:
    plan, ends, shape = small_plan(), (L("S(0)S(0)"), L("S(1)S(1)")), (8, 4)
    move = Redistribution("w", shape, 4, *ends, steps(*ends, shape, 4, plan.mesh), (), 0.0)
    plan = dataclasses.replace(plan, redistributions=(*plan.redistributions, move))
    text = dumps(plan)
    assert '"from": "S(0)", "to": "S(1 in 0,1)"' in text or '"from": "S(0 in 0,1)", "to": "S(1)"' in text
    assert ShardingPlan.from_json(text) == plan and [c.kind for c in plan.collectives][1:] == ["all_to_all", "all_to_all"]


@given(plans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_roundtrip(plan: ShardingPlan) -> None:
    again, plan = ShardingPlan.from_json(dumps(plan)), plan.canonical()
    assert again == plan
    assert dumps(again) == dumps(plan)
    assert again.hash == plan.hash


def test_the_order_of_dicts_does_not_change_the_text() -> None:
    plan = small_plan()
    turned = ShardingPlan(**{**vars(plan), "memory": dict(reversed(plan.memory.items()))})
    assert turned == plan and dumps(turned) == dumps(plan)


def test_a_number_that_is_not_finite_is_not_written() -> None:
    plan = ShardingPlan(**{**vars(small_plan()), "certificate": Certificate("microseconds", float("inf"), 0.0)})
    with pytest.raises(PlanError, match="not finite"):
        dumps(plan)


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("an older file")
    small_plan().save(path)
    assert ShardingPlan.load(path) == small_plan()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"], "a temporary file was left behind"


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("an older file")

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(FileError, match="No space left"):
        small_plan().save(path)
    assert path.read_bytes() == b"an older file"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        small_plan().save(tmp_path / "nowhere" / "plan.json")
    with pytest.raises(FileError, match="No such file"):
        ShardingPlan.load(tmp_path / "plan.json")


def test_hand_written_pins() -> None:
    text = '{"format": "fxshard-plan", "version": 7, "partial": true, "mesh": {"axes": [["dp", 2], ["tp", 4]]},'
    plan = ShardingPlan.from_json(text + '"nodes": [{"name": "layers_0_wq_weight", "outputs": ["RS(-1)"]}]}')
    assert plan.partial and plan.mesh.shape == (2, 4) and plan.specs["layers_0_wq_weight"].outputs == (L("RS(-1)"),)
    for other, missing in (
        (text.replace("true", "false") + '"nodes": []}', "train"),
        (text[: text.index('"mesh"')] + '"nodes": []}', "mesh"),
        (text + '"nodes": [{"outputs": ["RR"]}]}', "name"),
        ("{}", "not a fxshard plan"),
    ):
        with pytest.raises(FileError, match=missing) as error:
            ShardingPlan.from_json(other)
        remedy = str(error.value.remedy)
        assert all(f'"{field}"' in remedy for field in ("format", "version", "partial", "mesh", "nodes", "name", "outputs"))


def test_a_partial_plan_needs_no_figures_and_a_bound_may_differ_by_rounding() -> None:
    assert ShardingPlan.from_json(json.dumps(SMALL | {"partial": True, "nodes": SMALL["nodes"][:1]})).objective == 10.75
    assert ShardingPlan.from_json(json.dumps(_with("certificate.lower_bound", 10.75 * (1 + 1e-12)))).gap < 1e-9


def _without(name: str) -> dict[str, Any]:
    return {k: v for k, v in SMALL.items() if k != name}


def _with(path: str, value: Any) -> dict[str, Any]:
    """SMALL with one field changed; ``path`` like ``nodes.2.outputs``."""
    data = json.loads(json.dumps(SMALL))
    place: Any = data
    *way, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    for part in way:
        place = place[part]
    place[last] = value
    return data


HARDWARE = {"name": "own", "flops": {}, "memory_bandwidth": 1, "launch": 0, "node_size": 1}
HARDWARE |= {"inside": {"bandwidth": 1, "latency": 0}, "between": {"bandwidth": 1, "latency": 0}}
STEP = {"kind": "all_reduce", "axis": "tp", "from": "P", "to": "R"}
FOLDED = {"kind": "reduce_scatter", "to": "S(0 in 0,1)"}
SENT = {"kind": "dispatch", "axis": "dp", "buffer": [6, 8], "itemsize": 4, "operand": 0, "room": 1}
WITHOUT_ROOM = {name: value for name, value in SENT.items() if name != "room"}
BAD: list[tuple[Any, str, str]] = [
    ([], "not a fxshard plan", "plan.json"),
    ({"format": "other"}, "not a fxshard plan", "plan.json"),
    (_with("version", 8), "format version 8: a newer fxshard wrote it", "plan.json"),
    (_with("version", 6), "format version 6: an older fxshard wrote it", "plan.json"),
    (_with("memory", {"parameters": 1}), "unknown kind of memory 'parameters'; did you mean 'parameter'", "memory"),
    (_with("memory.parameter", 2**63), "at most 9223372036854775807, found 9223372036854775808", "memory.parameter"),
    (_with("certificate.lower_bound", -1e101), "at least -1e+100, found -1e+101", "certificate.lower_bound"),
    (_with("mesh.hardware", HARDWARE | {"launch": 1e101}), "no figure is as large as 1e+101", "mesh.hardware.launch"),
    (_with("sha256", SEAL[::-1]), "the plan was changed after it was written", "plan.json"),
    (_with("sha256", 7), "expected a text, found a whole number", "plan.json: sha256"),
    (SMALL | {"sha256": SEAL, "train": True}, "the plan was changed after it was written", "plan.json"),
    (_without("train"), "the field 'train' is missing", "plan.json"),
    (_with("train", 1), "expected true or false, found a whole number", "plan.json: train"),
    (_with("extra", 1), "unknown field 'extra'", "plan.json"),
    (_with("nodes.0.ouputs", []), "unknown field 'ouputs'; did you mean 'outputs'", "nodes[0]"),
    (_with("nodes.0.outputs.0", "RX"), "cannot read layout 'RX'", "nodes[0].outputs[0]"),
    (_with("nodes.0.outputs.0", "R"), "1 placements, the mesh has 2 axes", "nodes[0].outputs[0]"),
    (_with("nodes.0.outputs.0", "RS(2)"), "dim 2 in S(2) is out of range", "nodes[0].outputs[0]"),
    (_with("nodes.2.inputs.0", "RS(-1)"), "counts dims from the end", "nodes[2].inputs[0]"),
    (_with("nodes.0.dtypes", []), "do not match", "nodes[0]"),
    (_with("nodes.2.collectives", [SENT | {"room": 0}]), "at least 1, found 0", "nodes[2].collectives[0].room"),
    (_with("nodes.2.collectives", [SENT | {"room": 5}]), "at most 4, found 5", "nodes[2].collectives[0].room"),
    (_with("nodes.2.collectives", [SENT | {"room": 10**400}]), "at most 4, found 1000000", "nodes[2].collectives[0].room"),
    (
        _with("nodes.2.collectives", [SENT | {"itemsize": 10**400}]),
        "at most 9223372036854775807, found 1000000",
        "nodes[2].collectives[0].itemsize",
    ),
    (_with("nodes.2.collectives", [WITHOUT_ROOM]), "the field 'room' is missing", "nodes[2].collectives[0]"),
    (_with("nodes.1.name", "w"), "the node 'w' occurs twice", "nodes[1]"),
    (_with("mesh.axes.1.0", "dp"), "two mesh axes have the same name", "mesh"),
    (_with("mesh.axes.1.1", 0), "at least 1", "mesh.axes[1][1]"),
    (_with("mesh.hardware", "h10"), "unknown hardware 'h10'", "mesh.hardware"),
    (_with("certificate.unit", "s"), "unknown unit 's'", "certificate"),
    (_with("certificate.objective", 10**400), "not finite", "certificate.objective"),
    (_with("certificate.objective", -10.75), "at least 0, found -10.75", "certificate.objective"),
    (_with("certificate.lower_bound", 1e9), "the lower bound 1000000000.0 is above the objective 10.75", "certificate"),
    (_with("nodes.2.compute", -3.25), "at least 0, found -3.25", "nodes[2].compute"),
    (_with("nodes.2.compute", 3.5), "the objective is 10.75, but nodes and redistributions cost 11.0 together", "certificate"),
    (_with("redistributions.0.cost", 0), "the objective is 10.75, but nodes and redistributions cost 3.25 together", "certificate"),
    (_with("certificate.unit", "bytes"), "the cost is 7.5, but the steps send 48 bytes", "redistributions[0]"),
    (_with("mesh.hardware", HARDWARE | {"launch": -1}), "at least 0, found -1", "mesh.hardware.launch"),
    (_with("mesh.hardware", HARDWARE | {"memory_bandwidth": 0}), "a rate is positive, found 0", "mesh.hardware.memory_bandwidth"),
    (_with("redistributions.0.shape", [2**40, 2**40]), "no tensor has so many elements", "redistributions[0].shape"),
    (_with("redistributions.0.itemsize", 3), "no element has a size of 3 bytes", "redistributions[0].itemsize"),
    (_with("mesh.axes.0.1", 2**62), "no mesh has so many ranks", "mesh"),
    (_with("redistributions.0.readers.0.0", "y"), "reader 'y' is not a node", "redistributions[0]"),
    (_with("redistributions.0.readers.0.1", 1), "'output' has no operand 1", "redistributions[0]"),
    (_with("redistributions.0.steps", []), "lead from S(0)P to S(0)P, not to the target S(0)R", "redistributions[0].steps"),
    (_with("redistributions.0.steps.0", STEP | {"axis": "pp"}), "no axis 'pp'", "redistributions[0].steps[0]"),
    (_with("redistributions.0.steps.0", STEP | {"kind": "slice"}), "is all_reduce, not 'slice'", "redistributions[0].steps[0]"),
    (_with("redistributions.0.steps.0", STEP | {"axis": "dp"}), "the value has S(0) on axis dp", "redistributions[0].steps[0]"),
    (
        _with("redistributions.0.steps.0", STEP | FOLDED),
        "is not a legal step from S(0)P: other axes cut the same dim",
        "redistributions[0].steps[0]",
    ),
    (_with("redistributions.0.steps.0", STEP | FOLDED | {"to": "S(4 in 0,1)"}), "more than 2 dims", "redistributions[0].steps[0].to"),
    (_with("redistributions.0.steps.0", STEP | FOLDED | {"to": "S(0 in )"}), "cannot read layout", "redistributions[0].steps[0].to"),
    (_with("inputs.0.node", "v"), "input node 'v' is not a node", "inputs[0]"),
    (_with("inputs.0.node", "output"), "input node 'output' has no layout", "inputs[0]"),
]


@pytest.mark.parametrize(("data", "what", "where"), BAD, ids=[b[1] for b in BAD])
def test_invalid_plans_are_refused(data: Any, what: str, where: str) -> None:
    with pytest.raises(FileError) as caught:
        ShardingPlan.from_json(json.dumps(data), "plan.json")
    assert what in caught.value.what
    assert caught.value.where is not None and where in caught.value.where
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "cut short"),
        (dumps(small_plan())[:-40], "cut short"),
        ("plan", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"PK\x03\x04\xff", r"a zip, not JSON(.|\n)*fxshard\.load"),
        ('{"format": "fxshard-plan", "format": 1}', "occurs twice"),
        (r'{"format": "\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "nests too deeply"),
        ('{"format": NaN}', "NaN is not a number"),
        ("9" * 5000, "not readable JSON"),
    ],
)
def test_not_json(text: str | bytes, what: str) -> None:
    with pytest.raises(FileError, match=what):
        ShardingPlan.from_json(text)


def test_damaged_files_load_or_are_refused() -> None:
    """Bytes are changed, removed, doubled or replaced by other tokens at random: the result is a plan or a FileError."""
    draw = random.Random(0)
    text = dumps(small_plan()).encode()
    tokens = [b"null", b"-1", b"1e999", b'"S(9)"', b"[]", b"{}", b"true", b"0.5", b'"RS(0)"', b'"\\ud800"', b"99999999999999999999"]
    refused = 0
    for _ in range(3000):
        damaged = bytearray(text)
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(len(damaged))
            stop = start + draw.choice((0, 1, 1, 5, 40))
            damaged[start:stop] = draw.choice((bytes([draw.randrange(256)]), b"", draw.choice(tokens), damaged[start:stop] * 2))
        try:
            ShardingPlan.from_json(bytes(damaged))
        except FileError:
            refused += 1
    assert refused > 1000
