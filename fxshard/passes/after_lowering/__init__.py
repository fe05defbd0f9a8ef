"""Optional passes on programs: schedule, chunk and bucket.

In: a ``ShardedProgram``. Out: an equivalent program with less predicted time. Read optimise.py, which runs them; the ``cut_*`` files and
follow_cut.py belong to chunk.py.
"""
