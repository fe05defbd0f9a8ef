"""compile_for: one small model to machine code of GPUs that are not there, in a process of its own with Triton."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fxshard._torch_compat.inductor.triton_code import MachineCode, calls_in_order, kernel_sources
from fxshard._torch_compat.inductor.without_gpu import TARGETS, check_target
from fxshard.errors import OptionError

ROOT = Path(__file__).parents[3]
TRITON = Path(os.environ.get("FXSHARD_TRITON", ROOT / ".triton"))
MODEL = ROOT / "tests/runtime/target/small_model.py"
COMPILED = ("sm_80", "sm_90")

needs_triton = pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason=f"no Triton in {TRITON}: make test installs it there")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(TRITON), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    )


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    done = run(str(MODEL), *COMPILED)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_triton
def test_every_kernel_compiles(said: dict[str, Any]) -> None:
    for target, report in zip(COMPILED, said["reports"], strict=True):
        assert report["target"] == target
        assert [graph["name"] for graph in report["graphs"]] == ["forward", "backward"]
        for graph in report["graphs"]:
            assert graph["failures"] == []
            assert graph["launches"] >= len(graph["kernels"]) > 0
            assert all(kernel["registers"] > 0 and kernel["code"] > 1000 for kernel in graph["kernels"])


@needs_triton
def test_the_collectives_are_those_of_the_program(said: dict[str, Any]) -> None:
    assert said["expected"]
    for report in said["reports"]:
        issued = Counter((one["kind"].rstrip("_"), one["axis"]) for graph in report["graphs"] for one in graph["collectives"])
        assert sorted([*key, count] for key, count in issued.items()) == said["expected"]


@needs_triton
def test_attention_and_products_are_calls_of_kernels(said: dict[str, Any]) -> None:
    forward, backward = (dict(graph["calls"]) for graph in said["reports"][1]["graphs"])
    assert forward["extern_kernels.mm"] == 2
    assert any("flash_attention" in name for name in forward)
    assert any("flash_attention_backward" in name for name in backward)


@needs_triton
def test_the_command_exits_with_1_if_a_kernel_fails() -> None:
    broken = "import fxshard._torch_compat.inductor.triton_code as code; code._compiled = None"
    options = ["compile", f"{MODEL}:model", "--mesh", "dp=2,tp=2", "--target", "sm_90", "--infer", "--no-cache"]
    done = run("-c", f"{broken}; from fxshard.cli.main import main; exit(main({options!r}))")
    assert done.returncode == 1
    assert "DID NOT COMPILE" in done.stdout


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(OptionError, match="sm_90"):
        check_target("sm_91")


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed beside torch here")
def test_without_triton_the_error_says_what_to_install() -> None:
    with pytest.raises(OptionError, match="pip install --no-deps triton"):
        check_target(next(iter(TARGETS)))


def test_only_names_of_inductor_have_its_kinds() -> None:
    kinds = {"triton_red_fused_sum_0": "reduction", "triton_per_fused_0": "persistent reduction", "triton_mine": "user's"}
    for name, kind in {**kinds, "my_red_kernel": "user's", "kernel": "user's"}.items():
        assert MachineCode(name, "", 0, 0, 0, 0).kind == kind, name


def test_a_wrapper_is_read_in_the_order_of_execution() -> None:
    wrapper = """
kernel_0 = async_compile.triton('kernel_0', '''
body
''', device_str='cuda')

class Runner:
    def call(self, args):
        # extern_kernels.mm(in a comment)
        extern_kernels.mm(a, b, out=c)
        kernel_0.run(c, 5, stream=s)
        buf = torch.ops._c10d_functional.all_reduce_.default(c, 'sum', 'g')

def benchmark():
    extern_kernels.bmm(a, b)
"""
    assert list(kernel_sources(wrapper)) == ["kernel_0"]
    assert [name for name, _ in calls_in_order(wrapper)] == [
        "extern_kernels.mm",
        "kernel_0",
        "torch.ops._c10d_functional.all_reduce_.default",
    ]
