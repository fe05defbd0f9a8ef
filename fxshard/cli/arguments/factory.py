"""``FILE.py:FACTORY``: the user's model and example inputs, from a function in the user's file."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from fxshard.errors import FxshardError, OptionError, a_kind, closest
from fxshard.progress import progress

if TYPE_CHECKING:
    from torch import nn

SHAPE = "return (model, args) or (model, args, kwargs): an nn.Module, a tuple of example inputs, a dict of keyword inputs"


def load_model(text: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Calls the factory that ``text`` (``FILE.py:FACTORY``) names; the factory decides dtype and device.

    Returns (model, args, kwargs). Raises OptionError for an unusable file, function or return value, and FxshardError with the user's
    source line if the user's code fails.
    """
    return _checked(run_function(text, "factory"), text)


def run_function(text: str, what: str) -> Any:
    """Calls the function that ``text`` (``FILE.py:NAME``) names and returns its result; ``what`` describes it in messages. Raises the
    errors of ``load_model``."""
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise OptionError(f"cannot read {text!r} as a {what}", remedy=f"write the file and the function: file.py:{what}")
    file = Path(path)
    if not file.is_file():
        raise OptionError(f"there is no file {path!r}", where=text, remedy=f"give a path that exists, relative to {os.getcwd()}")
    with _search_path(file.resolve().parent), progress(f"running {file.name}:{name}"):
        module = _import(file, text)
        factory = _function(module, name, text)
        with _user_code(file, f"the {what} {name!r} failed"):
            return factory()


@contextlib.contextmanager
def _search_path(folder: Path) -> Iterator[None]:
    """Lets the file import its neighbours, as if it were run as a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _import(file: Path, text: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise OptionError(f"{str(file)!r} is not a Python file", where=text, remedy="give a file whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    with _user_code(file, f"{file} cannot be imported"):
        spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, name: str, text: str) -> Any:
    factory = getattr(module, name, None)
    if callable(factory):
        return factory
    own = [n for n, v in vars(module).items() if isinstance(v, FunctionType) and v.__module__ == module.__name__]
    remedy = f"its functions are {', '.join(own)}" if own else "write a function there that returns (model, args)"
    raise OptionError(f"the file has no function {name!r}{closest(name, own)}", where=text, remedy=remedy)


@contextlib.contextmanager
def _user_code(file: Path, what: str) -> Iterator[None]:
    """Turns exceptions of the user's code into a FxshardError with the innermost line of the user's file."""
    try:
        yield
    except FxshardError:
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == file.resolve()]
        where = f"{file}:{frames[-1].lineno}: {frames[-1].line}" if frames else str(file)
        if isinstance(error, SyntaxError) and error.lineno is not None:
            where = f"{error.filename}:{error.lineno}"
        raise FxshardError(f"{what}: {type(error).__name__}: {error}", where=where, remedy="correct the user code there") from error


def _checked(result: Any, text: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from torch import nn  # here, so that a missing file is reported without importing torch

    def refuse(found: str) -> OptionError:
        return OptionError(f"the factory returned {found}", where=text, remedy=SHAPE)

    if not isinstance(result, (tuple, list)):
        raise refuse(f"{a_kind(result)}, not a tuple")
    if len(result) not in (2, 3):
        raise refuse(f"{len(result)} values")
    model, args, kwargs = (*result, {})[:3]
    if not isinstance(model, nn.Module):
        raise refuse(f"{a_kind(model)} where the model belongs")
    if not isinstance(args, (tuple, list)):
        raise refuse(f"{a_kind(args)} where the tuple of inputs belongs")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise refuse(f"{a_kind(kwargs)} where the dict of keyword inputs belongs")
    return model, tuple(args), dict(kwargs)
