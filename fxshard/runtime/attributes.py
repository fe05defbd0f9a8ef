"""What a model's forward may read besides tensors: numbers, texts and switches that its modules hold. A graph has them fixed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

PLAIN = (bool, int, float, str, type(None))
Attributes = tuple[tuple[tuple[str, object], ...], ...]
"""For each module its plain attributes, ``training`` among them, by name."""


def attributes_of(modules: Sequence[nn.Module]) -> Attributes:
    """As they are now."""
    return tuple(tuple((name, value) for name, value in vars(module).items() if type(value) in PLAIN) for module in modules)


def differing(before: Attributes, after: Attributes) -> set[tuple[int, str]]:
    """(place of the module, attribute) of all that are not the same."""
    if before == after:
        return set()
    pairs = [(i, dict(a), dict(b)) for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    return {(i, name) for i, a, b in pairs for name in {*a, *b} if name not in a or name not in b or a[name] != b[name]}
