"""From a rank's graph to callables, by Inductor or eager.

In: a bound program; out: a ``CompiledProgram`` on local tensors, differentiable if it trains, from a cache if possible.
Read compile.py; outline.py compiles repeated layers once, artefact_cache.py keeps compiled code on disk.
"""
