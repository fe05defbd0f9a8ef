"""Plans for tests: a small one written out by hand, and random ones for hypothesis."""

from __future__ import annotations

import math

import hypothesis.strategies as st

from fxshard.graph.planning_graph import INPUT_KINDS
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import COLLECTIVES, Step, path_price, single_step, steps
from fxshard.memory_profile import KINDS
from fxshard.mesh.hardware import Curve, Hardware, Link, Measured
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import Certificate, OpSpec, PlanEnd, PlannedNode, Redistribution
from fxshard.plans.sharding_plan import ShardingPlan

L = Layout.parse
MESH = Mesh({"dp": 2, "tp": 2}, hardware="h100")


def small_plan() -> ShardingPlan:
    """y = x @ w with w sharded by rows on tp: a matmul whose pending sum is reduced for the output."""
    step = single_step(1, L("P")[0], L("R")[0])
    assert step is not None
    return ShardingPlan(
        mesh=MESH,
        train=False,
        graph_hash="ab" * 32,
        nodes=(
            PlannedNode("w", "placeholder", OpSpec((), (L("RS(0)"),)), ((8, 4),), ("float32",)),
            PlannedNode("x", "placeholder", OpSpec((), (L("S(0)S(1)"),)), ((6, 8),), ("float32",)),
            PlannedNode("mm", "aten.mm.default", OpSpec((L("S(0)S(1)"), L("RS(0)")), (L("S(0)P"),)), ((6, 4),), ("float32",), 3.25),
            PlannedNode("output", "output", OpSpec((L("S(0)R"),), ()), (), ()),
        ),
        redistributions=(Redistribution("mm", (6, 4), 4, L("S(0)P"), L("S(0)R"), (step,), (("output", 0),), 7.5),),
        certificate=Certificate("microseconds", 10.75, 10.75),
        inputs=(PlanEnd("parameter", "lin.weight", "w"), PlanEnd("input", "args[0]", "x")),
        outputs=(PlanEnd("output", "outputs[0]", "mm"),),
        memory={"parameter": 64, "gradient": 0},
        memory_limit=2**30,
        fallbacks=(("mm", "no rule for it"),),
        lines={"mm": "model.py:7: return self.lin(x)", "w": "model.py:7: return self.lin(x)"},
    )


def _curve(points: list[tuple[int, float]]) -> Curve:
    """A curve near these points whose sizes and times ascend."""
    sizes, times = (sorted(one) for one in zip(*points, strict=True))
    return Curve(tuple((size + i, time + i * (1.0 + max(times))) for i, (size, time) in enumerate(zip(sizes, times, strict=True))))


