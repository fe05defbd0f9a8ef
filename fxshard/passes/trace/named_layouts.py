"""The layouts that a model itself names, by its calls of DTensor's API (see ``dtensor_calls``): read from the traced graph.

To the model, a value is a DTensor from ``from_local`` (``redistribute``, ``distribute_tensor``) up to ``to_local``. The caller gets what
the model returns in the same form: a DTensor, or the shard of one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import LayoutError, TraceError
from fxshard.graph.planning_graph import GraphInput, GraphOutput, OutputForm, operands, producer, reached, source_line
from fxshard.layout.layouts import Layout, canonical, normalised_placement, sharding_axes
from fxshard.mesh.mesh import Mesh, as_mesh, parse_mesh
from fxshard.passes.trace.followed_layouts import followed
from fxshard.plans.plan_data import OpSpec

log = logging.getLogger("fxshard")

COPIES = (torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default)
PLACED, HANDED_OUT = torch.ops.fxshard.placed.default, torch.ops.fxshard.handed_out.default


class LocalInputsError(TraceError):
    """The model declares arguments to be this rank's shards. ``layouts``: path of the argument -> axis name -> placement."""

    def __init__(self, layouts: Mapping[str, Mapping[str, Placement]], where: str | None) -> None:
        self.layouts = layouts
        name, placed = next(iter(layouts.items()))
        said = ", ".join(f"{axis}: {placement}" for axis, placement in placed.items())
        what = f"the model takes {name} as this rank's shard ({said}), and it is a whole tensor here"
        super().__init__(
            what, where=where, remedy="parallelize accepts the shard; elsewhere pass the whole tensor as a DTensor in that layout"
        )


@dataclass(frozen=True)
class _Known:
    """``dtensor``: whether the model regards the value as a DTensor. ``axes``: the mesh of the DTensors that it is computed from.
    ``from_dtensor``: whether it is, or depends on, a DTensor or a rank's part of one, so that ranks may have different values in torch."""

    dtensor: bool = False
    axes: str = ""
    from_dtensor: bool = False
    sharded: frozenset[str] = frozenset()
    """The axes on which parameters from which it is computed are sharded, in layouts that no call names."""


@dataclass(frozen=True)
class OnMesh:
    """A DTensor among parameters and inputs. ``axes``: of its mesh, ``"tp=4"``. ``sharded``: those on which a rank has a part of it."""

    axes: str
    sharded: frozenset[str]


def meshes_of(tensors: Mapping[str, Any]) -> dict[str, OnMesh]:
    """The DTensors among ``tensors``, by name."""
    found = {name: x for name, x in tensors.items() if isinstance(x, DTensor)}
    meshes = {name: as_mesh(x.device_mesh) for name, x in found.items()}
    return {name: OnMesh(str(mesh), _sharding_axes(found[name], mesh)) for name, mesh in meshes.items()}


def _sharding_axes(x: DTensor, mesh: Mesh) -> frozenset[str]:
    return frozenset(axis for axis, placement in zip(mesh.axis_names, x.placements, strict=True) if not placement.is_replicate())


def named_layouts(
    joint: fx.GraphModule, inputs: Sequence[GraphInput], outputs: Sequence[GraphOutput], meshes: Mapping[str, OnMesh]
) -> dict[str, OutputForm]:
    """The form in which each output is returned, by its name, for those that are not whole.

    Completes the notes of the graph: ``placed`` nodes get their mesh, ``handed_out`` nodes go. ``meshes`` as of ``meshes_of``. Raises
    TraceError for a declared layout that whole values cannot have, LocalInputsError for inputs that are declared to be shards. Warns of
    the user's ``to_local`` of what is sharded or pending in torch, and is whole here.
    """
    if not any(node.target in (PLACED, HANDED_OUT) for node in joint.graph.nodes):
        return {}
    by_node = {i.node: i for i in inputs}
    known = _known_values(joint, by_node, meshes)
    returned = zip(operands(joint.graph.output_node()), outputs, strict=True)
    forms = {end.name: _form(node, end.name, known) for node, end in returned if end.kind == "output"}
    _warn_of_whole_values(joint, by_node, meshes)
    for node in joint.graph.find_nodes(op="call_function", target=HANDED_OUT):
        node.replace_all_uses_with(node.args[0])
        joint.graph.erase_node(node)
    return {name: form for name, form in forms.items() if form is not None}


