"""The bytes of our redistributions beside those of torch's own planners: ``python -m bench.redistribution``."""
