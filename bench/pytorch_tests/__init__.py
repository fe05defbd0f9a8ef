"""Runs a test file of PyTorch as it is, and with every ``torch.compile`` sent to fxshard: ``python -m bench.pytorch_tests FILE``."""
