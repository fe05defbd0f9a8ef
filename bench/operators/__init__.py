"""Operator coverage compared with DTensor's, over torch's own list of operators with example inputs (``op_db``): ``python -m
bench.operators``."""
