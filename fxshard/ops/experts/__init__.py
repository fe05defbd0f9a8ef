"""Operators of mixtures of experts: ``rows`` move to the ranks of experts and back, and ``products`` multiply each row by its expert's
matrix."""