def _known_values(joint: fx.GraphModule, inputs: Mapping[str, GraphInput], meshes: Mapping[str, OnMesh]) -> dict[fx.Node, _Known]:
    """What is known of each value; gives ``placed`` nodes their mesh."""
    known: dict[fx.Node, _Known] = {}
    shards: dict[str, dict[str, Placement]] = {}
    where: str | None = None
    for node in joint.graph.nodes:
        before = [known[n] for n in node.all_input_nodes]
        axes = next((k.axes for k in sorted(before, key=lambda k: not k.dtensor) if k.axes), "")  # a parameter may be on more axes
        if node.op == "placeholder":
            end = inputs.get(node.name)
            held = meshes.get(end.name) if end else None
            of_input = held is not None and end is not None and end.kind == "input"
            known[node] = _Known(axes=held.axes if held else "", from_dtensor=of_input, sharded=held.sharded if held else frozenset())
        elif node.target is PLACED:
            axes = str(node.args[2]) or axes or _only_mesh(meshes, node)
            node.args = (*node.args[:2], axes, *node.args[3:])
            if _declares_shard(node, before[0]):
                end = inputs.get(getattr(node.args[0], "name", ""))
                if end is None or end.kind != "input":
                    raise _not_a_shard(node)
                shards[end.name], where = placements_on(str(node.args[1]), axes), where or source_line(node)
            known[node] = _Known(True, axes, True)
        elif node.target is HANDED_OUT:
            if node.args[1] == "local" and _is_pending(node.args[0]):
                raise _pending("to_local hands out a pending sum", node.args[0])
            known[node] = _Known(False, axes, before[0].from_dtensor and not _is_whole(node))
        else:
            sharded = frozenset[str]().union(*(k.sharded for k in before))
            known[node] = _Known(any(k.dtensor for k in before), axes, any(k.from_dtensor for k in before), sharded)
    if shards:
        raise LocalInputsError(shards, where)
    return known


def _warn_of_whole_values(joint: fx.GraphModule, inputs: Mapping[str, GraphInput], meshes: Mapping[str, OnMesh]) -> None:
    """Warns of a ``to_local`` that the user wrote, if what is computed with it differs from what a rank computes in torch. One in torch's
    styles, which have no line, comes before code that is meant for whole values too."""
    tangents = [node for node in joint.graph.nodes if (end := inputs.get(node.name)) is not None and end.kind == "tangent"]
    backward = reached(tangents, lambda node: node.users)
    for node in joint.graph.find_nodes(op="call_function", target=HANDED_OUT):
        source: Any = node.args[0]
        end, line = inputs.get(source.name), source_line(node)
        if node.args[1] != "local" or node in backward:
            continue
        if end is not None and end.kind == "parameter" and end.name in meshes and meshes[end.name].sharded:
            text = "%s: to_local() of parameter %s is the whole parameter here, with the numbers of one device, and not this rank's shard"
            log.warning(text, line or _module(node), end.name)
        elif line and not _is_whole(node) and _is_computed_with(node, source.target is PLACED and not _is_pending(source), backward):
            text = "%s: what follows to_local() is computed with the whole value here, as on one device, and not with this rank's part"
            log.warning(text, line)


def _is_computed_with(node: fx.Node, sharded: bool, backward: Set[fx.Node], changed: bool = False) -> bool:
    """Whether a reader of ``node``, what a ``to_local`` gives or (``changed``) what elementwise operators make of it, has another result
    than in torch. Between ``to_local`` and ``from_local`` of a shard elementwise operators have the same."""
    for user in node.users:
        if user in backward or user.target in (PLACED, HANDED_OUT):
            continue
        if user.op == "output":
            differs = changed
        else:
            copies = user.target in COPIES
            elementwise = sharded and torch.Tag.pointwise in getattr(user.target, "tags", ())
            differs = not (copies or elementwise) or _is_computed_with(user, sharded, backward, changed or not copies)
        if differs:
            return True
    return False


