"""Views: what a plan or a program says, as text and plain data, computed from the fields of its file alone.

In: the fields of a plan's JSON (``plans/plan_json.py``), from a file or from a live plan. Out: texts. Nothing here imports torch, so that
``fxshard inspect`` answers at once. Read plan_view.py (the fields and what follows from them), reasons.py, then screen.py.
"""
