"""Capture repeated modules once: a call of a module that is equivalent to a traced one becomes a single node.

Dynamo's guards decide equivalence: those on everything that the first call read, evaluated on the second module.

What would replace it: ``torch.compiler.nested_compile_region``, once it takes training steps and regions with side effects (decision 0035).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fxshard._torch_compat.sizes.symbols import expression, plain


@dataclass
class Traced:
    """A traced call. module: its name; read: nodes of its tensor arguments; nodes: the nodes of its body; given: nodes of its results.

    calls: number of equivalent calls. asked: checks equivalence. made: structure, variables and example values of the results.
    Dynamo renames a node when a variable holds it, so names are valid only after the capture.
    """

    module: str
    read: list[Any]
    nodes: list[Any]
    given: list[Any]
    calls: int = 0
    asked: Any = None
    made: Any = None


@dataclass
class Repeats:
    """The result of a capture. ``refused``: the reasons why candidates were traced separately, in order."""

    traced: list[Traced] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


MOST = 3
"""The most traced calls of a group; if layers differ that much, comparing costs more than it saves."""


def repeat(number: int, module: str, *read: Any) -> Any:
    """Stands in a captured graph for a call of ``module`` that is equivalent to traced call ``number``; never executed."""
    raise AssertionError("a repeat node was executed")


class Unlike(Exception):
    """The reason why a call cannot represent others, or is not equivalent to a traced one."""


HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a module or a submodule has hooks, on which there are no guards."""
    return any(getattr(part, kind) for part in module.modules() for kind in HOOKS)


def order_tensors(module: torch.nn.Module, place: Callable[[str], int]) -> None:
    """Reorder a module's own parameters and buffers by ``place`` of their names."""
    for held in (module._parameters, module._buffers):
        for name in sorted(held, key=place):
            held[name] = held.pop(name)


@contextlib.contextmanager
def repeats_of(candidates: Mapping[int, tuple[Hashable, str]]) -> Iterator[Repeats]:
    """Within it, calls of equivalent modules become ``repeat`` nodes. ``candidates``: (group, name) of modules by id."""
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable as Called

    found = Repeats()
    known: dict[Hashable, list[Traced]] = {}
    original = Called.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        group, name = candidates.get(id(self.value), (None, ""))
        if group is None or tx.output.current_tracer is not tx.output.root_tracer:
            return original(self, tx, args, kwargs)
        try:
            given = _given(tx, args, kwargs)
        except Unlike as why:
            found.refused.append(f"{name}: {why}")
            return original(self, tx, args, kwargs)
        for one in known.get(group, ()):
            try:
                one.asked(self, tx, given)
            except Unlike as why:
                found.refused.append(f"{name}: {why}")
                continue
            one.calls += 1
            return _stamped(tx, found.traced.index(one), name, one, given)
        if len(known.get(group, ())) == MOST:
            return original(self, tx, args, kwargs)
        before, changed = set(tx.output.graph.nodes), _changes(tx)
        reads, tx.output.root_tracer.traced_sources = tx.output.root_tracer.traced_sources, type(tx.output.root_tracer.traced_sources)()
        result = original(self, tx, args, kwargs)
        sources, tx.output.root_tracer.traced_sources = tx.output.root_tracer.traced_sources, reads
        reads.update(sources)
        try:
            if changed != _changes(tx):
                raise Unlike("its forward changes Python objects")
            one = _traced(self, tx, name, given, [n for n in tx.output.graph.nodes if n not in before], sources, result)
            known.setdefault(group, []).append(one)
            found.traced.append(one)
        except Unlike as why:
            found.refused.append(f"{name}: {why}")
        return result

    Called.call_function = call_function
    try:
        yield found
    finally:
        Called.call_function = original


def _given(tx: Any, args: Any, kwargs: Any) -> tuple[Hashable, list[Any]]:
    """(structure of the arguments with constants and metadata, their tensors); raises Unlike for arguments of other kinds."""
    tensors: list[Any] = []
    look = _look((list(args), dict(kwargs)), tensors)
    nodes = [t.as_proxy().node for t in tensors]
    same = tuple(nodes.index(n) for n in nodes)
    return (look, same, tuple(_meta(n.meta["example_value"]) for n in nodes), _state(tx), _changes(tx)), tensors


