"""A module that torch.export made has the planning graph of the model: its operators stand for the functions that the model calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard.passes.trace.trace import trace
from tests.passes.tracing import check_eager, targets


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        scores = torch.einsum("abc,adc->abd", self.out(y), x) + x @ y.transpose(1, 2)
        return F.cross_entropy(scores.transpose(1, 2), classes, label_smoothing=0.1) + F.nll_loss(
            F.log_softmax(scores[:, 0], -1), classes[:, 0]
        )


def test_an_exported_module_has_the_operators_of_the_model() -> None:
    torch.manual_seed(0)
    model, args = Attention().double(), (torch.rand(2, 5, 8, dtype=torch.float64), torch.randint(0, 5, (2, 5)))
    exported = torch.export.export(model, args).module()
    found, _ = check_eager(exported, *args)
    want = targets(trace(model, args))
    assert targets(found) <= want | {"aten.view.default", "aten.clone.default"}
    assert {name for name in want if name.startswith("fxshard")} <= targets(found)
