"""Finds the attributes of modules that a forward changes, and describes them as ``fxshard.graph.side_effects``.

Dynamo reports whether a forward changes anything. If so, a copy of the model runs as Python on fakes; its modules record which attributes
are read before they are set (attribute_tracking.py). An attribute that is set but not read before does not influence the program.
Integers that are read before are replaced by symbols in a second run. If no guard and no operator depends on a symbol, it does not
influence the program either, and its new value is an expression. Any other attribute read before it is set is an assumption of the trace.
Tensors that the forward assigns become further outputs of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import sympy
import torch
from torch import nn

from fxshard._torch_compat import pytree
from fxshard._torch_compat.sizes.symbols import SYMBOLIC, expression, quiet_symbols, symbol_of
from fxshard.graph.objects import LISTS, MAPPINGS, Flattener, ObjectState, Step, ValueSpec, is_openable
from fxshard.graph.side_effects import Attribute, Number, SideEffects, Write
from fxshard.passes.trace.fakes.fake_model import Call
from fxshard.passes.trace.python_state.attribute_tracking import AttributeRecord, RecordedDict, RecordedList, recording
from fxshard.passes.trace.python_state.dynamo_changes import hooked_by_torch, log_changes, own_changes
from fxshard.passes.trace.python_state.objects import FIXED

T = TypeVar("T")
Marks = dict[Attribute, torch.SymInt]
"""Integers that are replaced by symbols in a run."""


class TracedSideEffects:
    """The attributes that a traced call changes. ``written``: attributes that other calls set; ``changed``: the objects that Dynamo saw
    changing; ``fixed``: tensor attributes whose values are constants in the graph."""

    def __init__(self, call: Call, observe: bool, written: Collection[Attribute]) -> None:
        self.call, self.observe, self.written = call, observe, frozenset(written)
        self.changed: tuple[str, ...] = ()
        self.found: SideEffects | None = None
        self.searched = False
        self.fixed = frozenset[Attribute]()

    def settle(self, capture: Callable[[], T]) -> T:
        """Captures, finds the side effects, and captures again if the graph must return tensors for them. Logs changes that cannot be
        replayed."""
        result = capture()
        if self.searched:
            return result
        own = own_changes(self.changed, self.call.model)
        followed = {(name, "") for name, plain in hooked_by_torch(self.call.model) if plain}
        if self.observe and (own or self.written):
            self.searched = True
            self.found, known = _find_side_effects(self.call, [(path, name) for path, name in own if name], self.written)
            followed |= known
        log_changes(self.call.model, self.changed, followed)
        return capture() if self.found is not None and self.found.reads else result

    def around(self, root: nn.Module, model: nn.Module) -> nn.Module:
        """``root``, which calls ``model``, with the assigned values as a further result."""
        return root if self.found is None or not self.found.reads else ReturningSideEffects(root, [*model.modules()], self.found.reads)


class ReturningSideEffects(nn.Module):
    """A model that also returns the values that it assigns to attributes."""

    def __init__(self, model: nn.Module, modules: list[nn.Module], reads: Sequence[tuple[int, tuple[Step, ...]]]) -> None:
        super().__init__()
        self.model, self.parts, self.reads = model, modules, reads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.model(*args, **kwargs)
        found = []
        for place, steps in self.reads:
            value: Any = self.parts[place]
            for how, key in steps:
                value = getattr(value, key) if how == "attr" else value[key]
            found.append(value)
        return result, found


Followed = set[tuple[str, str]]
"""Attributes whose changes can be replayed: (module, name), as from ``own_changes``."""


def _find_side_effects(
    call: Call, containers: Sequence[tuple[str, str]], written: frozenset[Attribute]
) -> tuple[SideEffects | None, Followed]:
    """(the side effects of a call, the attributes that they cover); (None, empty) if the model does not run on fakes."""
    names = [name for name, _ in call.model.named_modules()]
    held = {(names.index(path), name) for path, name in containers if path in names}
    for these in (held, set[Attribute]()) if held else (set[Attribute](),):
        try:
            plain = _run(call, these, {})
            while these and plain.refused & these:
                these = these - plain.refused
                plain = _run(call, these, {})
            break
        except Exception:
            continue
    else:
        return None, set()
    numbers = {a: v for a, v in plain.counted.items() if a in plain.read}
    marked = plain
    while numbers:
        try:
            marked = _run(call, these, numbers)
        except Exception:
            numbers = {}
            break
        lost = marked.used & numbers.keys() | (numbers.keys() if not marked.like(plain) else set())
        if not lost:
            break
        numbers = {a: v for a, v in numbers.items() if a not in lost}
    found = marked if numbers else plain
    known = {*found.writes, *written}
    read = (known & found.read) - numbers.keys()
    lines = {a: w.where for a, w in found.writes.items()}
    said = tuple((a, _path(names[a[0]], a[1]), lines.get(a, "")) for a in sorted(read))
    reads = tuple(reached for reached, v in zip(found.reached, found.values, strict=True) if isinstance(v, int))
    writes = tuple(found.writes[a] for a in sorted(found.writes))
    effects = SideEffects(writes, found.nodes, found.values, reads, frozenset(known - read), said)
    by_hooks = {(names[place], name) for place, name in these if (place, name) not in found.writes.keys() | found.refused}
    unclear = {place for place, _ in found.refused} | found.unexplained
    followed = {(names[w.place], name) for w in writes for name in (w.name, *([""] if w.place not in unclear else ()))}
    by_torch = {(name, "") for name, _ in hooked_by_torch(call.model) if names.index(name) not in unclear}
    return effects, by_hooks | by_torch | followed


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


@dataclass(frozen=True)
class _Run:
    """One run on fakes. ``writes``: attributes that are set; ``refused``: those whose changes cannot be replayed, not in ``writes``;
    ``values``, ``reached``: the assigned values that are not constants, and how to reach them; ``counted``: integers that changed, as they
    were before; ``used``: attributes whose symbol influences the program; ``numbers``: attributes set to a symbolic number;
    ``unexplained``: modules with attributes that changed unobserved."""

    writes: Mapping[Attribute, Write]
    nodes: tuple[ObjectState, ...]
    values: tuple[int | Number, ...]
    reached: tuple[tuple[int, tuple[Step, ...]], ...]
    read: frozenset[Attribute]
    counted: Mapping[Attribute, int]
    used: frozenset[Attribute]
    refused: frozenset[Attribute]
    numbers: frozenset[Attribute]
    unexplained: frozenset[int]

    def like(self, other: _Run) -> bool:
        """Whether both have the same side effects, apart from values that are symbolic numbers in this run."""
        plain = [{a: (w.form, w.keys, None if a in self.numbers else w.parts) for a, w in one.writes.items()} for one in (self, other)]
        return plain[0] == plain[1] and self.nodes == other.nodes and self.read == other.read


def _run(call: Call, held: Collection[Attribute], numbers: Mapping[Attribute, int]) -> _Run:
    twin = call.twin()
    env = twin.symbols.env
    args, kwargs = pytree.tree_unflatten(twin.leaves, twin.spec)
    marks: Marks = {(place, name): env.number(f"before_{place}_{name}", value) for (place, name), value in numbers.items()}
    fresh = env.shape_env.ignore_fresh_unbacked_symbols()
    with quiet_symbols(), twin.mode, fresh, torch.random.fork_rng(devices=[]), recording(twin.model, held, marks) as noted:
        result = twin.model(*args, **kwargs)
        noted.mark_used(result)
    return _Reading(call, noted, marks, {name: symbol_of(value) for name, value in env.known.items()}).run()


class _Reading:
    """Builds a ``_Run`` from its ``AttributeRecord``."""

    def __init__(self, call: Call, noted: AttributeRecord, marks: Marks, sizes: Mapping[str, sympy.Symbol]) -> None:
        self.noted, self.marks = noted, {a: symbol_of(value) for a, value in marks.items()}
        self.sizes, self.walk = sizes, Flattener()
        self.names = [name for name, _ in call.model.named_modules()]
        self.used = noted.used

    def run(self) -> _Run:
        writes, counted, refused = {}, {}, set()
        states = [vars(module) for module in self.noted.modules]
        numbers = frozenset((place, name) for place, name in self.noted.writes if isinstance(states[place].get(name), SYMBOLIC))
        for (place, name), line in sorted(self.noted.writes.items(), key=lambda w: (w[0] in numbers, w[0])):
            before, after = self.noted.before[place], states[place]
            if name not in after:  # a property, or deleted again
                continue
            old, new = before.get(name), after[name]
            found = self._write(place, name, line, old, new)
            if found is None:
                refused.add((place, name))
                continue
            writes[place, name] = found
            if type(old) is int and (isinstance(new, torch.SymInt) or (type(new) is int and old != new)):
                counted[place, name] = old
        free = set().union(*(expression(v).free_symbols for v in self.walk.tensors if isinstance(v, SYMBOLIC)))
        asked = {a for a, s in self.marks.items() if s in self.used or self.noted.is_guarded(s)}
        outputs = iter(range(len(self.walk.tensors)))
        values = tuple(self._number(v) if isinstance(v, SYMBOLIC) else next(outputs) for v in self.walk.tensors)
        strange = {a for a, s in self.marks.items() if s in free - self.sizes_of(values)}
        nodes = tuple(node for node in self.walk.nodes if node is not None)
        read = frozenset(self.noted.reads)
        used, unclear = frozenset(asked | strange), frozenset(filter(self._is_unclear, range(len(states))))
        return _Run(writes, nodes, values, tuple(self.walk.reached), read, counted, used, frozenset(refused), numbers, unclear)

    def _is_unclear(self, place: int) -> bool:
        """Whether attributes of the module changed although no assignment was recorded."""
        before, after = self.noted.before[place], vars(self.noted.modules[place])
        other = {name for name in {*before, *after} if name not in before or name not in after or before[name] is not after[name]}
        return any((place, name) not in self.noted.writes.keys() | self.noted.held.keys() for name in other)

    def sizes_of(self, values: Sequence[int | Number]) -> set[sympy.Symbol]:
        return {s for v in values if isinstance(v, Number) for _, s in (*v.sizes, *v.before)}

    def _number(self, value: Any) -> Number:
        found = expression(value)
        sizes = tuple((name, s) for name, s in sorted(self.sizes.items()) if s in found.free_symbols)
        return Number(found, sizes, tuple((a, s) for a, s in sorted(self.marks.items()) if s in found.free_symbols))

    def _write(self, place: int, name: str, line: str, old: Any, new: Any) -> Write | None:
        """The write of one attribute; None if it cannot be replayed: a list or object that was read, or an opaque value."""
        path = _path(self.names[place], name)
        if isinstance(new, RecordedList | RecordedDict):
            if new.read:
                return None
            found = new.added()
            pairs = found if isinstance(new, RecordedDict) else zip(range(-len(found), 0), found, strict=True)
            items = {k: self._part(v, f"{path}[{k!r}]", place, (("attr", name), ("item", k))) for k, v in pairs}
            form = "items" if isinstance(new, RecordedDict) else "replace" if new.fresh else "append"
            kept = tuple(part for part in items.values() if part is not None)
            return Write(place, name, path, line, form, kept, tuple(items)) if len(kept) == len(items) else None
        if (place, name) in self.noted.reads and (_is_deep(old) or _is_deep(new)):
            return None
        part = self._part(tuple(new) if type(new) is torch.Size else new, path, place, (("attr", name),))
        return None if part is None else Write(place, name, path, line, "set", (part,))

    def _part(self, value: Any, path: str, place: int, steps: tuple[Step, ...]) -> ValueSpec | None:
        """The part for a value; None if it contains an opaque object, which would belong to the copy that ran."""
        kept: dict[str, Any] = {name: list(getattr(self.walk, name)) for name in _LISTS}
        walk = replace(self.walk, **kept, seen=dict(self.walk.seen))
        part = walk.part(value, path, place, steps)
        nodes = [node for node in walk.nodes[len(self.walk.nodes) :] if node is not None]
        if any(map(_is_foreign, (q for p in (part, *(p for node in nodes for p in node.parts)) for q in _inner(p)))):
            return None
        self.walk = walk
        return part


_LISTS = ("tensors", "paths", "reached", "nodes", "objects", "places")


def _inner(part: ValueSpec) -> list[ValueSpec]:
    return [part, *(q for p in part[-1] for q in _inner(p))] if part[0] in ("tuple", "tree") else [part]


def _is_foreign(part: ValueSpec) -> bool:
    return part[0] == "held" and not isinstance(part[1].value, FIXED)


def _is_deep(value: Any) -> bool:
    """Whether it is a container or object, whose parts may be read separately."""
    return type(value) in LISTS or type(value) in MAPPINGS or is_openable(type(value)) or isinstance(value, tuple | set)
