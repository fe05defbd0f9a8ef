"""Lowered programs as data: a local graph per size class, its collectives, and the plan that they follow.

In: the result of the pass ``lower``. Out: ``ShardedProgram``, which the passes after lowering rewrite and the runtime compiles. Read
sharded_program.py, then verify_program.py, which checks the invariants of every program.
"""
