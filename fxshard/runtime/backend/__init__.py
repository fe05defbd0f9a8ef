"""``torch.compile(backend="fxshard")``.

In: graphs as Dynamo captures them; out: callables that plan, shard and run each graph.
Read backend.py, dynamo_graph.py and graph_outputs.py.
"""
