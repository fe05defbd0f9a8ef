"""The functions of flex attention in a stored program: those that torch traces are read, any other text is refused when it is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fxshard
from fxshard import archive
from fxshard.archive.flex_texts import _Text
from fxshard.archive.graphs import WORDS
from fxshard.errors import FileError
from fxshard.files import parse_json
from tests.archive.hostile import edited, entries
from tests.ops.flex.test_functions import MASKS, text

GRAPH = "models/model.json"
ROWS, KEYS = 8, 8


class Attention(nn.Module):
    """A mask that reads a tensor, and a score function."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("documents", torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.documents
        mask = create_block_mask(lambda b, h, q, k: (table[q] == table[k]) & (q >= k), None, None, ROWS, KEYS, device="cpu")
        return flex_attention(x, x, x, score_mod=lambda score, b, h, q, k: score + 0.1 * (k - q), block_mask=mask)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("flex") / "m.pt2"
    fxshard.export(Attention(), (torch.randn(2, 2, ROWS, 4),), fxshard.Mesh({"a": 2}), input_layouts="S(0)").save(path)
    return path


def texts_of(graph: Any) -> dict[str, dict[str, Any]]:
    """The arguments that are texts, by name."""
    call = next(n for n in graph["graph_module"]["graph"]["nodes"] if "flex_attention" in n["target"])
    return {one["name"]: one["arg"] for one in call["inputs"] if "as_string" in one["arg"]}


def test_a_traced_function_is_read(stored: Path) -> None:
    assert set(texts_of(json.loads(entries(stored)[GRAPH]))) == {"score_mod", "mask_mod"}
    assert archive.load(stored).hash


@pytest.mark.parametrize("name", MASKS)
def test_functions_of_all_kinds_are_read(name: str) -> None:
    function, tensors = MASKS[name]
    places = [torch.zeros((), dtype=torch.int64)] * 4
    result = _Text(parse_json(text(function, *tensors), name), [*places, *tensors], WORDS, lambda make, what: make()).result()
    assert result.dtype == torch.bool and not result.ndim


def call(name: str, *args: Any, **kwargs: Any) -> list[Any]:
    return [f"torch.ops.aten.{name}", list(args), {"dict": kwargs}]


Q, K = {"node": 2}, {"node": 3}
GREATER = call("ge.Tensor", Q, K)
REFUSED = [
    ("[4,[],", "cut short"),
    ("[" * 100_000, "nests too deeply"),
    (f'[5,[["torch.ops.aten.add.Tensor",{"[" * 600}{"]" * 600},{{"dict":{{}}}}]],5]', "nests too deeply"),
    ([5, []], "expected 3 entries, found 2"),
    ([4, [GREATER], 5], "has 4 arguments, the call gives it 5"),
    ([5, [GREATER], 6], "value 6 is read, of 6 so far"),
    ([5, [GREATER], -1], "at least 0"),
    ([5, [call("ge.Tensor", Q, {"node": 9})], 5], "value 9 is read, of 5 so far"),
    ([5, [call("ge.Tensor", Q, {"node": True})], 5], "expected a whole number"),
    ([5, [call("ge.Tensor", Q)], 5], "cannot have these shapes and arguments"),
    ([5, [call("no_such.default", Q)], 5], "not an operator that a function may call"),
    ([5, [["os.system", ["true"], {"dict": {}}]], 5], "not an operator that a function may call"),
    ([5, [call("add_.Tensor", Q, K)], 5], "not an operator that a function may call"),
    ([5, [call("from_file.default", "/etc/passwd", True, 4)], 5], "the text '/etc/passwd' is not an argument"),
    ([5, [call("zeros.default", [2**40])], 5], "more than the 65536 elements"),
    ([5, [call("zeros.default", [1], device={"device": "cuda"})], 5], "may not say 'device'"),
    ([5, [call("ones_like.default", Q, dtype={"dtype": "Tensor"})], 5], "'Tensor' is no dtype"),
    ([5, [call("add.Tensor", Q, K)], 5], r"gives \[\] of torch.int64 for one place"),
    ([5, [], 4], r"gives \[8\] of torch.int64 for one place"),
]


@pytest.fixture
def _usual_recursion_limit() -> Iterator[None]:
    """Python's own: Inductor, if another test has used it, doubles the limit."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("_usual_recursion_limit")
@pytest.mark.parametrize(("other", "what"), REFUSED, ids=lambda value: str(value)[:40])
def test_another_text_is_refused(stored: Path, other: Any, what: str, tmp_path: Path) -> None:
    def change(graph: Any) -> None:
        texts_of(graph)["mask_mod"].update(as_string=other if isinstance(other, str) else json.dumps(other))

    path = tmp_path / "m.pt2"
    path.write_bytes(stored.read_bytes())
    with pytest.raises(FileError, match=what):
        archive.load(edited(path, GRAPH, change))


@pytest.mark.parametrize("name", ["flex_attention_fused", "flex_attention_fused_backward"])
def test_operators_of_bound_graphs_are_refused(stored: Path, name: str, tmp_path: Path) -> None:
    """They read their texts when they run."""

    def change(graph: Any) -> None:
        call = next(n for n in graph["graph_module"]["graph"]["nodes"] if "flex_attention" in n["target"])
        call["target"] = f"torch.ops.fxshard.{name}.default"

    path = tmp_path / "m.pt2"
    path.write_bytes(stored.read_bytes())
    with pytest.raises(FileError, match="not an operator that a program may call"):
        archive.load(edited(path, GRAPH, change))
