"""Process groups and host memory on one machine.

In: torch's process groups; out: the collectives that a backend lacks, and settings of gloo and of the allocator.
Every file stands alone.
"""
