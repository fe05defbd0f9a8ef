"""A rank's program compiled for a GPU that this machine does not have.

In: a lowered program, a target (``sm_90``) and a rank; out: a report of its kernels, calls and collectives. Nothing is launched.
Read compile_for.py, then report.py.
"""
