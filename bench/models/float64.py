"""Loads models so that they compute in float64 throughout.

transformers and diffusers compute norms, softmax and rotary embeddings in float32 whatever the model's dtype. A sharded sum in another
order then differs in the seventh digit, which would hide a wrong plan. Here their source reads float64 for float32.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

PACKAGES = ("transformers.", "diffusers.models.", "peft.", "timm.")
FLOAT32 = re.compile(r"\btorch\.float32\b|\btorch\.float\b(?!\()|\.float\(\)|\"float32\"")
FLOAT64 = {"torch.float32": "torch.float64", "torch.float": "torch.float64", ".float()": ".double()", '"float32"': '"float64"'}


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        changed = FLOAT32.sub(lambda found: FLOAT64[found[0]], source)
        return compile(changed, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(PACKAGES):
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is not None and isinstance(found.loader, importlib.machinery.SourceFileLoader) and found.origin:
            found.loader = _Loader(fullname, found.origin)
        return found


def compute_in_float64() -> None:
    """From now on, modules of ``PACKAGES`` are imported with float64 in place of float32; call it before they are imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
