"""``fxshard::flex_attention``: attention whose mask and scores are functions of the user, as one node.

functions.py: these functions as text, which an operator can take as an argument. attention.py: the operator and its backward.
varlen.py: ``fxshard::varlen_attention``, within the sequences of a packed batch.
"""
