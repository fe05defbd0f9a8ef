"""The demo's training under random kills: its result equals that of an undisturbed run, bit for bit."""
