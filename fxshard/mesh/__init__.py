"""Device meshes and the hardware beneath them.

In: axis names and sizes, a preset's name or a hardware file. Out: ``Mesh`` and ``Hardware``, with speeds in bytes or FLOP per second.
Read mesh.py, then hardware.py and hardware_file.py.
"""
