"""Private names of DTensor (torch 2.13).

One mechanism per file. Each says what it patches or reads, and what would replace it.
"""
