"""The time until the first step is done, with empty and with filled caches."""
