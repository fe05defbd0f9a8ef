"""``torch.compile(backend="fxshard")``.

In: graphs that Dynamo captured; out: callables that plan, shard and run each graph.
Read backend.py, dynamo_graph.py, graph_outputs.py, and dtensors/ for DTensors and other tensor classes.
"""
