"""An LSTM and a GRU on two gloo ranks, sharded by batch or by hidden size: with parallelize and under torch.compile."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from tests.distributed.backend.test_backend import close, mesh_of_two, sharded, train_both, whole
from tests.distributed.scenarios import two_ranks
from tests.models.zoo import lstm

pytestmark = pytest.mark.distributed


def trained(compiler: str, pins: dict[str, str]) -> None:
    """Two steps of SGD with a sharded product: losses, logits and parameters are those of one device."""
    model, args, _ = lstm(5)
    reference = copy.deepcopy(model)
    parallel = fxshard.parallelize(model, args, mesh_of_two(), pins=pins, compiler=compiler, cache=False)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.5) for m in (parallel, reference))
    for _ in range(2):
        for m, optimizer in ((parallel, ours), (reference, theirs)):
            optimizer.zero_grad()
            m(*args)[1].backward()
            optimizer.step()
        for have, want in zip(parallel(*args), reference(*args), strict=True):
            close(have, want)
    for (name, p), q in zip(parallel.named_parameters(), reference.parameters(), strict=True):
        assert name in dict(reference.named_parameters())
        close(whole(p), q)


def batch_through_inductor() -> None:
    trained("inductor", {"einsum": "S(1)"})


def hidden_in_eager_mode() -> None:
    trained("eager", {"einsum_1": "S(2)"})


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


def under_torch_compile() -> None:
    """By default Dynamo breaks the graph at a GRU, which then runs unsharded on each rank; with ``allow_rnn`` the graph contains it."""
    x = torch.randn(5, 3, 4)
    for look_into, pins in ((False, {"einsum": "S(0)"}), (True, {"einsum": "S(1)"})):
        torch._dynamo.reset()
        model = Last()
        step: Any = lambda m: m(x).square().mean()  # noqa: E731
        with torch._dynamo.config.patch(allow_rnn=look_into):
            train_both(model, sharded(model, pins=pins), copy.deepcopy(model), step)


found, test_two_ranks = two_ranks(batch_through_inductor, hidden_in_eager_mode, under_torch_compile)
