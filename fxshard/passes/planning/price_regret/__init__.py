"""What a plan loses if prices are wrong.

In: a plan, its annotated graph, an error and a number of draws; out: a ``PriceRegret``. Read regret.py; repriced.py prices a plan anew.
"""
