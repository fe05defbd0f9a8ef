"""Process groups and host memory on one machine.

In: torch's process groups; out: collectives that a backend lacks, and settings of gloo and of the allocator.
Each file can be read by itself.
"""
