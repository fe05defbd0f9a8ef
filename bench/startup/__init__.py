"""How long a start takes: until the first step is done, cold and warm."""
