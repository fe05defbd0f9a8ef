"""Private names of Dynamo (torch 2.13): calls of functions made by ``local_map`` in the code that it captures.

What would replace them: ``local_map`` as an operator that ``torch.export`` keeps, with its placements.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fxshard._torch_compat.patched import patched


@dataclass(frozen=True)
class LocalMapCall:
    """A call of a function made by ``local_map``: its placements (None where not given), its mesh, the shapes of its arguments (None: no
    tensor), and its call stack: (file, line, code), innermost last. ``spmd_types``: whether it asks for torch's check of types (2.14)."""

    outputs: Any
    inputs: Any
    gradients: Any
    device_mesh: Any
    spmd_types: bool
    shapes: tuple[tuple[int, ...] | None, ...]
    frames: tuple[tuple[str, int | None, str | None], ...]


@contextlib.contextmanager
def captured_local_maps(describe: Callable[[LocalMapCall], tuple[Any, Any]], region: Callable[..., Any]) -> Iterator[None]:
    """While Dynamo captures: a call of a ``local_map`` function becomes ``region(function, begins, ends, *args, **kwargs)``.

    ``describe`` returns the constants ``begins`` and ``ends`` for a call.
    """
    from torch._dynamo.variables.builder import SourcelessBuilder
    from torch._dynamo.variables.higher_order_ops import LocalMapWrappedHigherOrderVariable as Wrapped
    from torch._guards import TracingContext

    def call(_: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        names = _names_before_user_arguments(sys.modules[home]._local_map_wrapped)
        function, *given = (a.realize() if hasattr(a, "realize") else a for a in args)
        options, passed = given[: len(names) - 1], given[len(names) - 1 :]
        outputs, inputs, gradients, device_mesh = (v.as_python_constant() for v in options[:4])
        checked = any(v.as_python_constant() for name, v in zip(names[1:], options, strict=True) if "spmd_types" in name)
        shapes = tuple(tuple(v.as_proxy().node.meta["example_value"].shape) if v.is_tensor() else None for v in passed)
        frames = tuple((f.filename, f.lineno, f.line) for f in TracingContext.extract_stack())
        begins, ends = describe(LocalMapCall(outputs, inputs, gradients, device_mesh, checked, shapes, frames))
        constants = [SourcelessBuilder.create(tx, value) for value in (begins, ends)]
        inner = SourcelessBuilder.create(tx, region)
        return inner.call_function(tx, [function, *constants, *passed], dict(kwargs))

    asked, home = Wrapped.should_wrap_in_hop, "torch.distributed.tensor.experimental._func_map"
    known = staticmethod(lambda value: home in sys.modules and asked(value))  # without the import there are no such functions
    with patched(Wrapped, "_call_function", call), patched(Wrapped, "should_wrap_in_hop", known), Wrapped.enable():
        yield


def _names_before_user_arguments(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function that stand before its ``*args``."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
