"""The arguments of a call by all their names: ``args[0]``, ``kwargs['mask']``, or the name of the parameter of ``forward``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fxshard._torch_compat import pytree

_ROOT = re.compile(r"(args\[\d+\]|kwargs\[(?:'[^']*'|\"[^\"]*\")\]|[^.\[]+)(.*)", re.DOTALL)


def path_name(path: Sequence[Any]) -> str:
    """``args[0]`` or ``kwargs['mask']``: the name of a leaf of ``(args, kwargs)``, from its pytree path."""
    return ("args" if path[0].idx == 0 else "kwargs") + pytree.keystr(tuple(path[1:]))


@dataclass(frozen=True)
class Arguments:
    """The arguments of the call ``forward(*args, **kwargs)``."""

    forward: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @cached_property
    def _parameters(self) -> list[inspect.Parameter] | None:
        """The parameters of ``forward``; None if it does not tell them."""
        try:
            return list(inspect.signature(self.forward).parameters.values())
        except (TypeError, ValueError):
            return None

    @cached_property
    def _positional(self) -> list[str]:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p.name for p in self._parameters or () if p.kind in kinds]

    @cached_property
    def by_name(self) -> dict[str, tuple[str, Any]]:
        """(path, value) of each argument of the call, by all its names. A parameter has the same names however a call passes it."""
        found: dict[str, tuple[str, Any]] = {}
        for i, value in enumerate(self.args):
            name = self._positional[i] if i < len(self._positional) else None
            names = (f"args[{i}]",) if name is None else (f"args[{i}]", name, f"kwargs[{name!r}]")
            found.update(dict.fromkeys(names, (f"args[{i}]", value)))
        for name, value in self.kwargs.items():
            at = (f"args[{self._positional.index(name)}]",) if name in self._positional else ()
            found.update(dict.fromkeys((f"kwargs[{name!r}]", name, *at), (f"kwargs[{name!r}]", value)))
        return found

    def split(self, name: str) -> tuple[str, str]:
        """(an argument's name, the rest of the path in it) of a path such as ``kwargs['pair'][0]``."""
        matched = _ROOT.fullmatch(name)
        return (name, "") if matched is None or name in self.by_name else (matched[1], matched[2])

    def could_have(self, name: str) -> bool:
        """Whether a call of ``forward`` may have an argument of this name."""
        if self._parameters is None or name in self.by_name:
            return True
        kinds = {p.kind for p in self._parameters}
        if name.startswith("args["):
            return int(name[5:-1]) < len(self._positional) or inspect.Parameter.VAR_POSITIONAL in kinds
        own = name[8:-2] if name.startswith("kwargs[") else name
        return own in self.parameter_names or inspect.Parameter.VAR_KEYWORD in kinds

    @cached_property
    def parameter_names(self) -> list[str]:
        """The names of the parameters of ``forward``, without ``*args`` and ``**kwargs``."""
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [p.name for p in self._parameters or () if p.kind not in variable]
