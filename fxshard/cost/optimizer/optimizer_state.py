"""The state that an optimiser keeps for each parameter."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import torch

from fxshard.errors import OptionError, closest

_PLAIN = {
    "none": 0,
    "sgd": 0,
    "adam": 2,
    "adamw": 2,
    "nadam": 2,
    "radam": 2,
    "adamax": 2,
    "adagrad": 1,
    "adadelta": 2,
    "rmsprop": 1,
    "rprop": 2,
    "asgd": 1,
    "muon": 1,
}
_OPTIONS = {"sgd": ("momentum",), "adam": ("amsgrad",), "adamw": ("amsgrad",), "rmsprop": ("centered", "momentum")}
"""Options of ``torch.optim``'s classes that each add one tensor to the state."""


def _named(name: str, options: Mapping[str, Any]) -> str:
    """The lower-case name of a class of ``torch.optim`` with the options that are on: ``sgd_momentum``."""
    return "_".join([name, *(option for option in _OPTIONS.get(name, ()) if options.get(option))])


OPTIMIZERS: Mapping[str, int] = {
    _named(name, dict.fromkeys(on, True)): count + len(on)
    for name, count in _PLAIN.items()
    for on in chain.from_iterable(combinations(_OPTIONS.get(name, ()), n) for n in range(len(_OPTIONS.get(name, ())) + 1))
}
"""Optimiser -> number of state tensors of the parameter's size (the step counter is not counted)."""


@dataclass(frozen=True)
class Optimizer:
    """An optimiser's state: ``kind`` is a key of ``OPTIMIZERS``; ``state_dtype`` the dtype of its state (None: the parameter's);
    ``master_weights`` adds a float32 copy of each parameter of another dtype."""

    kind: str = "none"
    state_dtype: torch.dtype | None = None
    master_weights: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in OPTIMIZERS:
            raise _unknown(self.kind if isinstance(self.kind, str) else type(self.kind).__name__)

    @staticmethod
    def of(given: Any) -> Optimizer:
        """Converts a name (``"adamw"``, ``"AdamW"``), a class of ``torch.optim`` (or a ``functools.partial`` of one) or an instance of one;
        None is ``"none"``. Raises OptionError naming an unknown optimiser."""
        if given is None or isinstance(given, (str, Optimizer)):
            if isinstance(given, str) and given.lower() not in OPTIMIZERS:
                raise _unknown(given)
            return given if isinstance(given, Optimizer) else Optimizer((given or "none").lower())
        if isinstance(given, functools.partial):
            return _of_class(given.func, given.keywords)
        if isinstance(given, torch.optim.Optimizer):
            found = (_of_class(type(given), group) for group in given.param_groups)
            return max(found, key=lambda one: OPTIMIZERS[one.kind], default=_of_class(type(given), given.defaults))
        return _of_class(given, {})

    def bytes_per_element(self, dtype: torch.dtype) -> int:
        """Bytes of state for each element of a parameter of ``dtype``."""
        master = 4 if self.master_weights and dtype != torch.float32 else 0
        return OPTIMIZERS[self.kind] * (self.state_dtype or dtype).itemsize + master

    def tensors(self, dtype: torch.dtype) -> int:
        """Number of state tensors of a parameter of ``dtype``."""
        return OPTIMIZERS[self.kind] + (self.master_weights and dtype != torch.float32)


def _of_class(given: Any, options: Mapping[str, Any]) -> Optimizer:
    """Accepts only ``torch.optim``'s own classes: a subclass may keep any state."""
    name = given.__name__ if isinstance(given, type) else type(given).__name__
    if getattr(torch.optim, name, None) is not given or name.lower() not in _PLAIN:
        raise _unknown(name)
    return Optimizer(_named(name.lower(), options))


def _unknown(name: str) -> OptionError:
    """Lists the state of each known optimiser, so that the user can name one with as much state."""
    count = sorted(set(OPTIMIZERS.values()))
    kept = "; ".join(f"{n}: {', '.join(kind for kind, tensors in OPTIMIZERS.items() if tensors == n)}" for n in count)
    remedy = (
        f"known optimizers, by the number of state tensors of a parameter's size: {kept}. Give the name, class or object of "
        "one with as many; if its state has another dtype, give fxshard.Optimizer(name, state_dtype=...)"
    )
    return OptionError(f"unknown optimizer {name[:60]!r}{closest(name, OPTIMIZERS)}", where="optimizer", remedy=remedy)