def _declares_shard(node: fx.Node, before: _Known) -> bool:
    """Whether ``from_local`` takes a value that is whole on every rank as this rank's part."""
    layout, declared = node.args[1], node.args[3]
    parsed = canonical(Layout.parse(str(layout)), parse_mesh(str(node.args[2])).shape)
    if declared and parsed.has_partial and not before.dtensor:  # a style makes no shard of what is a DTensor
        raise _pending("from_local declares a partial sum", node)
    return bool(declared) and not parsed.is_replicated and not before.from_dtensor


def _is_pending(node: Any) -> bool:
    return node.target is PLACED and canonical(Layout.parse(str(node.args[1])), parse_mesh(str(node.args[2])).shape).has_partial


def _pending(what: str, node: fx.Node) -> TraceError:
    """The error for a sum over the ranks of ``node``, a ``placed`` one, that plain tensors would hold."""
    what += f" ({node.args[1]} on {node.args[2]}): each rank's own values are added up, and a plan has one whole value instead"
    remedy = "leave the value whole, or compute it in a local_map region; in a style, give Replicate() or Shard(...) in place of Partial()"
    return TraceError(what, where=_module(node) or source_line(node), remedy=remedy)


def _is_whole(node: fx.Node) -> bool:
    """Whether what is handed out of a DTensor is the same on all ranks in torch: ``full_tensor``, or ``to_local`` of a replicated one."""
    source: Any = node.args[0]
    if node.args[1] == "whole":
        return True
    return source.target is PLACED and canonical(Layout.parse(str(source.args[1])), parse_mesh(str(source.args[2])).shape).is_replicated


def _not_a_shard(node: fx.Node) -> TraceError:
    what = (
        f"from_local takes a value that is equal on all ranks as this rank's shard ({node.args[1]} on {node.args[2]}); torch would put the "
        "ranks' equal values one after the other"
    )
    remedy = "let what comes before it return such a shard (output_layouts= of its style), or declare it Replicate; an argument of the "
    remedy += "model may be a shard"
    return TraceError(what, where=source_line(node) or _module(node), remedy=remedy)


