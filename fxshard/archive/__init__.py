"""A program as one file for all ranks: a ``.pt2`` archive, opened without a process group and without the model's source.

The archive is torch's own (``torch.export.load`` opens it), with fxshard's files beside it: ``plan.json``, the
program's description, a manifest with the hash of every entry, and the weights as safetensors. Nothing in it is
pickled. ``load`` treats the file as data: it checks the manifest, refuses entries outside a fixed list, and rebuilds
the graphs with its own strict reader, operator by operator.
"""

from fxshard.archive.store import has_weights, load, load_weights, save

__all__ = ["has_weights", "load", "load_weights", "save"]
