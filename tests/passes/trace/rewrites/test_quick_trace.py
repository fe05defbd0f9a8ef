"""Shortcuts that make a trace quick change nothing: compared with torch's own tables, memory and code positions."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from fxshard._torch_compat.dynamo.capture import without_headers
from fxshard._torch_compat.imports.sources import module_of
from fxshard._torch_compat.inductor.decompositions import core_decompositions
from fxshard.passes.trace import trace as module
from fxshard.passes.trace.rewrites.probe import NEW, probe, returns_new_memory
from tests.passes.tracing import Function


def test_decompositions_are_torchs_without_those_of_composite_operators() -> None:
    """A composite operator calls other operators and has no kernel of its own, neither for the CPU nor for meta."""
    from torch._decomp import core_aten_decompositions

    def has_kernel(op: Any, key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)

    ours = core_decompositions()
    torchs = {op: f for op, f in dict(core_aten_decompositions()).items() if isinstance(op, torch._ops.OpOverload)}
    assert ours.keys() <= torchs.keys() and torch.ops.aten.native_channel_shuffle.default in ours
    for op in torchs.keys() - ours.keys():
        assert has_kernel(op, "CompositeImplicitAutograd") or torch._C.DispatchKey.CompositeImplicitAutograd in op.py_kernels
        assert not has_kernel(op, "CPU") and not has_kernel(op, "Meta"), op


MADE: dict[Any, Callable[[torch.Tensor], Any]] = {
    functional.linear: lambda x: functional.linear(x, x),
    functional.cross_entropy: lambda x: functional.cross_entropy(x, x.argmax(1), reduction="none"),
    functional.mse_loss: lambda x: functional.mse_loss(x, x, reduction="none"),
    functional.nll_loss: lambda x: functional.nll_loss(x, x.argmax(1), reduction="none"),
    functional.layer_norm: lambda x: functional.layer_norm(x, (4,)),
}


def test_functions_listed_as_returning_new_memory_do() -> None:
    assert MADE.keys() == NEW
    for function in MADE.values():
        x = torch.rand(4, 4)
        assert function(x).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("forward", "plain"),
    [
        (lambda self, x: functional.linear(x, x), True),
        (lambda self, x: (functional.linear(x, x), {"loss": functional.mse_loss(x, x)}), True),
        (lambda self, x: functional.linear(x, x).t(), False),
        (lambda self, x: (functional.linear(x, x), x), False),
        (lambda self, x: (y := functional.linear(x, x), y), False),
        (lambda self, x: (y := functional.linear(x, x), y.view(-1)), False),
    ],
)
def test_a_model_is_run_on_fakes_only_where_outputs_may_share_memory(forward: Any, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, said = [], []
    monkeypatch.setattr(module, "probe", lambda *given: ran.append(given) or probe(*given))
    monkeypatch.setattr(module, "returns_new_memory", lambda graph: said.append(returns_new_memory(graph)) or said[-1])
    args = (torch.rand(4, 4, requires_grad=True),)
    graph = module.trace(Function(forward), args)
    assert said == [plain] and bool(ran) is not plain
    monkeypatch.setattr(module, "returns_new_memory", lambda graph: False)
    assert module.trace(Function(forward), args).hash == graph.hash


def test_files_are_not_tokenised_unless_the_log_prints_where_a_call_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import output_graph, symbolic_convert

    asked: list[str] = []
    monkeypatch.setattr(symbolic_convert, "get_funcname", lambda file, line: asked.append(file))
    model, args = Function(lambda self, x: x + 1), (torch.rand(2),)
    module.trace(model, args)
    assert asked == []
    level = output_graph.trace_call_log.level
    output_graph.trace_call_log.setLevel(logging.DEBUG)
    try:
        module.trace(model, args)
    finally:
        output_graph.trace_call_log.setLevel(level)
    assert __file__ in asked
    with without_headers():
        assert symbolic_convert.get_funcname(__file__, 1) is None


def test_the_module_of_a_frame_is_the_one_that_inspect_finds() -> None:
    frame = sys._getframe()
    assert module_of(frame) is inspect.getmodule(frame) is sys.modules[__name__]
    outside: dict[str, Any] = {"sys": sys}
    exec("frame = sys._getframe()", outside)
    assert module_of(outside["frame"]) is None
