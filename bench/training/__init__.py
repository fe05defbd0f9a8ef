"""Training steps of small models on gloo ranks, beside ``parallelize_module``, FSDP2 and DDP: ``python -m bench.training``."""
