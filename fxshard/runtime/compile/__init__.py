"""From a rank's graph to callables, by Inductor or eager.

In: a bound program; out: a ``CompiledProgram`` on local tensors, differentiable where it trains, from a cache where one has it.
Read compile.py; outline.py finds what repeats itself, artefact_cache.py keeps compiled code.
"""
