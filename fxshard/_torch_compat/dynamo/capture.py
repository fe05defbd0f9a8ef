"""Private names of torch (2.13): settings of a capture whose graph is planned and never called.

What would replace it: ``torch.export`` with a switch for guards, and options in place of ``torch._dynamo.config``.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree


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


def sizes_from_data() -> contextlib.AbstractContextManager[Any]:
    """While Dynamo captures: operators whose output sizes or numbers depend on data stay in the graph, as symbols.

    Calls of ``warnings.warn`` are left out of the graph.
    """
    from torch._dynamo import config

    return config.patch(
        capture_dynamic_output_shape_ops=True,
        capture_scalar_outputs=True,
        ignore_logging_functions={*config.ignore_logging_functions, warnings.warn},
    )


def dynamo_source(placeholder: fx.Node) -> tuple[str, bool]:
    """(the source of the value in Dynamo, as an expression; whether it is a number passed as a tensor)."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None)
    return (source.name if source is not None else ""), bool(getattr(argument, "pass_arg_as_tensor", False))


def dynamo_frame() -> tuple[str, tuple[str, ...]]:
    """The name of the function that Dynamo is compiling and its variables, arguments first; empty outside of Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        code = InstructionTranslator.current_tx().f_code
    except AttributeError:
        return "", ()
    return code.co_name, code.co_varnames


def captured_out_spec(captured: fx.GraphModule) -> pytree.TreeSpec:
    """The structure of the return value of a module captured by Dynamo."""
    return captured.graph._codegen.pytree_info.out_spec
