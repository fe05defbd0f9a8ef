"""``parallelize``: the same module, sharded.

In: a module, a device mesh and the user's wishes; out: the module with DTensors for parameters and a compiled forward.
Read module.py, then parameters.py and module_state.py.
"""
