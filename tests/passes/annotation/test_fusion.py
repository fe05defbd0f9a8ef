"""The memory traffic that fusion leaves, on graphs whose kernels can be counted by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxshard
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.annotation.fusion import traffic_of
from fxshard.passes.trace.trace import trace


def bytes_moved(model: nn.Module, *args: Tensor, train: bool = False) -> dict[str, float]:
    """Bytes that each fused operator moves, by node, in a graph."""
    graph = trace(model, args, train=train)
    weights, found = traffic_of(graph), {}
    for node in (n for n in graph.nodes if n.name in weights):
        values = [n.meta["val"] for n in (*node.all_input_nodes, node)]
        if len(values) == len(weights[node.name]):
            found[node.name] = sum(w * v.numel() * v.element_size() for w, v in zip(weights[node.name], values, strict=True))
    return found


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * x).relu()


def test_a_chain_reads_its_argument_once_and_writes_its_result_once() -> None:
    assert sum(bytes_moved(Chain(), torch.randn(100, 10)).values()) == 2 * 4000


class Between(nn.Module):
    """y is read on both sides of a product."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        y = x + w
        return (y @ w).relu() + y


def test_a_product_ends_a_kernel() -> None:
    """First kernel: reads two, writes one. Second: reads the product and y, writes one."""
    x = torch.randn(50, 50)
    assert sum(bytes_moved(Between(), x, x.clone()).values()) == 6 * 50 * 50 * 4


class Gate(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).sin() @ w).sum()


def test_what_follows_from_one_value_is_computed_again_in_the_backward() -> None:
    """The sine is written for the second product; the backward's kernel reads the product, which is in memory, and not a saved cosine."""
    x = torch.randn(30, 30, requires_grad=True)
    moved = bytes_moved(Gate(), x, torch.randn(30, 30, requires_grad=True), train=True)
    assert moved["sin"] == 2 * 3600 and moved["cos"] == 0
    assert moved["mul"] >= 2 * 3600, "it reads the product, and writes"


def test_only_hardware_with_an_architecture_fuses() -> None:
    graph = trace(Chain(), (torch.randn(8, 8),), train=False)
    for hardware, fuses in (("cpu", False), ("h100", True)):
        calls = annotate(graph, fxshard.Mesh({"a": 2}, hardware)).calls
        assert all((call.traffic is not None) == fuses for call in calls.values())
