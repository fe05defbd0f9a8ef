"""What kernels take beyond their FLOPs: shapes of products, attention, bytes; and the optimiser's step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fxshard
from fxshard.cost import compute_time, optimizer_time
from fxshard.cost.kernels import KERNEL, SUSTAINED, shape_factor, sizes, slowdown
from fxshard.graph.call import Call, Operand, TensorMeta
from fxshard.layout.layouts import Layout
from fxshard.mesh.architectures import ARCHITECTURES
from fxshard.mesh.mesh import Mesh
from fxshard.ops.flex.functions import IDENTITY
from fxshard.plans.plan_data import OpSpec
from tests.ops.flex.test_functions import text

R = Layout.parse("R")


def time_of(op: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], *rest: object, traffic: tuple[float, ...] | None = None) -> float:
    operands = tuple(TensorMeta(s, torch.bfloat16) for s in shapes)
    args = (*(Operand(i) for i in range(len(shapes))), *rest)
    call = Call(op, args, (), operands, (TensorMeta(out, torch.bfloat16),), traffic=traffic)
    return compute_time(call, OpSpec((R,) * len(shapes), (R,)), Mesh({"a": 2}, "h100"))


def product(m: int, n: int, k: int) -> float:
    """TFLOP/s."""
    return 2 * m * n * k / time_of("fxshard.einsum.default", [(m, k), (k, n)], (m, n), "mk,kn->mn") / 1e6


def test_large_products_approach_the_best_rate_less_what_a_step_cannot_sustain() -> None:
    assert product(16384, 16384, 16384) == pytest.approx(989 * 0.803 * SUSTAINED, rel=0.02)


def test_small_and_thin_products_are_slower_and_bound_by_memory_in_the_end() -> None:
    assert product(8192, 8192, 8192) > product(2048, 2048, 2048) > product(512, 512, 512) > product(128, 128, 128)
    assert product(8192, 8192, 8192) > product(8192, 8192, 256) > product(8192, 8192, 32)
    assert time_of("fxshard.einsum.default", [(1, 4096), (4096, 4096)], (1, 4096), "mk,kn->mn") == pytest.approx(
        KERNEL + 2 * 4096 * 4098 / (0.9 * 3.35e12) * 1e6
    )


def test_few_tiles_split_the_contracted_dim() -> None:
    """128 x 128 x 65536 has one tile. Without a split, one processor of 132 would compute it, and half a wave would be charged."""
    alone = 2 * (128 * 128 + 132 * 128 * 128 / 2) * (65536 + 128) / (2 * 128 * 128 * 65536)
    assert shape_factor(1, 128, 128, 65536, 132) < alone / 10
    assert shape_factor(8, 512, 512, 512, 132) < shape_factor(1, 512, 512, 512, 132), "a batch fills the device"


def test_sizes_of_an_einsum() -> None:
    assert sizes("b h q d, b h k d -> b h q k".replace(" ", ""), [(2, 3, 5, 7), (2, 3, 11, 7)]) == (6, 5, 11, 7)


def test_attention_has_its_published_rates() -> None:
    """Causal, 8 heads of 128: 40 % of 989 TFLOP/s, on a sequence of 512 half of it."""
    for length, share in ((512, 0.5), (32768, 512 / 520)):
        shape = (1, 8, length, 128)
        flops = 2 * 2 * 8 * 128 * length**2 / 2
        time = time_of("fxshard.sdpa.default", [shape] * 3, shape, None, True, 0.0, None)
        assert time == pytest.approx(KERNEL + flops / (989e12 * 0.40 * share) * 1e6, rel=0.01)


def test_packed_attention_runs_the_same_kernel() -> None:
    """All scores of one sequence."""
    length, heads = 8192, 32
    fused = time_of("fxshard.sdpa.default", [(1, heads, length, 128)] * 3, (1, heads, length, 128), None, False, 0.0, None)
    bounds = [(2,)] * 2
    packed = time_of(
        "fxshard.varlen_attention.default",
        [(length, heads, 128)] * 3 + bounds,
        (length, heads, 128),
        None,
        length,
        length,
        None,
        -1,
        -1,
        None,
    )
    assert packed == pytest.approx(fused, rel=1e-6)


FLEX = ((), (), None, None, None, IDENTITY, text(lambda b, h, q, k: q.new_ones((), dtype=torch.bool)), 1.0)


def test_flex_attention_runs_a_fused_kernel_or_products_in_float32() -> None:
    """All scores of one sequence, in bfloat16: at attention's rate, or at 67 TFLOP/s at the most with heads too small for the kernel."""
    shape, small = (1, 32, 8192, 128), (1, 256, 8192, 8)
    fused = time_of("fxshard.sdpa.default", [shape] * 3, shape, None, False, 0.0, None)
    assert time_of("fxshard.flex_attention.default", [shape] * 3, shape, *FLEX) == pytest.approx(fused, rel=1e-6)
    products = 4 * 256 * 8 * 8192**2
    assert time_of("fxshard.flex_attention.default", [small] * 3, small, *FLEX) > products / 67e12 * 1e6


