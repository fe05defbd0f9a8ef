"""The texts of flex attention's functions in a local graph from a file: each is read and computed for one place, on fake tensors.

A text is JSON inside JSON (``fxshard.ops.flex.functions``), and would otherwise be read when the program runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxshard._torch_compat import OpOverload
from fxshard._torch_compat.operators import schema_of
from fxshard.files import Field, parse_json
from fxshard.graph.json_values import NotSerializable, from_json
from fxshard.graph.planning_graph import example_shape
from fxshard.ops.flex.functions import DEVICE, PLACE, known

FLEX = ("flex_attention", "flex_attention_backward")
MAX_ELEMENTS = 2**16
"""Elements of any value that a function computes for one place, unless it reads a larger tensor."""
KINDS = ("node", "tuple", "float", "dtype", "memory_format")
"""What an argument may be besides JSON's own values and lists."""

NESTING = 8
"""Lists within lists: an operator takes a list of tensors at most. Python's own limit is the process's, which libraries raise."""

Compute = Callable[[Callable[[], Any], str], Any]
"""Computes on fake tensors, and raises FileError, with what it was asked to compute, where torch refuses."""


def check_texts(target: OpOverload, args: Sequence[Any], field: Field, words: frozenset[str], compute: Compute) -> None:
    """Raises FileError if a call of flex attention has a text that is no function of the tensors beside it.

    ``args``: the call's arguments, fake tensors among them. ``words``: the strings that operators may have as arguments.
    """
    if target.overloadpacket.__name__ not in FLEX:
        return
    schema = schema_of(target)
    given = dict(zip((one.name for one in schema.arguments), args, strict=False)) if schema else {}
    scalars = [compute(lambda: torch.empty((), dtype=torch.int64), "a place") for _ in range(PLACE)]
    score = compute(lambda: torch.empty((), dtype=torch.float32), "a score")
    for name, first in (("score", [score]), ("mask", [])):
        text, tensors = given.get(f"{name}_mod"), given.get(f"{name}_tensors")
        if not isinstance(text, str) or not isinstance(tensors, list):
            raise field.fail(f"a call of {target} has no {name} function")
        root = parse_json(text, f"{field.file}: {field.path}: {name}_mod")
        result = _Text(root, [*first, *scalars, *tensors], words, compute).result()
        if result.ndim or (name == "mask") != (result.dtype == torch.bool):
            raise root.fail(f"a {name} function gives {list(result.shape)} of {result.dtype} for one place")


class _Text:
    """Computes a text on ``values``, its arguments, to which the result of each call is added."""

    def __init__(self, root: Field, values: list[Any], words: frozenset[str], compute: Compute) -> None:
        self.root, self.values, self.words, self.compute = root, values, words, compute
        self.most = max(MAX_ELEMENTS, *(math.prod(example_shape(one.shape)) for one in values))

    def result(self) -> torch.Tensor:
        count, calls, result = self.root.items(3)
        if count.whole() != len(self.values):
            raise count.fail(f"the function has {count.whole()} arguments, the call gives it {len(self.values)}")
        for one in calls.items():
            self.call(one)
        found: torch.Tensor = self.values[self.index(result)]
        return found

    def call(self, field: Field) -> None:
        name, args, named = field.items(3)
        try:
            target = known(name.text())
        except NotSerializable as error:
            raise name.fail(f"{name.text()[:80]!r} is not an operator that a function may call") from error
        kwargs = named.record({"dict": Field.entries})["dict"]
        if bad := [key for key in kwargs if key in DEVICE]:
            raise named.fail(f"a function may not say {bad[0]!r}")
        given = [self.argument(one, NESTING) for one in args.items()], {key: self.argument(one, NESTING) for key, one in kwargs.items()}
        value = self.compute(lambda: target(*given[0], **given[1]), str(target))
        if not isinstance(value, torch.Tensor):
            raise name.fail(f"{target} does not give one tensor")
        if math.prod(example_shape(value.shape)) > self.most:
            raise field.fail(f"{target} gives {list(value.shape)} for one place, more than the {self.most} elements of what is read")
        self.values.append(value)

    def argument(self, field: Field, levels: int) -> Any:
        """An argument of an operator, within at most ``levels`` more lists."""
        value = field.value
        if not levels and isinstance(value, (list, dict)):
            raise field.fail("the text nests too deeply")
        if isinstance(value, list):
            return [self.argument(one, levels - 1) for one in field.items()]
        if isinstance(value, str) and value not in self.words:
            raise field.fail(f"the text {value[:60]!r} is not an argument of an operator")
        if not isinstance(value, dict):
            return value
        entries = field.known(KINDS)
        if len(entries) != 1:
            raise field.fail("an argument has one kind")
        ((kind, inner),) = entries.items()
        if kind == "node":
            return self.values[self.index(inner)]
        if kind == "tuple":
            return tuple(self.argument(one, levels - 1) for one in inner.items())
        try:
            return from_json({kind: inner.text()}, ())
        except (NotSerializable, AttributeError, ValueError) as error:
            raise inner.fail(f"{inner.text()[:60]!r} is no {kind}") from error

    def index(self, field: Field) -> int:
        """The number of an argument, or of a call before."""
        if field.whole() >= len(self.values):
            raise field.fail(f"value {field.whole()} is read, of {len(self.values)} so far")
        return field.whole()
