"""The ``fxshard`` command.

In: the command line and ``FILE.py:FACTORY``; out: text on a terminal, files, and an exit code.
Read main.py, which declares the commands; check_op.py is one of them. factory.py loads the user's model, dynamic_text.py and solve_file.py
parse what their commands are given.
"""
