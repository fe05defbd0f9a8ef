"""A program as one file for all ranks: a ``.pt2`` archive, opened without a process group and without the model's source.

The archive has torch's own format (``torch.export.load`` opens it), plus fxshard's files: ``plan.json``, the program's description, a
manifest with the hash of every entry, and the weights as safetensors. Nothing in it is pickled. ``load`` treats the file as data: it checks
size and hash of every entry, refuses entries that the program does not use, and rebuilds the graphs with its own strict reader, operator by
operator. Entries that only torch reads are constants.

Submodules are imported on demand: caches only need to write sizes in this format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxshard.archive.store import load, load_all, load_rank, load_weights, save

__all__ = ["load", "load_all", "load_rank", "load_weights", "save"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from fxshard.archive import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
