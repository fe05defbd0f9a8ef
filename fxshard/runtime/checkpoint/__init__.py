"""Checkpoints: saved on one mesh and plan, loaded on any other; docs/checkpoints.md describes their files."""

from fxshard.runtime.checkpoint.api import load_checkpoint, open_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "open_checkpoint", "save_checkpoint"]
