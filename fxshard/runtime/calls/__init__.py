"""What every front door does with a call: its options, its arguments, and which program serves it.

In: a user's call; out: local inputs for a compiled program, and its results as the user expects them.
Read options.py, inputs.py and runner.py; any_size.py says which program serves which sizes.
"""
