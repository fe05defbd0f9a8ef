"""Passes on programs, each of which can be left out: schedule, chunk and bucket.

In: a ``ShardedProgram``; out: one that computes the same, in less predicted time.
Read optimise.py, which runs them; the ``cut_*`` files and follow_cut.py serve chunk.py.
"""
