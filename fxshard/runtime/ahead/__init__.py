"""Programs compiled ahead of time to machine code, which runs without Inductor, and in C++ without Python.

In: a program; out: one compiled model per size class, and on a rank a ``CompiledProgram`` that runs it.
Read compile_ahead.py, then load_ahead.py; ``archive/compiled.py`` stores the models.
"""
