"""Tensor subclasses among the arguments and results of a graph: the graph that is planned takes and returns the tensors that they hold.

This is for classes with ``__tensor_flatten__`` (quantised weights, pairs of tensors): their ``__torch_dispatch__`` runs while the graph is
traced, and the plan is of what it calls. A call takes its arguments apart and puts its results together, differentiably.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from fxshard._torch_compat import pytree
from fxshard._torch_compat.dynamo.capture import dynamo_source
from fxshard._torch_compat.fakes import is_traceable_wrapper_subclass
from fxshard._torch_compat.sizes.symbols import hint_of
from fxshard.errors import RunError, TraceError
from fxshard.passes.trace.fakes.tensor_kinds import OURS

Graph = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Sequence[Any]]]
"""Compiles a graph for arguments like these."""


@dataclass(frozen=True)
class Wrapped:
    """A tensor of class ``kind``: the names of the tensors that it holds, how each of these is wrapped (None for a plain one), and its
    ``context``, size and strides, as of ``__tensor_flatten__`` and ``__tensor_unflatten__``. ``like``: if its size is open, the first of
    the plain tensors that it holds with the same size."""

    kind: Any
    names: tuple[str, ...]
    parts: tuple[Wrapped | None, ...]
    context: Any
    shape: torch.Size
    strides: tuple[int, ...]
    like: int | None = None

    @classmethod
    def of(cls, value: Any) -> Wrapped | None:
        """How ``value`` is wrapped; None if it is no tensor that holds others, or one that plans know."""
        if not is_traceable_wrapper_subclass(value) or isinstance(value, OURS) or value.is_nested:
            return None
        names, context = value.__tensor_flatten__()
        parts = tuple(cls.of(getattr(value, name)) for name in names)
        found = cls(type(value), tuple(names), parts, context, value.shape, value.stride())
        return replace(found, like=_alike(value, found.held(value))) if _is_open(value) else found

    @property
    def paths(self) -> list[str]:
        """The attributes that lead to each plain tensor: ``a``, ``b.scale``."""
        inner = zip(self.names, self.parts, strict=True)
        return [path for name, part in inner for path in ([name] if part is None else [f"{name}.{p}" for p in part.paths])]

    def held(self, value: Any) -> list[Tensor]:
        """The plain tensors of ``value``, which has the form of this one."""
        found: list[Tensor] = []
        for name, part in zip(self.names, self.parts, strict=True):
            one = getattr(value, name)
            found += [one] if part is None else part.held(one)
        return found

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The tensor that holds ``tensors``."""
        tensors = list(tensors)
        rest = iter(tensors)
        inner = {
            n: next(rest) if p is None else p.build([next(rest) for _ in p.paths]) for n, p in zip(self.names, self.parts, strict=True)
        }
        shape, strides = (self.shape, self.strides) if self.like is None else (tensors[self.like].shape, tensors[self.like].stride())
        return self.kind.__tensor_unflatten__(inner, self.context, shape, strides)


def _is_open(value: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in value.shape)


def _example_shape(value: Tensor) -> list[int]:
    return [hint_of(size) if isinstance(size, torch.SymInt) else size for size in value.shape]


def _alike(value: Tensor, held: Sequence[Tensor]) -> int:
    """The first of ``held`` with the size of ``value``, whose size is open."""
    for i, tensor in enumerate(held):
        if _example_shape(tensor) == _example_shape(value):  # Dynamo gives each its own symbol
            return i
    what = f"a {type(value).__name__} of shape {tuple(value.shape)} changes its size from call to call, and holds no tensor of that size"
    raise TraceError(what, remedy="compile with dynamic=False, or use the tensors that it holds")


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Wrapped, value: Any) -> tuple[Tensor, ...]:
        ctx.form = form
        return tuple(tensor.detach() for tensor in form.held(value))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, ctx.form.build(grads)


