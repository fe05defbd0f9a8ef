"""Compiled code depends on the processor's vectors: code from a folder that another processor has filled is not taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list
from torch._inductor.utils import fresh_cache
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard._torch_compat.inductor.code_cache import settings_of_inductor
from fxshard._torch_compat.inductor.cpp import width_in_key
from fxshard._torch_compat.inductor.inductor import inductor_compile

X = torch.linspace(-2, 2, 200)


@contextlib.contextmanager
def limited_to(instructions: str | None) -> Iterator[None]:
    """A processor, or an environment, with these instructions only; None: all that this processor has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        if instructions is not None:
            patch.setenv("ATEN_CPU_CAPABILITY", instructions)
        yield


def compiled() -> torch.Tensor:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph: fx.GraphModule = make_fx(lambda x: (torch.exp(x) * 2 + x,))(mode.from_tensor(X))
    run = inductor_compile(graph, [mode.from_tensor(X)])
    assert run is not None
    return run([X.clone()])[0]


def test_code_for_wider_vectors_is_not_taken() -> None:
    """Taken for narrower vectors, it would leave elements out."""
    if len({one.bit_width() for one in valid_vec_isa_list()}) < 2 or pick_vec_isa().bit_width() <= 256:
        pytest.skip("this processor has no vectors of two widths")
    expected = torch.exp(X) * 2 + X
    with fresh_cache():
        for instructions, hits in ((None, 0), ("avx2", 0), (None, 1), ("avx2", 1)):
            counters.clear()
            with limited_to(instructions):
                torch.testing.assert_close(compiled(), expected)
            assert counters["inductor"]["fxgraph_cache_hit"] == hits


@pytest.mark.parametrize("instructions", [None, "default"])
def test_the_width_is_that_which_inductor_picks(instructions: str | None) -> None:
    with limited_to(instructions):
        picked = pick_vec_isa()
        with width_in_key():
            assert config.cpp.simdlen == (picked.bit_width() or 1) and pick_vec_isa() == picked
        assert config.cpp.simdlen is None
        with config.patch({"cpp.simdlen": 256}), width_in_key():
            assert config.cpp.simdlen == 256, "a setting of the user's stays"


def test_our_own_key_has_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_of_inductor()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_tile": False, "num_sockets": 1})
    other = settings_of_inductor()
    assert before is not None and other is not None and before != other
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "none")
    assert settings_of_inductor() != other
