"""The solver on published instances: cost compared with the best known, bound, gap and seconds."""
