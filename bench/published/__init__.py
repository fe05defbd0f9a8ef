"""The cost model held against published measurements: predicted over measured, for collectives and for whole training steps."""
