"""Replace an attribute of a class or module of torch for a while.

Descriptors are put back as they were stored, which ``unittest.mock.patch.object`` does not do for a static method that a base class has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name] if name in vars(owner) else getattr(owner, name)  # from vars: a descriptor as stored, not bound
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
