"""``python -m bench.fuzz``: mutated programs, plans, checkpoints, hardware and solver files, and traces, read as their readers read them.

Each is refused by a FxshardError, or accepted. A format with hashes must then give what the undamaged file holds; what any other format
gives must be the same once written and read again. ``fxshard inspect`` shows a plan if its reader accepts it, and only then. Nothing may
raise anything else, run for longer than a few seconds, or take a gigabyte.
Read subjects.py (the files and their readers), then mutations.py, shown.py and run.py.
"""
