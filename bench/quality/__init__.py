"""The plans that fxshard finds beside known ones, evaluated by code that shares nothing with the solver: ``python -m bench.quality``."""
