"""Instruments modules to record which attributes a forward sets, which it reads before setting them, and which symbols it uses."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxshard._torch_compat import TorchDispatchMode, pytree
from fxshard._torch_compat.sizes.symbols import SYMBOLIC, expression, is_settled, noted_guards
from fxshard.graph.side_effects import Attribute


class AttributeRecord:
    """The record of one run. ``before``: the attributes of ``modules`` before it; ``writes``: attributes that were set, with the line;
    ``reads``: attributes that were read before they were set; ``used``: symbols that operators took or that the call returned; ``held``:
    lists and dicts whose changes are recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [*model.modules()]
        self.before: list[dict[str, Any]] = [dict(vars(module)) for module in self.modules]
        self.writes: dict[Attribute, str] = {}
        self.reads: set[Attribute] = set()
        self.used: set[sympy.Symbol] = set()
        self.held: dict[Attribute, RecordedList | RecordedDict] = {}
        self.env: Any = None

    def mark_used(self, values: Any) -> None:
        """Marks the symbols in ``values`` as used."""
        for leaf in pytree.tree_leaves(values):
            if isinstance(leaf, SYMBOLIC):
                self.used |= expression(leaf).free_symbols

    def is_guarded(self, symbol: sympy.Symbol) -> bool:
        """Whether a guard depends on a symbol."""
        return is_settled(symbol, self.env) or any(symbol in expr.free_symbols for expr, _ in noted_guards(self.env))

    def instrument(self, place: int) -> None:
        """Instruments the module at index ``place`` by changing its class to a subclass that records accesses."""
        module, noted = self.modules[place], self
        kind: Any = type(module)

        def getting(this: Any, name: str) -> Any:
            if (place, name) not in noted.writes and (place, name) not in noted.held:
                noted.reads.add((place, name))
            return kind.__getattribute__(this, name)

        def setting(this: Any, name: str, value: Any) -> None:
            if value is not noted.held.get((place, name), noted):
                noted.writes.setdefault((place, name), _line())
            kind.__setattr__(this, name, value)

        methods = {"__getattribute__": getting, "__setattr__": setting, "__module__": kind.__module__}
        module.__class__ = _derived(kind, methods)

    def restore(self) -> None:
        """Restores the modules' classes, and adds lists and dicts that were changed or read to the record."""
        for place, module in enumerate(self.modules):
            module.__class__ = type(module).__base__
            known = (*vars(module).get("_parameters", ()), *vars(module).get("_buffers", ()), *vars(module).get("_modules", ()))
            for name in [n for p, n in self.writes if p == place and n in known]:
                del self.writes[place, name]
        done: set[int] = set()
        for attribute, held in self.held.items():
            if held.read:
                self.reads.add(attribute)
            if held.line and id(held) not in done:
                done.add(id(held))
                self.writes.setdefault(attribute, held.line)


class _Unannounced:
    """Precedes the user's class in the MRO, so that the ``__init_subclass__`` of that class is not called."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


def _derived(kind: Any, methods: Mapping[str, Any]) -> Any:
    """A subclass of ``kind`` with further ``methods``, made without calling its ``__init_subclass__`` or its metaclass's code."""

    def mro(cls: Any) -> Any:
        own, *others = type.mro(cls)
        return (own, _Unannounced, *others)

    quiet: Any = type.__new__(type, type(kind).__name__, (type(kind),), {"mro": mro})
    return type.__new__(quiet, kind.__name__, (kind,), dict(methods))