class _Built(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Wrapped, *tensors: Tensor) -> Any:
        ctx.form = form
        return form.build(tensors)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        if type(grad) is not ctx.form.kind:
            what = f"the gradient of a {ctx.form.kind.__name__} is a {type(grad).__name__}"
            raise RunError(what, remedy=f"pass a {ctx.form.kind.__name__} to backward")
        return None, *ctx.form.held(grad)


def with_tensor_classes(module: fx.GraphModule, examples: Sequence[Any], compiled: Graph) -> Callable[..., Sequence[Any]] | None:
    """What runs a Dynamo graph that takes or returns tensor subclasses, with the graph of plain tensors as ``compiled`` makes it.

    None for a graph without them. Raises TraceError for a subclass of open size that holds no tensor of this size.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    taken = [Wrapped.of(node.meta.get("example_value")) for node in placeholders]
    leaves, spec = pytree.tree_flatten(graph.output_node().args[0])
    given = [Wrapped.of(leaf.meta.get("example_value")) if isinstance(leaf, fx.Node) else None for leaf in leaves]
    if not any((*taken, *given)):
        return None
    for node, form in zip(placeholders, taken, strict=True):
        if form is not None:
            _take_apart(graph, node, form)
    parts: list[Any] = []
    for leaf, form in zip(leaves, given, strict=True):
        parts += [leaf] if form is None else _parts(graph, leaf, form)
    graph.output_node().args = (tuple(parts),)
    plain = fx.GraphModule(module, graph)
    plain.compile_subgraph_reason = getattr(module, "compile_subgraph_reason", None)
    run = compiled(plain, _flat(taken, examples))

    def call(*args: Any) -> Any:
        rest = iter(run(*_flat(taken, args)))
        return pytree.tree_unflatten(
            [next(rest) if form is None else _Built.apply(form, *(next(rest) for _ in form.paths)) for form in given], spec
        )

    return call


def _flat(forms: Sequence[Wrapped | None], args: Sequence[Any]) -> list[Any]:
    """Arguments, with the plain tensors that they hold."""
    found: list[Any] = []
    for form, arg in zip(forms, args, strict=True):
        if form is None:
            found.append(arg)
            continue
        held = _Held.apply(Wrapped.of(arg), arg)
        if form.like is not None and not _is_open(arg) and held[form.like].shape != arg.shape:
            what = f"a {form.kind.__name__} of shape {tuple(arg.shape)} holds a tensor of shape {tuple(held[form.like].shape)}"
            raise RunError(what, remedy="the two were equal when the function was compiled: compile with dynamic=False")
        found += held
    return found


def _take_apart(graph: fx.Graph, node: fx.Node, form: Wrapped) -> None:
    """Replaces a placeholder by those of the tensors that it holds, from which a call builds it again."""
    source, _ = dynamo_source(node)
    inner = []
    with graph.inserting_before(node):
        for path, value in zip(form.paths, form.held(node.meta["example_value"]), strict=True):
            new = graph.placeholder(f"{node.name}_{path.replace('.', '_')}")
            named = SimpleNamespace(source=SimpleNamespace(name=f"{source or node.name}.{path}"))
            new.meta = {"example_value": value, "grapharg": named}
            inner.append(new)

    def built(*tensors: Tensor) -> Any:
        return _Built.apply(form, *tensors)

    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        new = graph.call_function(built, tuple(inner))
    new.meta = {key: value for key, value in node.meta.items() if key != "grapharg"}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _parts(graph: fx.Graph, leaf: fx.Node, form: Wrapped) -> list[fx.Node]:
    """The tensors that a result holds, as results."""

    def held(value: Any) -> tuple[Tensor, ...]:
        return _Held.apply(form, value)

    with graph.inserting_before(graph.output_node()):
        every = graph.call_function(held, (leaf,))
        parts = [graph.call_function(_item, (every, i)) for i in range(len(form.paths))]
    for part, value in zip(parts, form.held(leaf.meta["example_value"]), strict=True):
        part.meta = {**{k: v for k, v in leaf.meta.items() if k != "grapharg"}, "example_value": value}
    return parts


def _item(values: Sequence[Tensor], index: int) -> Tensor:
    return values[index]
