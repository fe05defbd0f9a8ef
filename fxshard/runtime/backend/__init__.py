"""``torch.compile(backend="fxshard")``.

In: graphs that Dynamo captured; out: callables that plan, shard and run each graph.
Read backend.py, dynamo_graph.py, local_parts.py and graph_outputs.py.
"""
