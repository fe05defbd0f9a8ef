"""Compiled code depends on the processor's instructions: code from a folder that another processor has filled is not taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config, cpu_vec_isa
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.utils import fresh_cache
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard._torch_compat.inductor import inductor
from fxshard._torch_compat.inductor.code_cache import settings_of_inductor
from fxshard._torch_compat.inductor.cpp import instructions, instructions_in_key

X = torch.linspace(-2, 2, 200)


@contextlib.contextmanager
def limited_to(limit: str | None) -> Iterator[None]:
    """A processor, or an environment, with these instructions only; None: all that this processor has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        if limit is not None:
            patch.setenv("ATEN_CPU_CAPABILITY", limit)
        yield


def compiled() -> torch.Tensor:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph: fx.GraphModule = make_fx(lambda x: (torch.exp(x) * 2 + x,))(mode.from_tensor(X))
    run = inductor.inductor_compile(graph, [mode.from_tensor(X)])
    assert run is not None
    return run([X.clone()])[0]


@pytest.mark.parametrize("limit", ["default", "avx2"])
def test_code_for_other_vectors_is_not_taken(limit: str) -> None:
    """The code for this processor's vectors would leave elements out where they are narrower."""
    with limited_to(limit):
        other = instructions()
    if other == instructions():
        pytest.skip(f"this processor has no more than {limit}")
    with fresh_cache():
        for instructions_of, hits in ((None, 0), (limit, 0), (None, 1), (limit, 1)):
            counters.clear()
            with limited_to(instructions_of):
                torch.testing.assert_close(compiled(), torch.exp(X) * 2 + X)
            assert counters["inductor"]["fxgraph_cache_hit"] == hits


def test_instructions_are_those_that_inductor_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    picked, said = cpu_vec_isa.pick_vec_isa(), instructions()
    assert said.startswith(f"{picked}; ")
    with instructions_in_key():
        assert config.aot_inductor.metadata["fxshard_instructions"] == said and cpu_vec_isa.pick_vec_isa() == picked
    assert "fxshard_instructions" not in config.aot_inductor.metadata

    def none_works() -> Any:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", none_works)
    assert instructions().startswith("no compiler; ")


@pytest.mark.parametrize(("attribute", "value"), [("pick_vec_isa", cpu_vec_isa.invalid_vec_isa), ("get_capabilities", {"avx2": True})])
def test_our_own_key_has_the_instructions(attribute: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_of_inductor()
    monkeypatch.setattr(cpu_vec_isa if attribute == "pick_vec_isa" else torch.cpu, attribute, lambda: value)
    assert before is not None and settings_of_inductor() not in (None, before)


def test_a_graph_that_only_reads_from_the_cpu_asks_for_no_compiler() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        scalar, x = torch.ones(()), torch.ones(3, device="meta")
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"], b.meta["val"] = scalar, x
    total = graph.call_function(torch.ops.aten.add.Tensor, (b, a))
    total.meta["val"] = x
    graph.output((total,))
    assert not inductor._computes_on_cpu(fx.GraphModule({}, graph))
    total.meta["val"] = scalar
    assert inductor._computes_on_cpu(fx.GraphModule({}, graph))
