"""Known plans compared with the plans that fxshard finds, each in a setting for which it is known to be best: ``python -m
bench.known_plans``."""
