"""The entries of torch's operator database, a few samples of each, and the placements of their inputs."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from fxshard._torch_compat.operators import operator_database

SAMPLES = 4
"""Samples per entry, one from each quarter of its list."""
COMBINATIONS = 12
"""Combinations of input placements per sample: all replicated, and random ones."""
WORLDS = (4, 2)
"""Sizes of the mesh's one axis; the samples take them in turn."""
PREFERRED = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
SEED = 20260

UNDEFINED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_"})
"""Entries whose results contain uninitialised memory, which torch fills (with NaN or the largest integer) on both sides."""


class Skipped(Exception):
    """The reason why an entry or a sample cannot run on one device here."""


@dataclass(frozen=True)
class Sample:
    """One call: ``function(*args, **kwargs)``; ``placements``: for each combination one item per tensor, None or the sharded dim."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    world: int
    combinations: tuple[tuple[int | None, ...], ...]
    seed: int

    def fresh(self, grad: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments; with ``grad``, tensors for which the sample wants a gradient require one."""
        return pytree.tree_map(lambda a: _copy(a, grad), (self.args, dict(self.kwargs)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [a for a in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(a, torch.Tensor)]


@dataclass(frozen=True)
class Entry:
    """One entry of the database: ``key`` is unique; ``dtype`` is the one in which it runs."""

    key: str
    info: Any
    dtype: torch.dtype

    @property
    def backward(self) -> bool:
        return bool(self.info.supports_autograd) and self.dtype in self.info.supported_backward_dtypes("cpu")


def entries() -> dict[str, Any]:
    """All entries by key, which is the name and the variant."""
    found: dict[str, Any] = {}
    for info in operator_database():
        key = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        while key in found:
            key += "'"
        found[key] = info
    return found


def entry(key: str, info: Any) -> Entry:
    """The entry, in float64 if possible; raises Skipped if no dtype runs on the CPU."""
    supported = info.supported_dtypes("cpu")
    if not supported:
        raise Skipped("torch has no CPU kernel of it")
    dtype = next((d for d in PREFERRED if d in supported), None) or sorted(supported, key=str)[0]
    return Entry(key, info, dtype)


def samples(one: Entry, count: int = SAMPLES, combinations: int = COMBINATIONS) -> list[Sample]:
    """The chosen samples, the same on every run."""
    seed = SEED + zlib.crc32(one.key.encode()) % 10_000
    _seed_all(seed)
    draw = random.Random(seed)
    listed = list(one.info.sample_inputs("cpu", one.dtype, requires_grad=one.backward))
    if not listed:
        raise Skipped("it has no sample inputs in this dtype")
    chosen = [listed[i] for i in _spread(len(listed), count, draw)]
    return [_sample(one, s, WORLDS[i % len(WORLDS)], combinations, draw, seed + i) for i, s in enumerate(chosen)]


def _spread(size: int, count: int, draw: random.Random) -> list[int]:
    """At most ``count`` positions of a list, one from each of as many equal parts."""
    parts = min(size, count)
    return [draw.randrange(size * i // parts, size * (i + 1) // parts) for i in range(parts)]


def _sample(one: Entry, sample: Any, world: int, most: int, draw: random.Random, seed: int) -> Sample:
    args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    choices = [[None, *(d for d, size in enumerate(t.shape) if size > 1)] for t in tensors]
    return Sample(_processed(one.info.op, sample.output_process_fn_grad), args, kwargs, world, _combinations(choices, most, draw), seed)


def _combinations(choices: Sequence[Sequence[int | None]], most: int, draw: random.Random) -> tuple[tuple[int | None, ...], ...]:
    total = 1
    for one in choices:
        total *= len(one)
    if total <= most:
        return tuple(itertools.product(*choices))
    found = {tuple(None for _ in choices): None}
    while len(found) < most:
        found.setdefault(tuple(draw.choice(one) for one in choices))
    return tuple(found)


def _processed(op: Callable[..., Any], process: Callable[[Any], Any]) -> Callable[..., Any]:
    """``op``, followed by the database's function that makes its result unique (eigenvectors, for example, have arbitrary signs)."""
    probe = object()
    try:
        if process(probe) is probe:
            return op
    except Exception:
        pass

    def unique(*args: Any, **kwargs: Any) -> Any:
        return process(op(*args, **kwargs))

    return unique


def _copy(value: Any, grad: bool) -> Any:
    """A copy with the same strides, because some samples test these."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided:
        return value.detach().clone().requires_grad_(grad and value.requires_grad)
    with torch.no_grad():
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype) if _dense(value) else torch.empty_like(value)
        made.copy_(value.detach())
    return made.requires_grad_(grad and value.requires_grad)


def _dense(value: torch.Tensor) -> bool:
    return value.numel() > 0 and 0 not in value.stride()


@contextlib.contextmanager
def defined_memory(info: Any) -> Iterator[None]:
    """A context in which torch fills memory that an entry of ``UNDEFINED`` does not write."""
    torch.use_deterministic_algorithms(info.name in UNDEFINED, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def without_frozen_seeds() -> None:
    """Unwraps random operators: the database wraps them so that each call starts with the same seed."""
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal")]:
        if hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = _direct


def _direct(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def keys(pattern: str | None = None) -> Iterator[str]:
    """The keys that match ``pattern``, in the order of the database."""
    import re

    return (key for key in entries() if pattern is None or re.fullmatch(pattern, key))
