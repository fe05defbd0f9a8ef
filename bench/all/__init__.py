"""``make bench``: step times, planning, plan quality, the solver, overhead and memory in one command: ``python -m bench.all``.

Read ``figures`` (what is kept), then the parts (``steps``, ``planning``, ``plans``, ``solver``, ``small``), ``page``, ``__main__``.
"""
