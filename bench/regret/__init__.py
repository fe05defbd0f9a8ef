"""What plans lose if the prices of their preset are wrong within the errors that it states: ``python -m bench.regret``."""
