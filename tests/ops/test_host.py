"""``from_host`` copies to the device for which a program is bound, whatever else the machine has."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.ops.host import counting
from fxshard.runtime.rank_graph.kernels import device_graph

from_host = torch.ops.fxshard.from_host.default


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_copy_stays_on_the_cpu_where_there_is_a_gpu(device: torch.device | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    value = torch.arange(6.0)
    with counting() as traffic:
        made = from_host(value, "forward", device)
    assert torch.equal(made, value) and made.data_ptr() != value.data_ptr()
    assert (traffic.inward, traffic.outward, traffic.copies) == (24, 0, 1)


def test_a_copy_is_on_another_device() -> None:
    assert from_host(torch.ones(3), "backward", torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_bound_graph_names_the_device(device: str) -> None:
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(4, 3)
    graph.output(graph.call_function(from_host, (x, "forward")))
    traced = device_graph(fx.GraphModule(nn.Module(), graph), torch.device(device), on_host=frozenset({0}))
    given, copied, _ = traced.graph.nodes
    assert given.meta["val"].device.type == "cpu"
    assert copied.meta["val"].device.type == device and copied.args[2] == torch.device(device)
