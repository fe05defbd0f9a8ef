"""What every command has in common: its parser with an example and ``--json``, exit codes, plain output, child processes.

In: functions of the commands; out: what a terminal or a pipe sees. Read commands.py, then exit_codes.py.
"""
