"""DTensors and other tensor classes in and around a graph that Dynamo captured.

In: arguments and calls that are not plain tensors; out: the plain tensors, layouts and regions that the planner knows, and results of the
same classes. Read dtensor_rules.py, local_parts.py, tensor_classes.py, loss_parallel.py.
"""
