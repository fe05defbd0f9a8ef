"""``parallelize``: the same module, sharded.

In: a module, a device mesh and options; out: the same module with DTensor parameters and a compiled forward.
Read module.py, then module_program.py, parameters.py and module_state.py.
"""