def _look(value: Any, tensors: list[Any], numbers: bool = True) -> Hashable:
    """The structure of arguments or results; appends their tensors to ``tensors``. ``numbers``: whether symbolic numbers are accepted."""
    from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, ListVariable, SymNodeVariable, TensorVariable, TupleVariable

    if isinstance(value, LazyVariableTracker):
        value = value.realize()
    if isinstance(value, (list, tuple)):
        return tuple(_look(v, tensors, numbers) for v in value)
    if isinstance(value, dict):
        return tuple((k, _look(v, tensors, numbers)) for k, v in value.items())
    if type(value) is TensorVariable:
        if type(value.as_proxy().node.meta.get("example_value")) is not _fake():
            raise Unlike("it takes a tensor of a special kind")
        tensors.append(value)
        return "tensor"
    if isinstance(value, ConstantVariable):
        return type(value.value), repr(value.value)
    if type(value) is SymNodeVariable and numbers:  # equal expressions, so that the first call's trace is valid
        return "symbol", expression(value.as_proxy().node.meta["example_value"])
    if type(value) in (ListVariable, TupleVariable):
        return type(value), tuple(_look(v, tensors, numbers) for v in value.items)
    raise Unlike(f"it takes or returns {value.python_type_name()}")


@functools.cache
def _fake() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def _meta(value: torch.Tensor) -> Hashable:
    """A tensor's metadata, with sizes as expressions: comparing symbols would add guards."""
    strided = value.layout == torch.strided
    numbers = (*value.shape, *value.stride(), value.storage_offset()) if strided else value.shape
    sizes = tuple(map(plain, numbers))
    return sizes, value.dtype, value.layout, value.requires_grad, value.is_leaf, strided and value._is_view()


def _state(tx: Any) -> Hashable:
    """Global state that affects a trace besides arguments and attributes, and the calling lines."""
    kinds = ("cpu", "cuda")
    lines = []
    frame = tx
    while frame is not None:
        summary = frame.frame_summary()
        lines.append((summary.filename, summary.lineno))
        frame = getattr(frame, "parent", None)
    casts = tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
    modes = len(tx.symbolic_torch_function_state.mode_stack), torch.are_deterministic_algorithms_enabled()
    saved = torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts, torch.get_default_dtype(), modes, saved, tuple(lines)


def _changes(tx: Any) -> Hashable:
    """The side effects of the capture so far: changed Python objects, hooks, and the number of Python's random draws."""
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationExisting, VariableTracker

    effects, held = tx.output.side_effects, list[Any]()
    for item, values in effects.store_attr_mutations.items():
        if not isinstance(item.mutation_type, AttributeMutationNew):  # not objects made during the capture
            held.append(item)
            VariableTracker.visit(held.append, dict(values), side_effects=effects)
    for item in effects.id_to_variable.values():
        if isinstance(item.mutation_type, ValueMutationExisting) and item.mutation_type.is_modified:
            VariableTracker.visit(held.append, item, side_effects=effects)
    return _Same(held), len(effects.save_for_backward), len(effects.tensor_hooks), len(tx.output.random_calls)


