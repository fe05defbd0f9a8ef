"""Pipelines: a model cut into stages along one mesh axis, each stage sharded over the other axes.

In: a model, one microbatch, a mesh with a pipeline axis. Out: a ``PipelinePlan``, on a laptop too, or a ``PipelineStage`` for torch's
schedules.
Read ``schedule`` (the time of a step), ``cut`` (numbers only), ``split`` (a model as stage modules), ``prices`` (a plan for each layer),
``plan`` (all of these together), ``stage`` (a stage on its ranks).
"""
