"""The ``fxshard`` command.

In: the command line and ``FILE.py:FACTORY``; out: text on a terminal, files, and an exit code.
Read main.py, which declares the commands; longer ones have a file of their own, such as check_op.py. ``arguments`` reads the user's texts,
``console`` has what all commands share.
"""
