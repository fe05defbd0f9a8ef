"""Faster imports of torch's compiler: what only its error messages and plots need is left out or put off."""
