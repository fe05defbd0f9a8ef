"""Lowered programs as data: a local graph per size class, its collectives, and the plan that they follow.

In: what the pass ``lower`` makes; out: ``ShardedProgram``, which the passes after lowering rewrite and the runtime compiles.
Read sharded_program.py, then verify_program.py, which says what holds in every program.
"""
