"""Operators of local graphs that depend on the mesh: ``axis_index``, the only rank-dependent value, and ``shift``, which sends a tensor
around a ring."""

from __future__ import annotations

import torch

from fxshard._torch_compat.groups import rank_and_size


@torch.library.custom_op("fxshard::axis_index", mutates_args=())
def axis_index(axis: str) -> torch.Tensor:
    """Index of this rank on ``axis``, an int64 scalar tensor; ``bind`` and the simulator replace it by its value."""
    raise RuntimeError(f"axis_index({axis!r}) has no value before the program is bound to a mesh")


axis_index.register_fake(lambda axis: torch.empty((), dtype=torch.int64))


@torch.library.custom_op("fxshard::shift", mutates_args=())
def shift(input: torch.Tensor, group_name: str) -> torch.Tensor:
    """Sends ``input`` to the next rank of a group and receives the previous rank's, of equal shape; the last rank's next is the first.

    Starts the transfer, like torch's functional collectives: ``wait_tensor`` returns the received tensor. An all-to-all in which each rank
    has rows for one other rank only, which backends run as a send and a receive.
    """
    rank, size = rank_and_size(group_name)
    rows = input.shape[0]
    sent, received = ([rows * (other == peer % size) for other in range(size)] for peer in (rank + 1, rank - 1))
    return torch.ops._c10d_functional.all_to_all_single.default(input.contiguous(), received, sent, group_name)


shift.register_fake(lambda input, group_name: input.new_empty(input.shape))