@contextlib.contextmanager
def recording(model: nn.Module, held: Collection[Attribute], marks: Mapping[Attribute, torch.SymInt]) -> Iterator[AttributeRecord]:
    """Records the attributes of ``model``, which must be a copy, while it is called. ``held``: lists and dicts whose changes are recorded
    item by item; ``marks``: symbols to replace integers."""
    for place, module in enumerate(model.modules()):
        vars(module).update({name: value for (where, name), value in marks.items() if where == place})
    noted = AttributeRecord(model)
    noted.env = next((value.node.shape_env for value in marks.values()), None)
    for place, name in held:
        kind = _KINDS.get(type(noted.before[place].get(name)))
        if kind is not None and (place, name) not in noted.held:
            one, stands = noted.before[place][name], kind()
            for other, state in enumerate(noted.before):
                for alias in [n for n, v in state.items() if v is one]:
                    noted.held[other, alias] = vars(noted.modules[other])[alias] = stands
    for place in range(len(noted.modules)):
        noted.instrument(place)
    with _Functions(noted) if marks else contextlib.nullcontext(), _Operators(noted) if marks else contextlib.nullcontext():
        yield noted
    noted.restore()


class _Functions(TorchFunctionMode):
    def __init__(self, noted: AttributeRecord) -> None:
        super().__init__()
        self.noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.noted.mark_used((args, kwargs))
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, noted: AttributeRecord) -> None:
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.noted.mark_used((args, kwargs))
        return func(*args, **(kwargs or {}))


def _line() -> str:
    """``file:line`` of the caller's caller: the line in the forward that sets something."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


class RecordedList(list[Any]):
    """Replaces a list, whose items are treated as unknown. ``read``: whether one of them was read; ``fresh``: whether it was cleared."""

    def __init__(self) -> None:
        super().__init__([_UNKNOWN])
        self.read, self.fresh, self.line = False, False, ""

    def append(self, value: Any) -> None:
        self.line = self.line or _line()
        super().append(value)

    def extend(self, values: Any) -> None:
        self.line = self.line or _line()
        super().extend(values)

    def __iadd__(self, values: Any) -> RecordedList:  # type: ignore[misc]  # as list's own, whose stub narrows it
        self.line = self.line or _line()
        super().extend(values)
        return self

    def clear(self) -> None:
        self.line, self.fresh = self.line or _line(), True
        super().clear()

    def added(self) -> list[Any]:
        return [value for value in list.__iter__(self) if value is not _UNKNOWN]


class RecordedDict(dict[Any, Any]):
    """Replaces a dict, as ``RecordedList`` replaces a list. Items that were set during the run are known."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.fresh, self.line = False, False, ""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.line = self.line or _line()
        super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        self.read |= not dict.__contains__(self, key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.read |= not dict.__contains__(self, key)
        return super().get(key, default)

    def __contains__(self, key: Any) -> bool:
        self.read |= not dict.__contains__(self, key)
        return super().__contains__(key)

    def added(self) -> list[Any]:
        return [*dict.items(self)]


class _Unknown:
    """Neither a tensor nor a number, so that C++ code that reads it fails."""


_UNKNOWN = _Unknown()
_KINDS: Mapping[type, type[RecordedList] | type[RecordedDict]] = {list: RecordedList, dict: RecordedDict}


def _reader(kind: Any, name: str) -> Callable[..., Any]:
    own = getattr(kind, name)

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.read |= not self.fresh
        self.line = self.line or _line()
        return own(self, *args, **kwargs)

    return read


_OF_BOTH = ("iter", "len", "eq", "ne", "reversed", "delitem", "repr", "reduce_ex", "sizeof")
_OF_LISTS = ("getitem", "setitem", "contains", "add", "mul", "rmul", "imul", "lt", "le", "gt", "ge")
for _name in (*(f"__{n}__" for n in (*_OF_BOTH, *_OF_LISTS)), "copy", "pop", "index", "count", "insert", "remove", "reverse", "sort"):
    setattr(RecordedList, _name, _reader(list, _name))
_OWN = ("keys", "values", "items", "update", "setdefault", "popitem", "clear", "copy", "pop")
for _name in (*(f"__{n}__" for n in (*_OF_BOTH, "or", "ror", "ior")), *_OWN):
    setattr(RecordedDict, _name, _reader(dict, _name))
