"""The demo's training under random kills: ends where an undisturbed run ends, bit for bit."""
