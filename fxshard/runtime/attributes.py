"""What a model's forward may read besides tensors: numbers, texts and switches that its modules hold. A graph has them fixed."""

from __future__ import annotations

from torch import nn

PLAIN = (bool, int, float, str, type(None))
Attributes = tuple[tuple[tuple[str, object], ...], ...]
"""For each module its plain attributes, ``training`` among them, by name."""


class AttributeReader:
    """Reads the attributes of a model's modules on each call; makes them anew only where something changed."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.seen: list[_Seen] = []
        self.last: Attributes = ()

    def now(self) -> Attributes:
        """As they are now; the same object as before where they are the same."""
        if not self.seen or not all(map(_Seen.unchanged, self.seen)):
            self.seen = [_Seen(vars(module)) for module in self.modules]
            self.last = tuple(seen.plain for seen in self.seen)
        return self.last


class _Seen:
    """One module's attributes as they were: the plain ones, and the types of all."""

    def __init__(self, state: dict[str, object]) -> None:
        self.state, self.names, self.types = state, [*state], [*map(type, state.values())]
        self.plain = tuple((name, value) for name, value in state.items() if type(value) in PLAIN)
        self.keys, self.values = [name for name, _ in self.plain], [value for _, value in self.plain]

    def unchanged(self) -> bool:
        """Whether names, types and plain values are the same; of others the value does not matter."""
        state = self.state
        return [*map(state.get, self.keys)] == self.values and [*state] == self.names and [*map(type, state.values())] == self.types


def differing(before: Attributes, after: Attributes) -> set[tuple[int, str]]:
    """(place of the module, attribute) of all that are not the same."""
    if before == after:
        return set()
    pairs = [(i, dict(a), dict(b)) for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    return {(i, name) for i, a, b in pairs for name in {*a, *b} if name not in a or name not in b or a[name] != b[name]}
