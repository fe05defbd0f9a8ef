"""Checkpoints: saved on one mesh and plan, loaded on any other.

In: a module, its optimiser and a path; out: files that docs/checkpoints.md describes, and the restored state.
Read api.py, then state.py, index.py and folder.py; dcp.py and single_file.py are the other formats.
"""

from fxshard.runtime.checkpoint.api import load_checkpoint, open_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "open_checkpoint", "save_checkpoint"]
