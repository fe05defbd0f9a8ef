"""The tensors that can be planned: dense ones, of torch's or any other class that does not override how operators compute."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.dtensor.shards import AsyncCollectiveTensor
from fxshard._torch_compat.fakes import FakeTensor
from fxshard.errors import TraceError

OURS = (DTensor, FakeTensor, AsyncCollectiveTensor)
"""Supported tensor classes with their own dispatch that represent a dense tensor."""
PLAIN = (torch.Tensor.__torch_function__.__func__, nn.Parameter.__torch_function__)


def check_dense(value: torch.Tensor, name: str = "") -> None:
    """Raises TraceError naming ``value`` if it is sparse, nested, or of a class that overrides operators (quantised weights).

    Planned as a dense tensor, it would lose its class's behaviour, and shards would take the memory of dense ones.
    """
    kind, where = type(value), name or f"a tensor of type {type(value).__name__}"
    if value.is_nested:
        what = f"{where} is nested ({str(value.layout).removeprefix('torch.')}): its rows differ in length"
        remedy = (
            "pass its values and offsets as dense tensors (torch.nn.attention.varlen.varlen_attn attends within rows), or pad it "
            "(x.to_padded_tensor(0.0)) and pass the mask"
        )
        raise TraceError(what, remedy=remedy)
    if value.layout != torch.strided:
        what = f"{name or 'a tensor'} of shape {tuple(value.shape)} is sparse ({value.layout})"
        raise TraceError(what, remedy="pass dense tensors")
    if isinstance(value, OURS):
        return
    own = "__torch_dispatch__" if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ else ""
    if getattr(kind.__torch_function__, "__func__", kind.__torch_function__) not in PLAIN:
        own = own or "__torch_function__"
    if own:
        remedy = (
            "hold its inner tensors as parameters or buffers and compute with them in forward (dequantise there), or make it dense first "
            "(x.dequantize(), x.get_data()); subclasses that override neither method are planned as plain tensors"
        )
        raise TraceError(f"{where} is of class {kind.__name__}, which overrides {own}", where=name, remedy=remedy)
