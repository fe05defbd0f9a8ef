"""Coordination of ranks outside of collectives.

In: a process group and its store. Out: agreement before the first collective, heartbeats, and errors that name a lost rank. Read
agreement.py and launch.py, then watchdog.py and heartbeat.py.
"""