def _module(node: fx.Node) -> str | None:
    """The module in which a node was traced, for nodes without a line of the user's: those of a style. The first path is the model's."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return f"module {paths[-1].removeprefix(paths[0]).lstrip('.')}" if len(paths) > 1 else None


def _only_mesh(meshes: Mapping[str, OnMesh], node: fx.Node) -> str:
    """The mesh of the DTensors, if there is one."""
    axes = {one.axes for one in meshes.values()}
    if len(axes) != 1:
        what = "redistribute has no device_mesh, and the value comes from no DTensor"
        raise TraceError(what, where=source_line(node), remedy="pass device_mesh to redistribute")
    return axes.pop()


def placements_on(layout: str, axes: str) -> dict[str, Placement]:
    """``"S(1)"`` on ``"tp=4"`` as ``{"tp": Shard(1)}``."""
    return dict(zip(parse_mesh(axes).axis_names, Layout.parse(layout), strict=True))


def _form(node: fx.Node, name: str, known: Mapping[fx.Node, _Known]) -> OutputForm | None:
    """The form in which ``node`` is returned, None if whole. Raises TraceError for a shard in a layout that does not follow from those that
    the model names."""
    kind = "dtensor" if known[node].dtensor else str(node.args[1]) if node.target is HANDED_OUT else "whole"
    if kind == "whole":
        return None
    source = node.args[0] if node.target is HANDED_OUT else node
    assert isinstance(source, fx.Node)
    if source.target is PLACED:
        if _is_pending(source):
            raise _pending(f"{name} is returned as a pending sum", source)
        return OutputForm(kind, _placements(source))
    if kind == "local":
        axes = known[source].axes
        named = {n: tuple(_placements(n).values()) for n, k in known.items() if n.target is PLACED and k.axes == axes}
        names = set(parse_mesh(axes).axis_names)
        layout = followed(source, named, lambda value: known[value].dtensor, lambda value: not names.isdisjoint(known[value].sharded))
        if layout is None or any(p.is_partial() for p in layout):
            what = f"{name} is returned as the local shard of a DTensor whose layout the model does not name"
            raise TraceError(what, where=source_line(node), remedy="redistribute it to a layout before to_local, or return the DTensor")
        return OutputForm(kind, dict(zip(parse_mesh(axes).axis_names, layout, strict=True)))
    return OutputForm(kind)


def _placements(node: fx.Node) -> dict[str, Placement]:
    """The placements by axis of a ``placed`` node."""
    named = placements_on(*map(str, node.args[1:3])).items()
    return {axis: normalised_placement(p, node.meta["val"].dim(), node.name) for axis, p in named}


def named_specs(node: fx.Node, mesh: Mesh, specs: Sequence[OpSpec]) -> tuple[OpSpec, ...]:
    """The ``specs`` of a ``placed`` node in the layout that it names, in which it is read if rules do not offer it: they shard no dim of
    one element. Raises TraceError for a layout that it cannot have, or if the mesh lacks its axes."""
    wanted = _wanted(node, mesh)
    found = tuple(spec for spec in specs if all(spec.outputs[0][axis] == placement for axis, placement in wanted.items()))
    complete = wanted.keys() >= set(sharding_axes(mesh.shape))
    if not found and complete and not any(p.is_partial() for p in wanted.values()):
        layout = Layout([wanted.get(axis, Replicate()) for axis in range(mesh.ndim)])
        return (OpSpec((layout,), (layout,)),)
    if not found:
        what = f"a value of shape {tuple(node.meta['val'].shape)} cannot be {node.args[1]} on {node.args[2]}"
        raise TraceError(what, where=source_line(node), remedy="shard another dim, or replicate it")
    return found


def kept_specs(node: fx.Node, mesh: Mesh, specs: Sequence[OpSpec]) -> tuple[OpSpec, ...]:
    """The ``specs`` of a node that read values which are kept in a layout (``placed``) in it, where they can: for another operator
    the value is redistributed, as eager DTensor does. All of them if no value is kept."""
    sources = [producer(operand)[0] for operand in operands(node)]
    kept = [(i, _wanted(one, mesh)) for i, one in enumerate(sources) if one.target is PLACED and one.args[4:] == (True,)]
    found = tuple(s for s in specs if all(s.inputs[i][axis] == p for i, wanted in kept for axis, p in wanted.items()))
    return found or tuple(specs)


def _wanted(node: fx.Node, mesh: Mesh) -> dict[int, Placement]:
    layout, axes = node.args[1:3]
    named = placements_on_mesh(node, str(layout), str(axes), mesh, "the model redistributes for")
    try:
        return {mesh.axis(axis): normalised_placement(p, node.meta["val"].dim(), node.name) for axis, p in named.items()}
    except LayoutError as error:
        raise TraceError(error.what, where=source_line(node), remedy="name a dim that the tensor has") from error


def placements_on_mesh(node: fx.Node, layout: str, axes: str, mesh: Mesh, who: str) -> dict[str, Placement]:
    """``placements_on`` axes of several ranks; raises TraceError, worded with ``who``, unless the planning mesh has these axes."""
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    own = parse_mesh(axes)
    if any(sizes.get(name) != size for name, size in zip(own.axis_names, own.shape, strict=True)):
        what = f"{who} the mesh {axes}, the plan for {mesh}"
        raise TraceError(what, where=source_line(node), remedy="plan on a mesh whose axes have these names and sizes")
    return {name: p for name, p in placements_on(layout, axes).items() if sizes[name] > 1}
