"""Sharded models against one device: ``python -m bench.models [name ...]`` (``make models``), which writes docs/models.md.

Each model of the catalogue runs a training step in float64 on simulated meshes, under the solver's plan and random ones (``check``), and
ten of them on two gloo ranks (``ranks``). Read ``catalogue`` first.
"""
