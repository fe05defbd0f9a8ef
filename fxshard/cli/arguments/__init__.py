"""Texts of the command line as values: FILE.py:FACTORY, dynamic dims and sizes, words for axes.

In: the user's text; out: models, dims, plans; OptionError says what cannot be read. Read factory.py.
"""
