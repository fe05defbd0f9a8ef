"""A Llama's training step on two gloo ranks, compared with ``parallelize_module``, FSDP2 and DDP: ``python -m bench.training``."""
