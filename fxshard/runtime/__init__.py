"""What runs next to the user's program."""
