"""Private names of torch (2.13): the table of decompositions into core operators, without visiting every operator.

What would replace it: ``torch.export.default_decompositions``, were it as fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey, _dispatch_get_registrations_for_dispatch_key
from torch._ops import OpOverload

KERNELS = ("CPU", "Meta")
"""Dispatch keys of the tensors with which a model is traced."""


@functools.cache
def core_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """torch's table of decompositions into core operators, as far as a trace needs it.

    torch also adds each composite operator (500), for which it creates the Python object of every operator, a tenth of a second. A trace
    decomposes composite operators by itself unless they have a kernel of their own (``autograd_would_have_decomposed``); only these are
    added here.
    """
    from torch._decomp import _core_aten_decompositions_post_autograd
    from torch._export.utils import _get_decomp_for_cia, _is_preservable_cia_op
    from torch.export.decomp_utils import PRESERVED_ATEN_CIA_OPS

    table = {op: f for op, f in _core_aten_decompositions_post_autograd().items() if isinstance(op, OpOverload)}
    for op in (*_written_in_cpp(), *_written_in_python()):
        if op not in table and op not in PRESERVED_ATEN_CIA_OPS and _is_preservable_cia_op(op):
            table[op] = _get_decomp_for_cia(op)
    return table


def _written_in_cpp() -> Iterator[OpOverload]:
    """Composite operators in C++ that also have a kernel of their own."""
    names = set(_dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    for name in sorted(names & {one for key in KERNELS for one in _dispatch_get_registrations_for_dispatch_key(key)}):
        space, _, rest = name.partition("::")
        plain, _, overload = rest.partition(".")
        yield getattr(getattr(getattr(torch.ops, space), plain), overload or "default")


def _written_in_python() -> Iterator[OpOverload]:
    """Composite operators in Python, found among the operator objects that exist already."""
    spaces = [getattr(torch.ops, name, None) for name in sorted(torch.ops._dir)]
    for space in (one for one in spaces if isinstance(one, torch._ops._OpNamespace)):
        for packet in [getattr(space, name) for name in list(space)]:
            for op in [vars(packet).get(overload) for overload in list(packet._dir)]:
                if isinstance(op, OpOverload) and DispatchKey.CompositeImplicitAutograd in op.py_kernels:
                    yield op