names = st.text(min_size=1, max_size=8)
figures = st.floats(0, 1e15)
rates = st.floats(1e-9, 1e15)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
links = st.builds(Link, rates, figures)
curves = st.lists(st.tuples(st.integers(0, 2**60), figures), min_size=2, max_size=4).map(_curve)
groups = st.tuples(st.sampled_from(COLLECTIVES), st.integers(2, 8), st.integers(1, 8))
measured = st.builds(Measured, st.dictionaries(names, curves, max_size=2), st.none() | curves, st.dictionaries(groups, curves, max_size=2))
axes = st.dictionaries(names, links, max_size=2)
speeds = st.dictionaries(st.sampled_from((1, 2, 4, 8)), rates)
hardware = st.builds(
    Hardware, names, speeds, rates, figures, st.integers(1, 64), links, links, axes, measured, st.floats(0, 1), memory=st.none() | rates
)
meshes = st.builds(
    Mesh,
    st.dictionaries(st.sampled_from(("dp", "tp", "pp", "ep")), st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from(("h100", "cpu")) | hardware,
)


def layouts(shape: tuple[int, ...], mesh: Mesh, ops: tuple[str, ...] = ("sum", "avg", "max")) -> st.SearchStrategy[Layout]:
    one = ["R", *(f"S({d})" for d in range(len(shape))), *(f"P({op})" for op in ops)]
    return st.lists(st.sampled_from(one), min_size=mesh.ndim, max_size=mesh.ndim).map(lambda p: L("".join(p)))


@st.composite
def nodes(draw: st.DrawFn, mesh: Mesh, name: str) -> PlannedNode:
    outs = draw(st.lists(shapes, max_size=2))
    spec = OpSpec(
        tuple(draw(layouts(draw(shapes), mesh)) for _ in range(draw(st.integers(0, 3)))), tuple(draw(layouts(s, mesh)) for s in outs)
    )
    return PlannedNode(name, draw(names), spec, tuple(outs), tuple(draw(names) for _ in outs), draw(figures))


@st.composite
def redistributions(draw: st.DrawFn, mesh: Mesh, readers: list[tuple[str, int]], unit: str, parameters: list[str]) -> Redistribution:
    shape, itemsize = draw(shapes), draw(st.sampled_from((1, 2, 4)))
    source, target = draw(layouts(shape, mesh, ("sum",))), draw(layouts(shape, mesh, ("sum",)))
    plain = Mesh(dict(zip(mesh.axis_names, mesh.shape, strict=True)))
    path: tuple[Step, ...] = steps(source, target, shape, itemsize, plain)
    cost = path_price(source, target, shape, itemsize, plain) if unit == "bytes" else draw(figures)
    value = draw(st.sampled_from([*parameters, *draw(st.lists(names, min_size=1, max_size=2))]))
    hides = value in parameters and unit == "microseconds" and cost > 1e-9
    hidden = draw(st.floats(0, 0.99)) * mesh.hardware.overlap * cost if hides else 0.0
    readers = draw(st.lists(st.sampled_from(readers), max_size=2)) if readers else []
    return Redistribution(value, shape, itemsize, source, target, path, tuple(readers), cost - hidden, hidden)


@st.composite
def plans(draw: st.DrawFn) -> ShardingPlan:
    mesh = draw(meshes)
    planned = [draw(nodes(mesh, name)) for name in draw(st.lists(names, unique=True, max_size=4))]
    readers = [(n.name, i) for n in planned for i in range(len(n.spec.inputs))]
    unit = draw(st.sampled_from(("microseconds", "bytes")))
    given = [n.name for n in planned if n.spec.outputs]
    end = st.builds(PlanEnd, st.sampled_from(INPUT_KINDS), names, st.sampled_from(given)) if given else st.nothing()
    inputs = draw(st.lists(end, max_size=2, unique_by=lambda one: one.node)) if given else []
    parameters = [one.node for one in inputs if one.kind == "parameter"]
    moves = draw(st.lists(redistributions(mesh, readers, unit, parameters), max_size=2))
    cost = math.fsum([*(n.compute for n in planned), *(m.cost for m in moves)])
    return ShardingPlan(
        mesh=mesh,
        train=draw(st.booleans()),
        graph_hash=draw(names),
        nodes=tuple(planned),
        redistributions=tuple(moves),
        certificate=Certificate(unit, cost, draw(st.floats(-1e15, cost)), draw(st.booleans())),
        inputs=tuple(inputs),
        outputs=tuple(draw(st.lists(st.builds(PlanEnd, names, names, names), max_size=2))),
        memory=draw(st.dictionaries(st.sampled_from(KINDS), st.integers(0, 2**60), max_size=3)),
        memory_limit=draw(st.none() | st.integers(0, 2**60)),
        fallbacks=tuple(draw(st.lists(st.tuples(names, names), max_size=2))),
        partial=draw(st.booleans()),
        lines=draw(st.dictionaries(names, st.sampled_from(("a.py:1: x", "a.py:2: y")), max_size=3)),
        picked=draw(st.dictionaries(names, st.tuples(names, st.integers(0, 3)), max_size=2)),
    )


def by_hand(plan: ShardingPlan) -> str:
    """The plan's file as somebody may edit it: without its hash."""
    return "".join(line for line in plan.to_json().splitlines(keepends=True) if not line.startswith('"sha256"'))
