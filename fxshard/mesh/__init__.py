"""Device meshes and the hardware that they stand on.

In: axis names and sizes, a preset's name or a hardware file; out: ``Mesh`` and ``Hardware``, speeds in bytes or FLOPs per second.
Read mesh.py, then hardware.py and hardware_file.py.
"""
