"""Data parallelism is possible at any batch size: the rules of what models consist of shard a batch whose size is a symbol."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard

MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "layer norm": lambda: nn.LayerNorm(8),
    "without a weight": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "rms norm": lambda: nn.RMSNorm(8),
    "group norm": lambda: nn.Sequential(nn.Unflatten(1, (4, 2)), nn.GroupNorm(2, 4), nn.Flatten()),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "softmax": lambda: nn.Softmax(-1),
    "log softmax": lambda: nn.LogSoftmax(-1),
    "dropout": lambda: nn.Dropout(0.5),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 2, 3, padding=1), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(4, 8)
    ),
    "max pool": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(4, 8)),
    "attention": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten()),
    "gated": lambda: nn.Sequential(nn.Linear(8, 16), nn.GLU(), nn.PReLU()),
    "cosine": lambda: Normalised(),
    "sorted": lambda: Sorted(),
    "bilinear": lambda: Twice(),
}


class Normalised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * x.std(-1, keepdim=True) + torch.cumsum(x, -1).logsumexp(-1, keepdim=True)


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values + torch.cat([x.topk(4, -1).values, x[:, ::2]], -1).clamp(min=-1) + x.amax(-1, keepdim=True)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, x.flip(-1)) + torch.einsum("bi,bj->bij", x, x).sum(-1)


class Loss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(5, 8), inner, nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inner(x + self.table(target))), target)


RELATED = ("without a weight", "rms norm", "log softmax", "max pool", "gated", "cosine")
"""Much like others; not in the suite."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in RELATED else []) for name in MODULES])
def test_a_batch_of_any_size_is_sharded(name: str) -> None:
    model, call = Loss(MODULES[name]()), (torch.randn(9, 8), torch.randint(0, 3, (9,)))
    batch = {"args[0]": {0: "batch"}, "args[1]": {0: "batch"}}
    program = fxshard.export(model, call, fxshard.Mesh({"dp": 2}), parallel={"dp": "ddp"}, train=True, dynamic_shapes=batch)
    (size,), ends = program.sizes, zip(program.inputs, program.input_layouts, strict=True)
    assert size.unit == 1 and [str(layout) for end, layout in ends if end.kind == "input"] == ["S(0)", "S(0)"]
