"""Operators of local graphs that depend on the mesh: ``axis_index``, the only rank-dependent value; ``shift``, which sends a tensor around
a ring; ``zigzag``, which exchanges halves of tensors between the first and the last ranks; ``dispatch`` and ``combine``, which send rows to
the ranks of their experts and back."""

from __future__ import annotations

import torch

from fxshard._torch_compat.groups import rank_and_size, start_exchange


@torch.library.custom_op("fxshard::axis_index", mutates_args=())
def axis_index(axis: str) -> torch.Tensor:
    """Index of this rank on ``axis``, an int64 scalar tensor; ``bind`` and the simulator replace it by its value."""
    raise RuntimeError(f"axis_index({axis!r}) has no value before the program is bound to a mesh")


axis_index.register_fake(lambda axis: torch.empty((), dtype=torch.int64))


@torch.library.custom_op("fxshard::shift", mutates_args=())
def shift(input: torch.Tensor, group_name: str) -> torch.Tensor:
    """Sends ``input`` to the next rank of a group and receives the previous rank's, of equal shape; the last rank's next is the first.

    Starts the transfer, like torch's functional collectives: ``wait_tensor`` returns the received tensor. It is an all-to-all in which each
    rank has rows for one other rank only, which backends run as a send and a receive.
    """
    rank, size = rank_and_size(group_name)
    return _exchange(input, [(rank + 1) % size], [(rank - 1) % size], group_name)


@torch.library.custom_op("fxshard::zigzag", mutates_args=())
def zigzag(input: torch.Tensor, back: bool, group_name: str) -> torch.Tensor:
    """Sends each half of ``input`` [2, ...] to a rank of a group, as ``zigzag_peers`` says; starts to receive two halves."""
    return _exchange(input, *zigzag_peers(*rank_and_size(group_name), back), group_name)


def zigzag_peers(rank: int, size: int, back: bool) -> tuple[list[int], list[int]]:
    """(the ranks that get a rank's halves, those that send it two), both ascending.

    A tensor of 2 n blocks lies on n ranks, blocks 2r and 2r + 1 on rank r; ``zigzag`` moves block j to rank j, or 2n - 1 - j if that is
    less; ``back`` moves it from there.
    """
    here = sorted(min(j, 2 * size - 1 - j) for j in (2 * rank, 2 * rank + 1))
    there = [rank // 2, (2 * size - 1 - rank) // 2]
    return (there, here) if back else (here, there)


@torch.library.custom_op("fxshard::dispatch", mutates_args=())
def dispatch(input: torch.Tensor, sent: torch.Tensor, received: torch.Tensor, rows: int, room: int, group_name: str) -> torch.Tensor:
    """Starts to send rows to the ranks of a group: of ``input`` [r, h] the first sent[0] to rank 0, the next sent[1] to rank 1, and so on.

    Those that arrive, received[i] from rank i, are the first rows of the result [rows, h], in the order of ranks; the others are undefined.
    ``sent`` and ``received``: int64, one number for each rank. They are read, so on a GPU the host waits for them. ``room``: ``input`` has
    room for that many times the rows that are expected to be sent; only prices read it.
    """
    return _exchange_rows(input, sent, received, rows, group_name)


@torch.library.custom_op("fxshard::combine", mutates_args=())
def combine(input: torch.Tensor, sent: torch.Tensor, received: torch.Tensor, rows: int, room: int, group_name: str) -> torch.Tensor:
    """The same, back from the experts."""
    return _exchange_rows(input, sent, received, rows, group_name)


def _exchange_rows(input: torch.Tensor, sent: torch.Tensor, received: torch.Tensor, rows: int, group_name: str) -> torch.Tensor:
    counts = received.tolist(), sent.tolist()
    return start_exchange(input.new_empty(rows, *input.shape[1:]), input, counts, group_name)


def _exchange(input: torch.Tensor, to: list[int], source: list[int], group_name: str) -> torch.Tensor:
    """Starts to send equal parts of the rows of ``input`` to some ranks of a group, and to receive as many; both lists ascend."""
    rows, size = input.shape[0] // len(to), rank_and_size(group_name)[1]
    sent, received = ([rows * peers.count(other) for other in range(size)] for peers in (to, source))
    return torch.ops._c10d_functional.all_to_all_single.default(input.contiguous(), received, sent, group_name)


shift.register_fake(lambda input, group_name: input.new_empty(input.shape))
zigzag.register_fake(lambda input, back, group_name: input.new_empty(input.shape))
dispatch.register_fake(lambda input, sent, received, rows, room, group_name: input.new_empty(rows, *input.shape[1:]))
combine.register_fake(lambda input, sent, received, rows, room, group_name: input.new_empty(rows, *input.shape[1:]))
