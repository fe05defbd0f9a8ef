"""Attributes that a forward sets, on two ranks, against one device: counters, flags, stored tensors; and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.errors import PlanError, RunError
from tests.distributed.logged import logged
from tests.distributed.module.test_hooks import close
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


class Remembers(nn.Module):
    """Counts calls, stores tensors, lists and dicts, and computes something else in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.calls, self.total, self.first, self.last = 0, 10, True, None
        self.seen: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.known: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total = self.total + 2 * self.calls
        self.last = self.up(x)
        self.shape = (x.shape[0], "rows")
        self.seen.append(self.last.detach())
        self.losses.clear()
        self.losses.append(self.last.square().mean())
        self.known["half"] = self.last / 2
        if self.first:
            self.first = False
            return self.last
        return self.last.relu()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Remembers(), Remembers()])
        self.down = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = self.down(part(x))
        return x


class Counts(nn.Module):
    """Computes with a counter, which it increments up to ``most``."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.k, self.most, self.up = 0, most, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.k < self.most:
            self.k += 1
        return self.up(x) * self.k


class Carries(nn.Module):
    """Adds a tensor that it stored in the previous call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.h = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.h = y.detach() if self.h is None else self.h * 0.5 + y.detach()
        return y + self.h


def batch(rows: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(make: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    reference = make().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return fxshard.parallelize(copy.deepcopy(reference), (batch(),), mesh, compiler="eager", **options), reference


def remembered() -> None:
    """Several batch sizes, and a deep copy: three programs, whatever the counters say."""
    model, reference = pair(Stack, input_layouts="S(0)", pins={"parts.0.up.weight": "S(0)"})
    for i, rows in enumerate((4, 4, 6, 8, 2, 8)):
        close(model(batch(rows, i)), reference(batch(rows, i)))
        for have, want in zip(model.parts, reference.parts, strict=True):
            for name in ("calls", "total", "first", "shape", "last", "seen", "losses", "known"):
                have_it, want_it = getattr(have, name), getattr(want, name)
                close([*have_it.values()], [*want_it.values()]) if name == "known" else close(have_it, want_it)
        sum(p.losses[0] for p in model.parts).backward()
        sum(p.losses[0] for p in reference.parts).backward()
    assert model.parts[0].calls == 6 and model.parts[0].total == 52 and len(model.parts[0].seen) == 6
    close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    assert len(model.forward.programs) == 3  # for the first call, for other calls of its sizes, and for any sizes
    with torch.no_grad():  # torch cannot deepcopy a tensor with a grad_fn
        close(model(batch()), reference(batch()))
        other, others = copy.deepcopy(model), copy.deepcopy(reference)
        close(other(batch()), others(batch()))
    assert (other.parts[1].calls, model.parts[1].calls) == (8, 7) and other.forward.programs == model.forward.programs


def computed_with() -> None:
    """The forward changes a number and computes with it: each value makes a program; too many values are refused."""
    model, reference = pair(lambda: Counts(3))
    for i in range(5):
        close(model(batch(seed=i)), reference(batch(seed=i)))
    for m in (model, reference):
        m.eval()
    close(model(batch()), reference(batch()))
    assert model.k == 3 and len(model.forward.programs) == 3
    model, reference = pair(lambda: Counts(1000))
    for i in range(8):
        close(model(batch(seed=i)), reference(batch(seed=i)))
    with pytest.raises(RunError, match=r"sets its attribute k and computes(.|\n)*test_attributes.py:\d+(.|\n)*register_buffer\('k'"):
        model(batch())


def carried() -> None:
    """Each call reads the tensor that the call before stored; too many values are refused."""
    model, reference = pair(Carries)
    with torch.no_grad():
        for i in range(6):
            close(model(batch(seed=i)), reference(batch(seed=i)))
            close(model.h, reference.h)
        with pytest.raises(RunError, match=r"sets its attribute h and(.|\n)*register_buffer\('h'"):
            for i in range(4):
                model(batch(seed=i))


class Assigned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.log = nn.Linear(4, 4), torch.tensor(2.0), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(len(self.log))
        return self.up(x) * self.scale


def assigned() -> None:
    """The next call sees a tensor that the user assigned; a log line names a list that the forward reads and changes."""
    with logged() as said:
        model, reference = pair(Assigned)
    assert any("changes Python objects (self.log)" in text for text in said)
    for value in (2.0, 3.0, 5.0):
        for m in (model, reference):
            m.scale = torch.tensor(value)
        close(model(batch()), reference(batch()))
    assert model.log == [0]


def accumulated() -> None:
    """Attributes are set within ``no_sync`` too; a plan that does not know them is refused."""
    model, reference = pair(Stack, input_layouts="S(0)", pins={"parts.0.up.weight": "R"})
    with fxshard.no_sync(model):
        model(batch()).square().sum().backward()
    reference(batch()).square().sum().backward()
    for m in (model, reference):
        (m(batch(seed=1)) + m.parts[1].losses[0]).sum().backward()
    close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    assert model.parts[0].calls == 2
    plan = fxshard.plan(Stack().double(), (batch(),), fxshard.Mesh({"tp": 2}), input_layouts="R", output_layouts="R")
    with pytest.raises(PlanError, match=r"stores in attributes \(parts.0.calls(.|\n)*let parallelize plan"):
        pair(Stack, plan=plan)


found, test_two_ranks = two_ranks(remembered, computed_with, carried, assigned, accumulated)
