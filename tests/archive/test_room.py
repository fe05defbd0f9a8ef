"""Rows of experts in a stored graph: the room that their buffer has is at least 1, and at most the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.archive.graphs import read_graph, write_graph
from fxshard.cost.timeline import bytes_sent
from fxshard.errors import FileError
from fxshard.program.sharded_program import is_collective

OPERATORS = (torch.ops.fxshard.dispatch.default, torch.ops.fxshard.combine.default)


def stored(operator: Any, room: int) -> bytes:
    """A graph that sends rows on the axis "ep"."""
    counts = torch.ones(2, dtype=torch.int64)
    module = make_fx(lambda *args: [operator(*args, 8, room, "ep")], tracing_mode="fake")(torch.randn(4, 3), counts, counts)
    return write_graph(fx.GraphModule(module, module.graph))


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_room_for_none_or_for_more_than_all_ranks_is_refused(operator: Any) -> None:
    for room in (0, -1, 9, 2**62):
        with pytest.raises(FileError, match=f"has room for {room} times the expected rows, which is not 1 to 8"):
            read_graph(stored(operator, room), "m.pt2", {"ep": 2, "dp": 4})


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_what_is_sent_is_a_part_of_the_room(operator: Any) -> None:
    """Half of 4 rows of 3 floats goes to the other rank, a quarter more than the mean."""
    for room in (1, 2, 8):
        (node,) = filter(is_collective, read_graph(stored(operator, room), "m.pt2", {"ep": 2, "dp": 4}).graph.nodes)
        assert bytes_sent(node, 2) == -(-30 // room)