def test_the_backward_of_flex_attention_has_the_length_of_its_keys() -> None:
    """Few queries, and a gradient of logsumexp before them: five products at 33 % of 989 TFLOP/s."""
    q, k = (1, 64, 1024, 128), (1, 64, 32768, 128)
    time = time_of("fxshard.flex_attention_backward.default", [q, q[:-1], q, k, k, q, q[:-1]], k, *FLEX, ())
    flops = 5 * 2 * 64 * 128 * 1024 * 32768
    assert time == pytest.approx(KERNEL + flops / (989e12 * 0.33 * 32768 / (32768 + 512)) * 1e6, rel=0.01)


def test_grouped_products_are_slower_than_one_of_all_their_rows() -> None:
    """64 experts with 16 rows each: tiles of 64 rows hold 16. Expert products are grouped ones too."""
    rows, groups, k, n = 1024, 64, 2048, 2048
    whole = shape_factor(1, rows, n, k, 132)
    for op, shapes in (
        ("aten._grouped_mm.default", [(rows, k), (groups, k, n)]),
        ("fxshard.expert_linear.default", [(rows // 2, 2, k), (groups, k, n), (rows // 2, 2)]),
    ):
        call = Call(op, tuple(map(Operand, range(len(shapes)))), (), tuple(TensorMeta(s, torch.bfloat16) for s in shapes), (None,))
        factor = slowdown(call, shapes, [(rows, n)], torch.bfloat16, ARCHITECTURES["hopper"]) * SUSTAINED * 0.803
        assert factor == pytest.approx(shape_factor(groups, rows // groups, n, k, 132)) and factor > 2 * whole
    meta = TensorMeta((groups, k, n), torch.bfloat16)
    outer = Call("fxshard.expert_outer.default", (), (), (TensorMeta((rows // 2, 2, k), torch.bfloat16),), (meta,))
    found = slowdown(outer, [(rows // 2, 2, k)], [(groups, k, n)], torch.bfloat16, ARCHITECTURES["hopper"]) * SUSTAINED * 0.803
    assert found == pytest.approx(shape_factor(groups, k, n, rows // groups, 132))


def test_a_fused_operator_moves_only_what_is_outside_its_kernel() -> None:
    """Of two operands and a result it reads one; if it writes nothing, no kernel starts."""
    shape, one = (4096, 4096), 2 * 4096**2 / (0.9 * 3.35e12) * 1e6
    assert time_of("aten.add.Tensor", [shape] * 2, shape) == pytest.approx(KERNEL + 3 * one)
    assert time_of("aten.add.Tensor", [shape] * 2, shape, traffic=(1.0, 0.0, 0.0)) == pytest.approx(one)


def test_traffic_has_a_weight_for_each_output_also_for_one_that_is_no_tensor() -> None:
    """(None, tensor): the second weight is the tensor's. Weights for fewer tensors than there are say nothing."""
    meta = TensorMeta((4096, 4096), torch.bfloat16)
    call = Call("aten.aminmax.default", (Operand(0),), (), (meta,), (None, meta), traffic=(0.0, 0.0, 1.0))
    spec, mesh = OpSpec((R,), (None, R)), Mesh({"a": 2}, "h100")
    assert compute_time(call, spec, mesh) == pytest.approx(KERNEL + 2 * 4096**2 / (0.9 * 3.35e12) * 1e6)
    with pytest.raises(ValueError, match="zip"):
        compute_time(replace(call, traffic=(0.0, 0.0)), spec, mesh)


def test_the_optimisers_step_is_the_traffic_of_its_shards() -> None:
    """Adam in float32: three accesses of 4 bytes for weight and gradient, and four for its two tensors of state."""
    model = torch.nn.Linear(1024, 1024, bias=False)
    plan = fxshard.plan(model, (torch.randn(64, 1024),), fxshard.Mesh({"dp": 4}, "h100"), pins={"weight": "S(0)"})
    assert optimizer_time(plan, "adam") == pytest.approx(1024 * 256 * 28 / (0.9 * 3.35e12) * 1e6)
    assert optimizer_time(plan, "none") == 0
