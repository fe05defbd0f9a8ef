"""The time from a model to a plan, stage by stage, compared with a trace of the same model by torch alone: ``python -m bench.planning``."""
