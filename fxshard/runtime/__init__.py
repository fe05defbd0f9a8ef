"""Runs programs in the user's processes.

In: a module, a Dynamo graph or a program file, and the ranks of a mesh. Out: callables that behave like the original model.
``rank_graph/``, ``compile/`` and ``calls/`` make and call the program of a rank; ``module/``, ``backend/`` and exported.py put it behind
``parallelize``, ``torch.compile`` and ``load``; distributed_already.py plans what torch has distributed. ``ranks/`` and ``groups/``
coordinate processes, ``checkpoint/`` and ``optim/`` serve training, ``simulate/`` runs all ranks in one process, ``measure/`` measures
hardware.
"""
