"""The passes, one a file, run in this order: trace, annotate, constrain, formulate, choose, verify, lower.

``PIPELINE`` is that order as (name, function) pairs; ``pipeline.run`` runs it or a part of it.
"""

from fxshard.passes.pipeline import LOWERING, PLANNING

PIPELINE = (*PLANNING, *LOWERING)

__all__ = ["LOWERING", "PIPELINE", "PLANNING"]
