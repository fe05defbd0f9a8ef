"""The passes, one per file, in this order: trace, annotate, constrain, formulate, choose, verify, lower, schedule, chunk, bucket.

``PIPELINE`` is that order; ``pipeline.run`` runs all or part of it. The work on each rank (bind, partition, compile) consists of passes
too: ``fxshard.runtime.compile.compile.COMPILING``.
"""

from fxshard.passes.pipeline import LOWERING, PIPELINE, PLANNING

__all__ = ["LOWERING", "PIPELINE", "PLANNING"]
