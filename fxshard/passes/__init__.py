"""The passes, one a file; ``pipeline.py`` runs them in the order that stands there."""