class _Same:
    """Compares lists of objects by identity; holds the objects, so that no id is reused."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and list(map(id, self.held)) == list(map(id, other.held))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.held)))


def _traced(self: Any, tx: Any, name: str, given: Any, nodes: list[Any], sources: Any, result: Any) -> Traced:
    from torch._dynamo.variables.invoke_subgraph import InputFingerprint, build_reuse_condition, classify_vt

    key, tensors = given
    if self.source is None:
        raise Unlike("Dynamo does not know where it comes from")
    outputs: list[Any] = []
    look = _look([result], outputs, numbers=False)
    metas = [o.as_proxy().node.meta["example_value"] for o in outputs]
    try:
        condition = build_reuse_condition(tx, InputFingerprint([(classify_vt(self), self)], [self.source]), sources)
    except Exception as error:
        raise Unlike(str(error)) from None
    one = Traced(name, [t.as_proxy().node for t in tensors], nodes, [o.as_proxy().node for o in outputs])
    inside = [s for s in sources if s.name.startswith(self.source.name)]
    known_to_move: list[bool] = []

    def asked(other: Any, tx: Any, given: Any) -> None:
        if given[0] != key:
            raise Unlike(f"arguments or the call are others than those of {name}")
        if type(other.value) is not type(self.value) or other.source is None:
            raise Unlike(f"it is of another class than {name}")
        there = _There(self.source, other.source)
        if not known_to_move and any(there.of(s) == s for s in inside):
            raise Unlike("Dynamo names its attributes in a way that cannot be translated")
        known_to_move.append(True)
        if not _holds(tx, condition, there):
            raise Unlike(f"attributes that the forward reads are others than those of {name}")

    one.asked, one.made = asked, (look, result, metas)
    return one


class _There:
    """Translates Dynamo's sources of what the first call read to the other module.

    As ``Source.clone``, but memoised: sources share prefixes and have a dozen parts.
    """

    def __init__(self, here: Any, there: Any) -> None:
        self.known: dict[Any, Any] = {here: there}

    def of(self, source: Any) -> Any:
        """The translated source; ``source`` itself if it does not start at the first module."""
        from torch._guards import ChainedSource, Source

        found = self.known.get(source)
        if found is None:
            found = source
            if isinstance(source, ChainedSource):
                held = {f.name: value for f in dataclasses.fields(source) if isinstance(value := getattr(source, f.name), Source)}
                moved = {name: self.of(value) for name, value in held.items()}
                if any(moved[name] is not value for name, value in held.items()):
                    found = dataclasses.replace(source, **moved)
            self.known[source] = found
        return found


def _holds(tx: Any, condition: Any, there: _There) -> bool:
    """Whether the guards of a condition hold for another module, and nothing that they read was mutated: torch's ``is_reusable``."""
    from torch._dynamo.variables.invoke_subgraph import has_mutated_vars
    from torch.utils._ordered_set import OrderedSet

    if has_mutated_vars(tx, OrderedSet(map(there.of, condition.traced_sources))):
        return False
    root, found, values = tx.output.root_tx, dict[str, Any](), dict[Any, Any]()
    names = {"G": root.f_globals, "L": root.f_locals}
    for source, handler, expected, _ in condition.guards:
        moved = there.of(source)
        if moved == source:
            continue
        try:
            value = moved.get_value(names, found, values)
        except Exception:
            return False
        if not handler.eval_fn(value, expected):
            return False
    return True


def _stamped(tx: Any, number: int, name: str, one: Traced, given: Any) -> Any:
    """Create the ``repeat`` node; returns its results in the structure of the traced call's results."""
    import operator

    from torch._dynamo.variables.builder import wrap_fx_proxy

    _, result, metas = one.made
    call = tx.output.create_proxy("call_function", repeat, (number, name, *(t.as_proxy() for t in given[1])), {})
    outputs = []
    passed = {node: tensor for node, tensor in zip(one.read, given[1], strict=True)}
    for k, value in enumerate(metas):
        if one.given[k] in passed:
            outputs.append(passed[one.given[k]])
            continue
        with tx.fake_mode:
            alike = value.clone() if value.requires_grad or torch.is_grad_enabled() else value.detach().clone()
        proxy = tx.output.create_proxy("call_function", operator.getitem, (call, k), {})
        outputs.append(wrap_fx_proxy(tx, proxy, example_value=alike))
    return _rebuilt(result, iter(outputs))


def _rebuilt(value: Any, outputs: Iterator[Any]) -> Any:
    from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable

    if isinstance(value, LazyVariableTracker):
        value = value.realize()
    if type(value) is TensorVariable:
        return next(outputs)
    if isinstance(value, ConstantVariable):
        return value
    return type(value)([_rebuilt(v, outputs) for v in value.items], mutation_type=value.mutation_type and _new())


def _new() -> Any:
    from torch._dynamo.variables.base import ValueMutationNew

    return ValueMutationNew()
