"""What an optimiser costs: bytes of its state, microseconds of its step.

In: the sizes of parameters' shards and the optimiser's class; out: bytes on a rank, and the time of a step beside forward and backward.
Read optimizer_state.py, then optimizer_time.py.
"""
