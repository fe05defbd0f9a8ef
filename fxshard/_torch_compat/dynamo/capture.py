"""Private names of torch (2.13): settings of a capture whose graph is planned and never called."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload


@contextlib.contextmanager
def without_guards() -> Iterator[None]:
    """While Dynamo captures: it builds no guards. They decide whether a compiled graph can be reused; export only compares them with dims
    marked as dynamic, and fakes have no such marks."""
    from torch._dynamo.convert_frame import GraphCaptureOutput

    with mock.patch.object(GraphCaptureOutput, "build_guards", lambda *_, **__: None):
        yield


@contextlib.contextmanager
def without_headers() -> Iterator[None]:
    """While Dynamo captures: it does not tokenise source files to find names of functions, unless its log of calls, which prints these
    names, is on (``TORCH_LOGS=trace_call``)."""
    from torch._dynamo import output_graph, symbolic_convert

    logged = output_graph.trace_call_log.isEnabledFor(logging.DEBUG) or symbolic_convert.trace_source_log.isEnabledFor(logging.DEBUG)
    with contextlib.nullcontext() if logged else mock.patch.object(symbolic_convert, "get_funcname", lambda *_: None):
        yield


@contextlib.contextmanager
def recurrent_modules(pack: Callable[..., Any]) -> Iterator[None]:
    """While Dynamo captures: it traces nn.RNN, nn.GRU and nn.LSTM instead of breaking the graph; ``pack`` replaces the operator that makes
    a PackedSequence."""
    from torch._dynamo import config

    with config.patch(allow_rnn=True), mock.patch.object(torch._VF, "_pack_padded_sequence", pack):
        yield


@contextlib.contextmanager
def computed_as(forms: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Within it, operators that torch would decompose are computed by these functions instead, on fakes too."""
    from torch._dispatch.python import enable_python_dispatcher

    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
    with contextlib.ExitStack() as stack:
        for op, form in forms.items():
            stack.enter_context(mock.patch.dict(op.py_kernels, dict.fromkeys(keys, form)))
            stack.enter_context(mock.patch.object(op, "_dispatch_cache", {}))
        stack.enter_context(enable_python_dispatcher())
        yield


@contextlib.contextmanager
def without_code() -> Iterator[None]:
    """Graph modules made within it generate their Python code at their first call, since interpreters never need it."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        yield
