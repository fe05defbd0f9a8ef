"""The solver on published instances: cost against the best known, bound, gap and seconds."""
