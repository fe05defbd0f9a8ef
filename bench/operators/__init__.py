"""Operator coverage beside DTensor, over torch's own list of operators with example inputs: ``python -m bench.operators``."""
