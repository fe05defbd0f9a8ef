"""Structures of inputs and outputs as JSON: plain containers come back, other classes become plain containers."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from fxshard.archive.structure import read_structure, write_structure
from fxshard.errors import FileError
from fxshard.files import Field
from fxshard.graph.planning_graph import with_fixed

Pair = namedtuple("Pair", "first second")
keys = st.text() | st.integers()


def _containers(inner: Any) -> Any:
    several = st.lists(inner, max_size=3)
    return several | several.map(tuple) | st.dictionaries(keys, inner, max_size=3)


trees = st.recursive(st.just(0), _containers, max_leaves=8)


def _again(tree: Any, *, replace: bool = True) -> Any:
    spec = pytree.tree_structure(tree)
    data = json.loads(json.dumps(write_structure(spec, "outputs", replace=replace)))
    return read_structure(Field(data, "file", "structure"))


@given(trees)
def test_roundtrip(tree: Any) -> None:
    assert _again(tree, replace=False) == pytree.tree_structure(tree)


def test_other_classes_become_plain_ones_in_outputs_only(caplog: pytest.LogCaptureFixture) -> None:
    assert _again({"a": Pair(1, 2)}) == pytree.tree_structure({"a": (1, 2)})
    assert _again(OrderedDict(b=1, a=[2])) == pytree.tree_structure({"b": 1, "a": [2]})
    assert "hold a OrderedDict; the file stores it as a dict" in caplog.text
    with pytest.raises(FileError, match="hold a namedtuple, which a file cannot hold"):
        _again(Pair(1, 2), replace=False)


def test_hugging_face_outputs_become_dicts() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    assert _again(outputs.CausalLMOutput(loss=1, logits=2)) == pytree.tree_structure({"loss": 1, "logits": 2})


def test_values_other_than_tensors_are_kept() -> None:
    spec = with_fixed(pytree.tree_structure({"a": (0, 0), "b": [0, 0, 0]}), {0: None, 2: 3, 3: 1.5, 4: "text"})
    data = json.loads(json.dumps(write_structure(spec, "outputs", replace=False)))
    again = read_structure(Field(data, "file", "structure"))
    assert pytree.tree_unflatten(["tensor"], again) == {"a": (None, "tensor"), "b": [3, 1.5, "text"]}


@pytest.mark.parametrize("value", [float("inf"), 1j, b"bytes"])
def test_values_that_a_file_cannot_hold(value: Any) -> None:
    with pytest.raises(FileError, match="which a file cannot hold"):
        write_structure(with_fixed(pytree.tree_structure([0]), {0: value}), "outputs", replace=True)


BAD = [
    *(None, "x", [0], {"tuple": 0}, {"tuple": [], "list": []}, {"dict": [[0]]}, {"dict": [[[], 0]]}, {"tuple": [1, 0]}, True),
    *({"value": [1]}, {"value": 1, "list": []}),
]


@pytest.mark.parametrize("data", BAD)
def test_malformed_structures_are_refused(data: Any) -> None:
    with pytest.raises(FileError):
        read_structure(Field(data, "file", "structure"))
