"""Compiled graphs are called without torch's wrapper frames, except where these frames do something."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.wrap import inductor_compiled_code
from torch._inductor import config, debug
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import align_inputs_from_check_idxs
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import profile
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode

from fxshard._torch_compat.inductor.inductor import inductor_compile, without_frames


def doubled(x: Tensor, y: Tensor) -> tuple[Tensor]:
    return ((x @ y).sin() + x,)


def compiled_graph() -> Any:
    module = make_fx(doubled, tracing_mode="fake")(torch.ones(4, 4), torch.ones(4, 4))
    made = inductor_compile(module, [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"])
    assert type(made) is CompiledFxGraph
    return made


def misaligned(*size: int) -> Tensor:
    """A tensor that starts 4 bytes after a multiple of 64."""
    values = torch.randn(torch.Size(size).numel() + 1)[1:].view(size)
    assert values.data_ptr() % 16
    return values


def test_the_same_numbers_without_the_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    run = without_frames(compiled_graph())

    def refused(self: Any, inputs: Any) -> Any:
        raise AssertionError("the wrapper frames were called")

    monkeypatch.setattr(CompiledFxGraph, "__call__", refused)
    for make in (torch.randn, misaligned):
        x, y = make(4, 4), make(4, 4)
        inputs = [x, y]
        torch.testing.assert_close(run(inputs)[0], doubled(x, y)[0])
        assert inputs == []  # so that no input lives longer than needed


def test_the_compiled_graph_lives_as_long_as_its_code() -> None:
    """Freeing the graph would free the partitions of its code."""
    made = compiled_graph()
    run, seen = without_frames(made), weakref.ref(made)
    del made
    gc.collect()
    assert seen() is not None
    torch.testing.assert_close(run([torch.ones(4, 4), torch.ones(4, 4)])[0], doubled(torch.ones(4, 4), torch.ones(4, 4))[0])
    del run
    gc.collect()
    assert seen() is None


def test_the_copy_of_misaligned_inputs_stays() -> None:
    """If code writes to an input that may be misaligned, torch copies it within the frames, and copies the result back."""
    made, seen = compiled_graph(), []

    def writing(inputs: list[Tensor]) -> tuple[Tensor]:
        seen.append(inputs[0].data_ptr() % 16)
        inputs[0] += 1
        return (inputs[0],)

    made.current_callable = align_inputs_from_check_idxs(writing, [0], OrderedSet([0]))
    x = misaligned(8)
    want = x + 1
    without_frames(made)([x])
    assert seen == [0] and torch.equal(x, want)


def test_with_wrapped_regions_modes_see_one_call_of_compiled_code() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    calls = []

    @inductor_compiled_code.py_impl(Seen)
    def noted(mode: Any, func: Any, inputs: Any, **named: Any) -> Any:
        calls.append(func)
        return func(inputs)

    try:
        with config.patch(wrap_inductor_compiled_regions=True, force_disable_caches=True):
            run = without_frames(compiled_graph())
        with Seen():
            run([torch.ones(4, 4), torch.ones(4, 4)])
    finally:
        del inductor_compiled_code.python_key_table[Seen]
    assert len(calls) == 1


@pytest.mark.parametrize("imported", [True, False])
def test_the_profiler_sees_the_graph(imported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where code from a cache runs, for which most of Inductor is not imported: torch's own frames fail there."""
    run = without_frames(compiled_graph())
    if not imported:
        monkeypatch.delitem(sys.modules, "torch._inductor.debug")
        monkeypatch.delattr(torch._inductor, "debug")
    with profile() as found:
        run([torch.ones(4, 4), torch.ones(4, 4)])
    assert [e.name for e in found.events() if "CompiledFxGraph" in e.name]


def test_the_record_of_graph_execution_has_the_graph() -> None:
    run = without_frames(compiled_graph())
    with debug.record_and_log_graph_execution_order():
        run([torch.ones(4, 4), torch.ones(4, 4)])
        assert debug.GRAPH_EXECUTION_ORDER is not None and len(debug.GRAPH_EXECUTION_ORDER) == 1


def test_other_devices_and_other_callables_are_unchanged() -> None:
    made, plain = compiled_graph(), make_boxed_func(doubled)
    made.device_types = OrderedSet(["cpu", "cuda"])
    assert without_frames(made) is made and without_frames(plain) is plain
