"""Joint graphs on disk: the same captured graph gets the same joint graph without AOTAutograd, anything else is traced."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fxshard import disk_cache
from fxshard._torch_compat import pytree, tracing
from fxshard._torch_compat.fakes import storage_key
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.trace import trace as tracing_pass
from fxshard.passes.trace.trace import trace
from fxshard.shapes import DynamicDim
from tests.models.zoo import make

SEPARATE = ("val", "seq_nr", "tensor_meta", "original_aten", "eager_input_vals", "from_node", "source_fn_stack", "fwd_source_fn_stack")
"""Keys of ``node.meta`` that are compared separately, or that nothing in fxshard reads."""
STACKS = ("nn_module_stack", "fwd_nn_module_stack")


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rules and kernels that other tests have given to operators in this process."""
    monkeypatch.setattr(disk_cache, "all_user_rules", dict)
    known = tracing.own_kernels()
    own = {one for one in torch.library._impls if not one.startswith("aten/") or one.endswith("/Meta") or one in known}
    monkeypatch.setattr(torch.library, "_impls", own)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each joint graph that AOTAutograd makes."""
    counted: list[int] = []
    real = tracing_pass.aot_export_joint_with_descriptors
    monkeypatch.setattr(tracing_pass, "aot_export_joint_with_descriptors", lambda *a, **k: counted.append(1) or real(*a, **k))
    return counted


class Net(nn.Module):
    def __init__(self, scale: float = 2.0, cut: Callable[[torch.Tensor], torch.Tensor] = F.gelu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(4))
        self.scale, self.cut = scale, cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.cut(self.up(x)) * self.scale) + self.shift


def rows(count: int = 6, **options: Any) -> tuple[torch.Tensor, ...]:
    return (torch.ones(count, 4, **options),)


def described(graph: fx.GraphModule) -> list[Any]:
    """All that passes read of a graph. Storages and autograd sequence numbers are numbered in order of appearance."""
    memory, sequence, modules = dict[int, int](), dict[int, int](), dict[str, int]()

    def value(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        number = memory.setdefault(storage_key(one), len(memory))
        facts = type(one), one.shape, one.stride(), one.dtype, one.device, one.storage_offset(), one.requires_grad
        return (*facts, number, one.untyped_storage().nbytes())

    found: list[Any] = []
    for node in graph.graph.nodes:
        said = {key: one for key, one in node.meta.items() if key not in (*SEPARATE, *STACKS)}
        calls = [[(modules.setdefault(k, len(modules)), path) for k, (path, _) in node.meta.get(s, {}).items()] for s in STACKS]
        number = sequence.setdefault(node.meta.get("seq_nr", -1), len(sequence))
        values = [*map(value, pytree.tree_leaves(node.meta.get("val"))), pytree.tree_structure(node.meta.get("val"))]
        found.append((node.op, node.name, node.target, str(node.args), str(node.kwargs), said, calls, number, values))
    return found


def assert_equal(a: PlanningGraph, b: PlanningGraph) -> None:
    assert a.hash == b.hash and described(a.module) == described(b.module)
    assert (a.inputs, a.outputs, a.aliases, a.returned, a.lines) == (b.inputs, b.outputs, b.aliases, b.returned, b.lines)


@pytest.mark.parametrize(
    ("name", "train"),
    [
        *((name, True) for name in ("mlp", "llama", "cnn")),
        ("llama", False),
        *(
            pytest.param(name, train, marks=pytest.mark.slow)
            for name, train in (("gpt2", True), ("bert", True), ("vit", True), ("cnn", False))
        ),
    ],
)
def test_the_graph_from_a_file_is_the_one_traced(name: str, train: bool, cache_folder: Path, made: list[int]) -> None:
    model, args, kwargs = make(name)
    traced = trace(model, args, kwargs, train=train)
    kept = trace(model, args, kwargs, train=train, cache=True)
    assert len(made) == 2 and len(list(cache_folder.glob("joint-*"))) == 1
    found = trace(model, args, kwargs, train=train, cache=True)
    assert len(made) == 2, "the third graph is from the file"
    assert_equal(kept, traced)
    assert_equal(found, traced)


def test_without_a_cache_nothing_is_kept(cache_folder: Path, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    trace(Net(), rows())
    monkeypatch.setenv("FXSHARD_CACHE", "0")
    trace(Net(), rows(), cache=True)
    assert len(made) == 2 and not cache_folder.exists()


def frozen() -> Net:
    model = Net()
    model.up.weight.requires_grad_(False)
    return model


OTHERS: dict[str, Callable[[], Any]] = {
    "another constant": lambda: trace(Net(3.0), rows(), cache=True),
    "another function": lambda: trace(Net(cut=F.relu), rows(), cache=True),
    "another size": lambda: trace(Net(), rows(8), cache=True),
    "another dtype": lambda: trace(Net().double(), rows(dtype=torch.float64), cache=True),
    "an input with a gradient": lambda: trace(Net(), rows(requires_grad=True), cache=True),
    "other strides": lambda: trace(Net(), (torch.ones(4, 6).T,), cache=True),
    "inference": lambda: trace(Net(), rows(), train=False, cache=True),
    "a frozen weight": lambda: trace(frozen(), rows(), cache=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_graph_is_traced(name: str, cache_folder: Path, made: list[int]) -> None:
    trace(Net(), rows(), cache=True)
    OTHERS[name]()
    assert len(made) == 2, name


def test_tied_weights_are_another_graph(cache_folder: Path, made: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    trace(model, rows(), cache=True)
    model[1].weight = model[0].weight
    trace(model, rows(), cache=True)
    assert len(made) == 2


@contextlib.contextmanager
def other_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "state",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        other_default,
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ],
    ids=["autocast", "default dtype", "kernels of attention"],
)
def test_in_another_state_of_torch_it_is_traced(state: Callable[[], Any], cache_folder: Path, made: list[int]) -> None:
    model, x = Net(), rows()
    trace(model, x, cache=True)
    with state():
        trace(model, x, cache=True)
    assert len(made) == 2
    trace(model, x, cache=True)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (disk_cache, "code_digest", lambda: "other sources of fxshard"),
        (disk_cache, "all_user_rules", lambda: {"mylib.op": "a -> a"}),
        (tracing, "torch_sources", lambda: ("other sources of torch",)),
        (torch, "__version__", "9.9"),
    ],
)
def test_with_other_code_it_is_traced(
    owner: Any, name: str, value: Any, cache_folder: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(Net(), rows(), cache=True)
    monkeypatch.setattr(owner, name, value)
    trace(Net(), rows(), cache=True)
    assert len(made) == 2


def test_a_line_that_moves_is_another_graph(cache_folder: Path, made: list[int], tmp_path: Path) -> None:
    source = "import torch\nclass Moved(torch.nn.Module):\n    def forward(self, x):\n        return x.sin()\n"
    for text in (source, source, f"\n{source}"):
        file = tmp_path / "moved.py"
        file.write_text(text)
        names: dict[str, Any] = {"__name__": "moved"}
        exec(compile(text, str(file), "exec"), names)
        graph = trace(names["Moved"](), rows(), cache=True)
        assert f"moved.py:{5 if text != source else 4}: " in next(iter(graph.lines.values()))
    assert len(made) == 2


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@torch.library.custom_op("joint_cache_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


UNKNOWN: dict[str, Callable[[], Any]] = {
    "an operator of the user's": lambda: trace(Net(cut=lambda x: double(x)), rows(), train=False, cache=True),
    "a subgraph": lambda: trace(Net(cut=lambda x: checkpoint(F.gelu, x, use_reentrant=False)), rows(), cache=True),
    "a constant tensor": lambda: trace(Net(cut=lambda x: x + torch.tensor([1.0, 2.0]).sum()), rows(), cache=True),
    "sizes that are symbols": lambda: trace(Net(), rows(), dynamic=(DynamicDim("batch", (("args[0]", 0),), 6),), cache=True),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_graphs_without_a_stable_text_are_traced_each_time(name: str, cache_folder: Path, made: list[int]) -> None:
    UNKNOWN[name]()
    UNKNOWN[name]()
    assert len(made) >= 2 and not list(cache_folder.glob("joint-*"))


def test_the_cache_is_not_used_if_user_code_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing.tracing_state() is not None
    with Quiet():
        assert tracing.tracing_state() is None
    with torch.autograd.graph.save_on_cpu():
        assert tracing.tracing_state() is None
    monkeypatch.setattr(torch.library, "_impls", {*torch.library._impls, "aten/silu/CompositeImplicitAutograd"})
    assert tracing.tracing_state() is None


def damaged(text: bytes) -> bytes:
    return text[:-1] + b" "


def sealed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Replaces ``old`` by ``new`` and updates the digest."""

    def change(text: bytes) -> bytes:
        assert old in text
        body = text.partition(b"\n")[2].replace(old, new)
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    return change


@pytest.mark.parametrize(
    "change",
    [
        damaged,
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        sealed(b"torch.ops.aten.mul.Tensor", b"torch.ops.higher_order.cond"),
        sealed(b"torch.ops.aten.mul.Tensor", b"os.system"),
        sealed(b"torch.ops.aten.mul.Tensor", b"torch.ops.aten.mul.__class__"),
        sealed(b'"end": "PlainAOTInput"', b'"end": "Popen"'),
    ],
    ids=["a digest", "empty", "cut", "another namespace", "no operator", "no overload", "no end"],
)
def test_a_damaged_file_is_reported_and_made_again(
    change: Callable[[bytes], bytes], cache_folder: Path, made: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    first = trace(Net(), rows(), cache=True)
    (file,) = cache_folder.glob("joint-*")
    right = file.read_bytes()
    file.write_bytes(change(right))
    with caplog.at_level(logging.WARNING, "fxshard"):
        again = trace(Net(), rows(), cache=True)
    assert "is not used and is made again" in caplog.text and len(made) == 2
    assert_equal(again, first)
    trace(Net(), rows(), cache=True)
    assert len(made) == 2, "the file is whole again"
