"""``pack``: parts of a concatenation of flattened tensors are computed in place in the result, unless something else reads them."""

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
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from fxshard._torch_compat.inductor import pack as packing
from fxshard._torch_compat.inductor.inductor import Compiled, inductor_compile, inductor_decompositions
from fxshard._torch_compat.inductor.pack import pack, pack_in_place
from tests.distributed.scenarios import run_scenarios

c10d = torch.ops._c10d_functional
SIDE = 256


def products(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """A concatenation of two products of SIDE squared, a sum over rows, and a view of a third product."""
    return (torch.cat([(a @ b).reshape(-1), c.sum(0).reshape(-1), (b @ a).view(4, -1).reshape(-1), (a @ c).view(-1)]),)


def traced(function: Callable[..., object], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, inductor_decompositions(), "fake")(*inputs)


def compiled(module: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    return list(run_of(module)(list(inputs)))


@config.patch(force_disable_caches=True)
def run_of(module: fx.GraphModule) -> Compiled:
    return inductor_compile(module, [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"])


def squares() -> list[Tensor]:
    return [torch.randn(SIDE, SIDE, dtype=torch.float64) for _ in range(3)]


def parts_of(module: fx.GraphModule) -> list[str]:
    """The operators that compute the parts of each ``pack`` in the graph."""
    pack_in_place(module.graph)
    nodes = module.graph.find_nodes(op="call_function", target=torch.ops.fxshard.pack.default)
    return [str(part.target) for node in nodes for part in node.args[0]]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
def test_pack_concatenates_flattened_parts(shapes: list[list[int]]) -> None:
    parts = [torch.randn(shape).t() if len(shape) == 2 else torch.randn(shape) for shape in shapes]
    assert torch.equal(pack(parts), torch.cat([part.flatten() for part in parts]))


def test_products_are_packed() -> None:
    assert parts_of(traced(products, *squares())) == ["aten.mm.default", "aten.sum.dim_IntList", "aten.mm.default", "aten.mm.default"]


def test_concatenations_of_other_shapes_or_dtypes_stay() -> None:
    def joined(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        wide = torch.cat([(a @ b).reshape(4, -1), b.reshape(4, -1)])
        return wide, torch.cat([a.reshape(-1), b.reshape(-1).float()])

    module = traced(joined, *squares()[:2])
    assert not parts_of(module)
    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)) == 2


def odd_parts(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Parts: inputs, results of operators with several, of kernels that choose their strides, one twice, an empty one, a single one."""
    variance, mean = torch.var_mean(a, 1)
    left, right = (a @ b).split(128)
    image = torch.nn.functional.conv2d(a.view(1, 1, SIDE, SIDE), b[:3, :3].reshape(1, 1, 3, 3))
    parts = (a, variance, mean, right, left.t(), image, right, a[:0], b[0], (b @ a).to(a.dtype))
    return torch.cat([part.reshape(-1) for part in parts]), torch.cat([variance, mean]), torch.cat([(a @ a).reshape(-1)])


def test_parts_of_all_kinds() -> None:
    inputs = squares()[:2]
    for found, expected in zip(compiled(traced(odd_parts, *inputs), inputs), odd_parts(*inputs), strict=True):
        torch.testing.assert_close(found, expected)


def allocated(run: Callable[[], object], path: Path) -> int:
    """Bytes that torch allocates during ``run()``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    recorded.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return sum(e["args"]["Bytes"] for e in events if e["name"] == "[memory]" and e["args"]["Bytes"] > 0)


@pytest.mark.parametrize("copied", [False, True])
def test_nothing_is_copied(copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the result is allocated; without ``pack`` the three products are, too."""
    if copied:
        monkeypatch.setattr(packing, "pack_in_place", lambda graph: None)
    inputs, module = squares(), traced(products, *squares())
    run = run_of(module)
    torch.testing.assert_close(run(list(inputs))[0], products(*inputs)[0])
    product = SIDE * SIDE * 8
    total = 3 * product + SIDE * 8
    most = allocated(lambda: run(list(inputs)), tmp_path / "trace.json")
    assert most >= total + 2 * product if copied else total <= most < total + product / 2


def read_around_a_reduction() -> None:
    """A part of an in-place all-reduce that others read before and after it has its own values, not the sums.

    The parts are a product, one through a copy that Inductor removes, and a vector, which is flat already.
    """
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(dist.get_rank())
    inputs = squares()[:2]

    def around(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        parts = [a @ b, b @ a, a.sum(0)]
        before = parts[0].sin()
        flat = [parts[0].reshape(-1), parts[1].clone().reshape(-1), parts[2].reshape(-1)]
        summed = c10d.wait_tensor(c10d.all_reduce(torch.cat(flat), "sum", group.group_name))
        pieces = summed.split([part.numel() for part in parts])
        after = [part.cos() * piece.view_as(part) for part, piece in zip(parts, pieces, strict=True)]
        return before, summed, *after, parts[1].reshape(-1)[1:]

    for found, expected in zip(compiled(traced(around, *inputs), inputs), around(*inputs), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.distributed
def test_a_reduction_in_place_changes_no_value_that_is_read(tmp_path: Path) -> None:
    said = run_scenarios({"read": read_around_a_reduction}, 2, tmp_path)
    assert said == {"read": ""}, said["read"]
