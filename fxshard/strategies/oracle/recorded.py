"""Samples of aten operators, recorded while the entries of torch's ``op_db`` run, forward and backward."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from fxshard._torch_compat import TorchDispatchMode, pytree
from fxshard._torch_compat.operators import operator_database
from fxshard.errors import RuleError
from fxshard.strategies.oracle.samples import Sample, operator, qualified, spread_out

PER_ENTRY = 24
"""Number of samples of an entry that are run, evenly spaced in its list."""
LARGEST = 4096
"""Most elements in a tensor of a recorded call: rules do not depend on sizes, but checking large tensors takes time."""
Watched = Callable[[Sequence[Any], str], Iterable[Any]]
UNUSUAL = (torch.complex32,)
"""Dtypes that most kernels lack."""
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)


class _Recorder(TorchDispatchMode):
    def __init__(self, wanted: frozenset[str] | None, found: dict[str, list[Sample]]) -> None:
        super().__init__()
        self.wanted, self.found = wanted, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if self.wanted is None or name in self.wanted:
            with contextlib.suppress(_Unfit):
                self.found.setdefault(name, []).append(Sample(name, *_kept(args, kwargs or {})))
        return func(*args, **(kwargs or {}))


class _Unfit(Exception):
    """The call cannot be a sample: a tensor is too large, or not an ordinary one."""


def _kept(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Copies the arguments, because the caller may modify its tensors later. Raises _Unfit."""

    def copy(x: torch.Tensor) -> torch.Tensor:
        ordinary = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided and not x.is_quantized
        if not ordinary or x.numel() > LARGEST or x.dtype in UNUSUAL:
            raise _Unfit
        return _like(x.detach())

    kept: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, copy, (tuple(args), dict(kwargs)))
    return kept


def _like(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, or contiguous if elements share memory."""
    if x.is_contiguous() or any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        return x.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def record(
    wanted: Iterable[str] | None = None, entries: Iterable[Any] | None = None, enough: int | None = None, seed: int = 0
) -> dict[str, list[Sample]]:
    """Calls of the ``wanted`` operators (None: all), by name, made while ``entries`` of op_db (None: all) run.

    ``enough``: stops when each operator has this many. Raises OptionError if packages that op_db needs are missing.
    """
    names = None if wanted is None else frozenset(wanted)
    found: dict[str, list[Sample]] = {}
    for entry in operator_database() if entries is None else entries:
        for dtype in DTYPES:
            if dtype in entry.dtypes:
                _run(entry, dtype, _Recorder(names, found), seed)
        if names is not None and enough is not None and all(len(found.get(n, ())) >= enough for n in names):
            break
    return found


def _is_named(entry: Any, name: str) -> bool:
    base = name.split(".")[1] if "." in name else name
    return bool(base) and (entry.name.split(".")[-1] in base or str(entry.aten_name) in base)


def _run(entry: Any, dtype: torch.dtype, recorder: _Recorder, seed: int) -> None:
    """Runs the samples of an entry under the recorder; calls made before a failure count."""
    backward = entry.supports_autograd and dtype in (torch.float64, torch.complex128)
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        for sample in _some(entry.sample_inputs("cpu", dtype, requires_grad=backward)):
            with contextlib.suppress(Exception):
                _call(entry.op, sample, recorder, backward)


def _some(samples: Iterator[Any]) -> Sequence[Any]:
    every = list(itertools.islice(samples, 400))
    step = max(1, len(every) // PER_ENTRY)
    return every[::step][:PER_ENTRY]


def _call(op: Any, sample: Any, recorder: _Recorder, backward: bool) -> None:
    with recorder:
        result = op(sample.input, *sample.args, **sample.kwargs)
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if backward and outputs:
        grads = [torch.randn_like(o) for o in outputs]
        with recorder:
            torch.autograd.backward(outputs, grads)


def direct_samples(op: str, seed: int = 0) -> list[Sample]:
    """Samples from calling ``op`` directly with the inputs of op_db entries of its name, for operators that torch decomposes before they
    reach the recorder."""
    found = []
    overload = operator(op)
    for entry in operator_database():
        if entry.name.split(".")[-1] != op.split(".")[1] or torch.float64 not in entry.dtypes:
            continue
        torch.manual_seed(seed)
        with contextlib.suppress(Exception):
            for sample in _some(entry.sample_inputs("cpu", torch.float64, requires_grad=False)):
                with contextlib.suppress(Exception):
                    overload(sample.input, *sample.args, **sample.kwargs)
                    found.append(Sample(op, *_kept((sample.input, *sample.args), sample.kwargs)))
    return found


def samples_of(op: str, count: int = 8, seed: int = 0, watched: Watched = lambda entries, _: entries) -> list[Sample]:
    """Up to ``count`` samples of an aten operator, of different kinds; raises RuleError if torch has none.

    ``watched``: wraps the iteration over (entries, description), to show progress.
    """
    name = qualified(op)
    operator(name)
    every = operator_database()
    found = record([name], [e for e in every if _is_named(e, name)], seed=seed).get(name, [])
    if len(found) < count:
        others = watched([e for e in every if not _is_named(e, name)], f"looking for {name} in torch's samples")
        found += record([name], others, 10 * count, seed).get(name, [])
    found = found or direct_samples(name, seed)
    if not found:
        remedy = "give your own: --sample FILE.py:samples, a function that returns a list of argument tuples"
        raise RuleError(f"torch has no samples for {op}", remedy=remedy)
    return spread_out(found, count)
