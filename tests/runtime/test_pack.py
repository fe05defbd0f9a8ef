"""What is flattened and joined is computed where it lies in the joined tensor, unless somebody else reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from fxshard._torch_compat import pack as packing
from fxshard._torch_compat.inductor import inductor_compile
from fxshard._torch_compat.pack import pack, pack_in_place
from tests.distributed.ranks import run_scenarios

c10d = torch.ops._c10d_functional
SIDE = 256


def products(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Two products of SIDE squared, a sum over rows, and a view of a third product, one behind the other."""
    return (torch.cat([(a @ b).reshape(-1), c.sum(0).reshape(-1), (b @ a).view(4, -1).reshape(-1), (a @ c).view(-1)]),)


def traced(function: Callable[..., object], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def compiled(module: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    run = inductor_compile(module, [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"])
    return list(run(list(inputs)))


def squares() -> list[Tensor]:
    return [torch.randn(SIDE, SIDE, dtype=torch.float64) for _ in range(3)]


def parts_of(module: fx.GraphModule) -> list[str]:
    """What each ``pack`` of the graph is given, by the operator that makes it."""
    pack_in_place(module.graph)
    nodes = module.graph.find_nodes(op="call_function", target=torch.ops.fxshard.pack.default)
    return [str(part.target) for node in nodes for part in node.args[0]]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
def test_parts_one_behind_another(shapes: list[list[int]]) -> None:
    parts = [torch.randn(shape).t() if len(shape) == 2 else torch.randn(shape) for shape in shapes]
    assert torch.equal(pack(parts), torch.cat([part.flatten() for part in parts]))


def test_products_are_what_is_packed() -> None:
    assert parts_of(traced(products, *squares())) == ["aten.mm.default", "aten.sum.dim_IntList", "aten.mm.default", "aten.mm.default"]


def test_what_others_read_is_seen_through_its_view() -> None:
    """By itself, through another view, returned, given, or twice in one row."""

    def read(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        one, two, three, four = a @ b, b @ a, a @ a, b @ b
        return torch.cat([x.reshape(-1) for x in (one, two, three, a, four, four)]), one.sin(), two.t(), three

    assert set(parts_of(traced(read, *squares()[:2]))) == {"aten.view.default"}


def test_what_is_not_flattened_stays_joined() -> None:
    def joined(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        wide = torch.cat([(a @ b).reshape(4, -1), b.reshape(4, -1)])
        return wide, torch.cat([a.reshape(-1), b.reshape(-1).float()]), torch.cat([a[0], b[0]])

    module = traced(joined, *squares()[:2])
    assert not parts_of(module)
    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)) == 3


def allocated(run: Callable[[], object], path: Path) -> int:
    """Bytes that torch's allocator gave out meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    recorded.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return sum(e["args"]["Bytes"] for e in events if e["name"] == "[memory]" and e["args"]["Bytes"] > 0)


@pytest.mark.parametrize("copied", [False, True])
def test_nothing_is_copied(copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated is the joined tensor; without ``pack`` the three products too."""
    if copied:
        monkeypatch.setattr(packing, "pack_in_place", lambda graph: None)
    inputs, module = squares(), traced(products, *squares())
    run = inductor_compile(module, [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"])
    torch.testing.assert_close(run(list(inputs))[0], products(*inputs)[0])
    product = SIDE * SIDE * 8
    total = 3 * product + SIDE * 8
    most = allocated(lambda: run(list(inputs)), tmp_path / "trace.json")
    assert most >= total + 2 * product if copied else total <= most < total + product / 2


def read_around_a_reduction() -> None:
    """A product that is reduced with others in place, read before and after by somebody else: its own values, not the sums."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(dist.get_rank())
    inputs = squares()[:2]

    def around(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        one, two = a @ b, b @ a
        before = one.sin()
        summed = c10d.wait_tensor(c10d.all_reduce(torch.cat([one.reshape(-1), two.reshape(-1)]), "sum", group.group_name))
        return before, summed, one.cos() * summed[: one.numel()].view_as(one), two.reshape(-1)[1:]

    for found, expected in zip(compiled(traced(around, *inputs), inputs), around(*inputs), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.distributed
def test_a_reduction_in_place_changes_nothing_that_is_read(tmp_path: Path) -> None:
    said = run_scenarios({"read": read_around_a_reduction}, 2, tmp_path)
    assert said == {"read": ""}, said["read"]
