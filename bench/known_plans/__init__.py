"""Known plans beside what fxshard finds in the setting in which each is known to be best: ``python -m bench.known_plans``."""
