"""Fake-tensor implementations of torch's operators that lack one, so that they can be traced.

One size in the result of ``_ctc_loss`` depends on data: the length of the longest target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def lstsq(self: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Only matrices with more rows than columns have residuals: ``gelsy`` (the CPU's default) never returns them, ``gels`` always.
    With other drivers it depends on the matrix's rank, so these raise NotImplementedError.

    The solution is a column-major view of the right-hand side's buffer, of max(m, n) rows.
    """
    driver, (m, n) = driver or "gelsy", self.shape[-2:]
    if m > n and driver in ("gelsd", "gelss"):
        raise NotImplementedError(f"with driver {driver!r} the shapes of lstsq's results depend on the rank of its operand; use 'gels'")
    vector = b.dim() == 1 or (b.dim() == self.dim() - 1 and b.shape == self.shape[:-1])
    columns = (1,) if vector else tuple(b.shape[-1:])
    batch = torch.broadcast_shapes(self.shape[:-2], b.shape[:-1] if vector else b.shape[:-2]) if not vector else self.shape[:-2]
    residuals = (*batch, *columns) if driver == "gels" and m > n else (0,)
    solution = self.new_empty((*batch, *columns, max(m, n))).mT[..., :n, :]
    return (
        solution.squeeze(-1) if vector else solution,
        self.new_empty(residuals, dtype=_real(self.dtype)),
        self.new_empty((0,) if driver == "gels" else self.shape[:-2], dtype=torch.int64),
        self.new_empty((*self.shape[:-2], min(m, n)) if driver in ("gelsd", "gelss") else (0,), dtype=_real(self.dtype)),
    )


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.empty(0, dtype=dtype, device="meta").abs().dtype


def ctc_loss(log_probs: torch.Tensor, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, zero: bool = False) -> Any:
    """(loss per sequence, log alpha [batch, time, 2 longest target + 1]); an unknown longest target gives a new symbolic size."""
    time, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    given = not isinstance(target_lengths, torch.Tensor)
    states = 2 * max(target_lengths) + 1 if given else torch.library.get_ctx().new_dynamic_size()
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, time, states))


def ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


FAKES: dict[str, Callable[..., Any]] = {
    "aten::linalg_lstsq": lstsq,
    "aten::_ctc_loss": ctc_loss,
    "aten::_ctc_loss.Tensor": ctc_loss,
    "aten::_ctc_loss_backward": ctc_loss_backward,
    "aten::_ctc_loss_backward.Tensor": ctc_loss_backward,
}

for _name, _fake in FAKES.items():
    torch.library.register_fake(_name, _fake)
