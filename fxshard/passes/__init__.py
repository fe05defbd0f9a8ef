"""The passes, one a file, run in this order: trace, annotate, constrain, formulate, choose, verify, lower, schedule, chunk, bucket.

``PIPELINE`` is that order; ``pipeline.run`` runs it or a part of it. What happens on a rank (bind, partition, compile) are
passes too: ``fxshard.runtime.compile.compile.COMPILING``.
"""

from fxshard.passes.pipeline import LOWERING, PIPELINE, PLANNING

__all__ = ["LOWERING", "PIPELINE", "PLANNING"]
