"""What ranks settle among themselves.

In: a process group and its store; out: agreement before the first collective, signs of life, and errors that name a lost rank.
Read agreement.py and launch.py, then watchdog.py and heartbeat.py.
"""
