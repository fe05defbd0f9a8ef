"""fxshard: a sharding compiler for PyTorch, as FX graph passes."""
