"""One command for a machine with 1 to 8 GPUs, which checks what no CPU can: ``python -m bench.gpu`` (``make gpu``)."""
