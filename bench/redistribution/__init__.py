"""The bytes of fxshard's redistributions compared with those of torch's own planners: ``python -m bench.redistribution``."""
