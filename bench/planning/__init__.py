"""From a model to a plan, stage by stage, beside torch's bare trace of the same model: ``python -m bench.planning``."""
