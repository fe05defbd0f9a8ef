"""Dynamic dims given by the user, in every form that torch accepts, and forms that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from fxshard.cli.arguments.dynamic_text import parse_dynamic, parse_sizes
from fxshard.errors import OptionError
from fxshard.shapes import DynamicDim, dynamic_dims


class Two(nn.Module):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, pair: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        return tokens


def found(given: object, *args: object, **kwargs: object) -> tuple[DynamicDim, ...]:
    return dynamic_dims(Two(), args, kwargs, given)


TOKENS, MASK = torch.zeros(4, 16), torch.zeros(4, 16)
BOTH = (DynamicDim("batch", (("args[0]", 0), ("kwargs['mask']", 0)), 4), DynamicDim("seq", (("args[0]", 1),), 16))


@pytest.mark.parametrize(
    "given",
    [
        {"args[0]": {0: "batch", 1: "seq"}, "kwargs['mask']": {0: "batch"}},
        {"tokens": {0: Dim("batch"), 1: Dim("seq")}, "mask": {0: Dim("batch")}},
        {"tokens": (Dim("batch"), "seq"), "mask": ["batch", None]},
        {"tokens": {0: "batch", -1: "seq"}, "mask": {0: "batch", 1: Dim.STATIC}},
        parse_dynamic(["tokens:0=batch,1=seq; mask:0=batch"]),
    ],
)
def test_equivalent_forms(given: object) -> None:
    assert found(given, TOKENS, mask=MASK) == BOTH


def test_a_sequence_is_in_the_order_of_the_arguments() -> None:
    (dim,) = found((None, {0: "batch"}), TOKENS, MASK)
    assert dim == DynamicDim("batch", (("args[1]", 0),), 4)


def test_parts_of_containers() -> None:
    (dim,) = found({"pair": ({0: "n"}, None)}, TOKENS, pair=(torch.zeros(3), torch.zeros(5)))
    assert dim == DynamicDim("n", (("kwargs['pair'][0]", 0),), 3)


def test_ranges_come_from_the_dim() -> None:
    (dim,) = found({"tokens": {1: Dim("seq", min=2, max=64)}}, TOKENS)
    assert (dim.least, dim.most) == (2, 64)
    dim.check(64)
    with pytest.raises(OptionError, match=r"seq .* is 65, it must be from 2 to 64"):
        dim.check(65)


def test_marks_of_torch() -> None:
    x = torch.zeros(4, 16)
    torch._dynamo.mark_dynamic(x, 1)
    assert [(d.places, d.example) for d in found(None, x)] == [((("args[0]", 1),), 16)]
    assert [d.name for d in found({"tokens": {1: "seq"}}, x)] == ["seq"]  # an explicit name overrides a mark
    assert found(None, TOKENS) == ()


@pytest.mark.parametrize(
    "given, said",
    [
        ({"nothing": {0: "b"}}, "no argument 'nothing'"),
        ({"tokens": {2: "b"}}, "has no dim 2"),
        ({"tokens": {0: 3.5}}, "cannot read 3.5"),
        ({"tokens": {0: 2 * Dim("half")}}, "cannot read"),
        ({"tokens": "batch"}, "cannot read 'batch'"),
        ({"tokens": {0: "n", 1: "n"}}, "'n' is 4 .* and 16"),
        ({"tokens": {1: Dim("seq", max=8)}}, "seq .* is 16, it must be from"),
        ("batch", "dynamic_shapes is a str"),
        ({"pair": {0: "n"}}, "does not describe"),
    ],
)
def test_invalid_dims_are_refused(given: object, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        found(given, TOKENS, pair=(MASK,))


def test_ranges_on_the_command_line() -> None:
    dims = found(parse_dynamic(["tokens:0=batch<=64,1=2<=seq; mask:0=batch"]), TOKENS, mask=MASK)
    assert [(dim.name, dim.least, dim.most) for dim in dims] == [("batch", 1, 64), ("seq", 2, None)]


def test_syntax_of_the_command_line() -> None:
    assert parse_dynamic([]) is None
    assert parse_sizes("batch=4, seq=8192") == {"batch": 4, "seq": 8192}
    for text in ("args[0]", "args[0]:batch", ":0=b", "args[0]:0=1"):
        with pytest.raises(OptionError, match="cannot read"):
            parse_dynamic([text])
    with pytest.raises(OptionError, match="the range of b goes from 8 to 4"):
        parse_dynamic(["x:0=8<=b<=4"])
    with pytest.raises(OptionError, match="cannot read 'batch'"):
        parse_sizes("batch")


@pytest.mark.parametrize("entry", ["n", Dim("n"), Dim.DYNAMIC])
def test_a_dynamic_dim_of_size_zero_is_refused(entry: object) -> None:
    with pytest.raises(OptionError, match=r"\(dim 0 of args\[0\]\) is 0, it must be at least 1"):
        dynamic_dims(nn.ReLU(), (torch.zeros(0, 4),), {}, ({0: entry},))
    assert dynamic_dims(nn.ReLU(), (torch.zeros(0, 4),), {}, ({0: Dim.AUTO},)) == ()
