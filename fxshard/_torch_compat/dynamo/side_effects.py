"""Private names of torch (2.13): side effects of code that Dynamo captures: changed Python objects and assigned buffers.

What would replace it: a report of side effects by ``torch.export``.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def noted_changes(changed: Callable[[], None], mark: Any, names: Mapping[int, str]) -> Iterator[None]:
    """While Dynamo captures: ``changed`` is called for each change of a Python object that existed before.

    The assignment of a tensor to a buffer (``self.steps = self.steps + 1``) does not count: it becomes a call ``mark(value, name)`` in the
    captured graph. ``names``: names of modules by their ids.
    """
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable as Called

    check, call = SideEffects.check_allowed_side_effect, Called.call_method
    assigning: list[str] = []

    def check_allowed_side_effect(self: Any, item: Any) -> Any:
        if not assigning and isinstance(item.mutation_type, (AttributeMutationExisting, ValueMutationExisting)):
            changed()
        return check(self, item)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        key = args[0].as_python_constant() if name == "__setattr__" and args else None
        known = isinstance(key, str) and key in vars(self.value).get("_buffers", {}) and id(self.value) in names
        if not known or key is None or not args[1].is_tensor():
            return call(self, tx, name, args, kwargs)
        prefix = names[id(self.value)]
        tx.output.create_proxy("call_function", mark, (args[1].as_proxy(), f"{prefix}.{key}" if prefix else key), {})
        assigning.append(key)
        try:
            return call(self, tx, name, args, kwargs)
        finally:
            assigning.pop()

    SideEffects.check_allowed_side_effect, Called.call_method = check_allowed_side_effect, call_method
    try:
        yield
    finally:
        SideEffects.check_allowed_side_effect, Called.call_method = check, call


@contextlib.contextmanager
def noted_side_effects() -> Iterator[list[str]]:
    """While Dynamo captures: yields a list that receives, at the end, the sources of the Python objects that the code changes."""
    from torch._dynamo import config

    found: list[str] = []
    try:
        with config.patch(side_effect_replay_policy="warn"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        for one in caught:
            text = str(one.message)
            if "side effects happened in the model.forward" in text:
                found += re.findall(r"""["']([LG]\[.*?)["'](?:, |\]$)""", text)
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
