"""How ``parallelize`` and the backend handle a call: its options, its arguments, and the program that serves it.

In: a user's call; out: local inputs for a compiled program, and its results as the user expects them.
Read options.py, request_builder.py, inputs.py and runner.py. dynamic_sizes.py decides which program serves which sizes;
waiting.py stands for a module until its first call.
"""
