"""Measurements of the present machine or cluster.

In: a device and a process group. Out: microseconds of operators and collectives, and a hardware file. Read calibrate.py, then measure.py.
"""
