"""Private names of Dynamo (torch 2.13).

One mechanism a file; each says what it patches or reads, and why no public name does.
"""
