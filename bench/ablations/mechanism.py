"""A mechanism, and the replacement that switches it off. fxshard itself has no such switches.

A target is the dotted name of an attribute of a module or class. The replacement does as little as possible while the rest stays correct.
The code of a mechanism is a list of files of the package, or of functions and classes in them (``FILE:Class.method``).
"""

from __future__ import annotations

import ast
import contextlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import fxshard

ROOT = Path(fxshard.__file__).parent


@dataclass(frozen=True)
class Mechanism:
    """``of``: the stage of the anchors that it affects; ``what``: what it does; ``without``: target -> replacement; ``code``: the code that
    would be deleted with it.

    ``used``: the functions whose calls show that an anchor uses it, by default the targets.
    """

    name: str
    of: str
    what: str
    without: Mapping[str, Any]
    code: tuple[str, ...] = ()
    used: tuple[str, ...] = ()

    @property
    def lines(self) -> int:
        """The number of lines that would be deleted with it, without its callers."""
        return sum(_lines(one) for one in self.code)

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """A context in which the mechanism is off."""
        with contextlib.ExitStack() as stack:
            for target, replacement in self.without.items():
                stack.enter_context(mock.patch(target, replacement))
            yield


def together(mechanisms: Sequence[Mechanism]) -> tuple[Mechanism, ...]:
    """The mechanisms of each stage as one, which switches all of them off."""
    found = []
    for stage in dict.fromkeys(one.of for one in mechanisms):
        some = [one for one in mechanisms if one.of == stage]
        without = {target: replacement for one in some for target, replacement in one.without.items()}
        code, used = (tuple(x for one in some for x in part(one)) for part in (lambda m: m.code, lambda m: m.used or tuple(m.without)))
        found.append(Mechanism(" + ".join(one.name for one in some), stage, "all at once", without, code, used))
    return tuple(found)


@contextlib.contextmanager
def used_of(mechanisms: Sequence[Mechanism]) -> Iterator[set[str]]:
    """A context that records the names of the mechanisms whose functions are called."""
    used: set[str] = set()
    with contextlib.ExitStack() as stack:
        for one in mechanisms:
            for target in one.used or one.without:
                stack.enter_context(mock.patch(target, _noting(pkgutil.resolve_name(target), used, one.name)))
        yield used


def _noting(original: Callable[..., Any], used: set[str], name: str) -> Callable[..., Any]:
    def noting(*given: Any, **named: Any) -> Any:
        used.add(name)
        return original(*given, **named)

    return noting


def nothing(*given: object, **named: object) -> None:
    """Does nothing."""


def no(*given: object, **named: object) -> bool:
    """Returns False."""
    return False


def unchanged(self: object, model: Any, *budget: Any) -> Any:
    """A reduction that changes nothing."""
    return model, lambda choices: choices


@cache
def _lines(code: str) -> int:
    path, _, names = code.partition(":")
    text = (ROOT / path).read_text()
    if not names:
        return len(text.splitlines())
    body: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for name in names.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = next((one for one in body if isinstance(one, kinds) and one.name == name), None)
        if not isinstance(found, kinds):
            raise LookupError(f"{path} has no {names}")
        body = found.body
    assert found is not None and found.end_lineno is not None
    return found.end_lineno - found.lineno + 1
