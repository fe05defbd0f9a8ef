"""``FILE.py:FACTORY``: what a factory may return, and where errors point."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fxshard.cli.arguments.factory import load_model
from fxshard.errors import FxshardError

CODE = """
import torch
from torch import nn

def pair():
    return nn.Linear(2, 2), (torch.ones(1, 2),)

def triple():
    return nn.Linear(2, 2), [torch.ones(1, 2)], {"x": 1}

def on_meta():
    with torch.device("meta"):
        return nn.Linear(2, 2), (torch.ones(1, 2),)

def nothing():
    pass

def four():
    return 1, 2, 3, 4

def no_model():
    return "model", ()

def no_args():
    return nn.Linear(2, 2), torch.ones(1, 2)

def no_kwargs():
    return nn.Linear(2, 2), (), ["x"]

def broken():
    return nn.Linear(2, "two"), ()

number = 3

class Net(nn.Module):
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "user_model.py").write_text(CODE)
    return str(tmp_path / "user_model.py")


def test_what_a_factory_may_return(file: str) -> None:
    before = list(sys.path)
    model, args, kwargs = load_model(f"{file}:pair")
    assert isinstance(model, torch.nn.Linear) and len(args) == 1 and kwargs == {}
    assert model.weight.device.type == "cpu"
    assert load_model(f"{file}:triple")[2] == {"x": 1}
    assert load_model(f"{file}:on_meta")[0].weight.is_meta, "the factory decides the device"
    assert sys.path == before


REFUSED = [
    ("nothing", "returned None, not a tuple"),
    ("four", "returned 4 values"),
    ("no_model", "a str where the model belongs"),
    ("no_args", "a Tensor where the tuple of inputs belongs"),
    ("no_kwargs", "a list where the dict of keyword inputs belongs"),
    ("pear", "no function 'pear'; did you mean 'pair'?"),
    ("number", "no function 'number'"),
]


@pytest.mark.parametrize(("name", "what"), REFUSED)
def test_wrong_factories_are_refused(file: str, name: str, what: str) -> None:
    with pytest.raises(FxshardError) as caught:
        load_model(f"{file}:{name}")
    assert what in caught.value.what and caught.value.where == f"{file}:{name}" and caught.value.remedy
    assert "Net" not in caught.value.remedy, "a class is no factory"


def test_an_error_in_the_factory_names_its_line(file: str) -> None:
    with pytest.raises(FxshardError, match="the factory 'broken' failed: TypeError") as caught:
        load_model(f"{file}:broken")
    line = CODE.splitlines().index('    return nn.Linear(2, "two"), ()') + 1
    assert caught.value.where == f'{file}:{line}: return nn.Linear(2, "two"), ()'


@pytest.mark.parametrize("code", ["import no_such_module", "def (", "raise SystemExit(3)"])
def test_a_file_that_cannot_be_imported(tmp_path: Path, code: str) -> None:
    path = tmp_path / "bad_model.py"
    path.write_text(code)
    with pytest.raises(FxshardError, match="cannot be imported") as caught:
        load_model(f"{path}:make")
    assert f"{path}:1" in str(caught.value.where)


def test_texts_that_name_no_function_are_refused(tmp_path: Path) -> None:
    for text, what in (("model.py", "cannot read"), ("model.py:", "cannot read"), (f"{tmp_path}/model.py:make", "there is no file")):
        with pytest.raises(FxshardError, match=what):
            load_model(text)
