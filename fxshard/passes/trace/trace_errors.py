"""Turns errors raised during tracing into TraceErrors that name the user's line and the cause."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxshard._torch_compat.fakes import FAKE_ERRORS, quiet_fakes
from fxshard._torch_compat.groups import FAKE_STORE
from fxshard.errors import FxshardError, TraceError
from fxshard.graph.planning_graph import is_user_file, source_line

GRAPH_BREAKS = (
    "remove graph breaks (data-dependent branches, .item(), printing) there, return tensors in plain containers "
    "or objects, or shard a submodule that traces"
)
CALL = "check the arguments and that line: the model raises this when it is called with them, sharded or not"
OURS = os.path.join(Path(__file__).parents[2], "")
EXPERTS_LOOP = r"[/\\]transformers[/\\].*: .*expert_hit"
"""The line in transformers of the loop over the experts that tokens chose."""
GROUPED = (
    'a loop over experts that data chooses cannot be one graph: call model.set_experts_implementation("grouped_mm") '
    "(experts_implementation= of from_pretrained and of the config)"
)
NESTED = (
    "nested (jagged) tensors are not planned: compute on their values, a dense tensor of all tokens, and attend with "
    "torch.nn.attention.varlen.varlen_attn, or pad them and pass a mask"
)
NO_LOCAL_MESH = (
    "the tensor is whole while the model is traced; tensors know a mesh there if the parameters are DTensors on one. Keep the mesh as an "
    "attribute of the model; if it is a local_map region without device_mesh, give it one: local_map(..., device_mesh=mesh)"
)
NOT_DTENSORS = (
    "a model is traced on whole tensors, which have no placements: leave that code out, or capture real DTensors by "
    'torch.compile(backend="fxshard"), see docs/compiled-dtensors.md'
)
MIXED = "got mixed torch.Tensor and DTensor"
CACHE_MADE = "the model makes a cache of keys and values that its results hold: pass use_cache=False, as in training, or pass a cache to it"
REMEDIES = {
    "trace_autograd_ops": "take the gradient by torch.func.grad, which becomes part of the graph",
    r"unrecognized type UserDefinedObjectVariable\(\w*Cache\)": CACHE_MADE,
    EXPERTS_LOOP: GROUPED,
    r"nested_tensor|aten\._nested|[/\\]torch[/\\]nested[/\\]": NESTED,
    r"'FakeTensor' object has no attribute 'device_mesh'": NO_LOCAL_MESH,
    rf"(has no|of) attribute '?(placements|_spec|_local_tensor)\b|{re.escape(MIXED)}": NOT_DTENSORS,
}
"""Words in the user's line, in torch's message, or in the name of a file that raised it -> what to do."""
DATA_DEPENDENT = {
    "DynamicOutputShapeException": "gives a result whose size depends on the data",
    "DataDependentOutputException": "turns data into a Python number",
}
"""Explanations for torch's exceptions whose message is only an operator's name."""
REGION_SIZE = r"'LazyProxy' object has no attribute 'node'|wrap <class 'torch\.SymInt'>"
"""Dynamo's messages for a size that it cannot pass into a ``local_map`` region."""
NO_FAKE = r"no fake impl registered for <CustomOpDef\((\S+)\)>|(\S+): attempted to run .* with Meta tensors, but there was no fake impl"
NO_BACKWARD = r"backward through (\S+) but no autograd formula"
"""torch's messages for the user's operators without a fake implementation or a backward; the group is the operator's name."""


NO_MESH = "reconstruct arbitrary frozen dataclass instances"
"""Dynamo's message for a ``fxshard.Mesh`` passed to ``local_map``, and for other objects that a graph cannot hold."""
DEVICE_MESH = (
    "if it is the mesh of a local_map region, give torch's DeviceMesh in place of a fxshard.Mesh; without processes that is "
    f"dist.init_process_group('fake', store={FAKE_STORE}, rank=0, world_size=2) and then "
    "init_device_mesh('cpu', (2,), mesh_dim_names=('tp',))"
)
OF_FAKES = ("its data is not allocated yet", MIXED)
"""torch's messages if its own code reads the values of a fake, and if a DTensor that the model makes meets the fake of a parameter."""


@contextlib.contextmanager
def readable_errors(what: str, remedy: str = GRAPH_BREAKS) -> Iterator[None]:
    """Turns any error raised while tracing ``what`` into a TraceError that names the user's line."""
    try:
        with quiet_fakes():
            yield
    except FxshardError:
        raise
    except Exception as error:
        incomplete = _operator_error(error) or _region_error(error)
        usual = DEVICE_MESH if NO_MESH in str(error) else remedy
        where = _user_line(error) or what
        known = _known_remedy(where) or _known_remedy(_causes(error)) or usual
        said, todo = incomplete or (f"the model does not trace to one graph: {_reason(error)}", known)
        raise TraceError(said, where=where, remedy=todo) from error


def _causes(error: BaseException) -> str:
    """The messages of an error and of those that led to it, and the files whose code raised them."""
    found: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        found += [str(cause), *(frame.filename for frame in traceback.extract_tb(cause.__traceback__))]
        cause = cause.__cause__ or cause.__context__
    return " ".join(found)


def _known_remedy(where: str) -> str | None:
    """The remedy for a line, or a reason, that is known not to trace; None for any other."""
    return next((remedy for words, remedy in REMEDIES.items() if re.search(words, where)), None)


def _operator_error(error: BaseException | None) -> tuple[str, str] | None:
    """(what a user's operator lacks to be traced, the remedy); None if that is not the cause."""
    while error is not None:
        fake, backward = re.search(NO_FAKE, str(error)), re.search(NO_BACKWARD, str(error))
        if fake:
            name = fake[1] or fake[2]
            remedy = f'give it one: @torch.library.register_fake("{name}"), a function that returns torch.empty of the result\'s shape'
            return f"the operator {name} does not give the shape of its result: it has no fake implementation", remedy
        if backward:
            remedy = "give it one by torch.library.register_autograd, or plan with train=False"
            return f"the operator {backward[1]} has no backward", remedy
        error = error.__cause__ or error.__context__
    return None


def _region_error(error: Exception) -> tuple[str, str] | None:
    """As ``_operator_error``, for a ``local_map`` region with sizes that may change."""
    if not re.search(REGION_SIZE, str(error)) or "local_map" not in _causes(error):
        return None
    return "torch captures a local_map region for one size only", "leave the dims of its arguments static: each size has its own program"


@contextlib.contextmanager
def errors_of_the_model(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """If the capture fails, calls ``model`` eagerly on these fakes; an error that this raises is reported instead, because Dynamo hides
    it."""
    try:
        yield
    except Exception:
        own = _eager_error(model, args, kwargs)
        if own is None:
            raise
        if isinstance(own, FxshardError):
            own.where = own.where or _user_line(own)
            raise own from None
        said = next(iter(str(own).splitlines()), "")
        what = f"the forward of {type(model).__name__} raises {type(own).__name__}{': ' if said else ''}{said}"
        where = _user_line(own) or _forward_line(model)
        raise TraceError(what, where=where, remedy=_known_remedy(where) or _known_remedy(what) or CALL) from own


def _eager_error(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """The exception that the call raises, None if its cause is only that fakes have no values. Restores the user's random state."""
    try:
        with torch.random.fork_rng(devices=[]):
            model(*args, **kwargs)
    except FAKE_ERRORS:
        return None
    except Exception as error:
        return None if _operator_error(error) or any(said in str(error) for said in OF_FAKES) else error
    return None


def _forward_line(model: nn.Module) -> str:
    """The first line of the model's forward, for errors without a line of their own, such as a call with wrong arguments."""
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return type(model).__name__
    return f"{code.co_filename}:{code.co_firstlineno}: {linecache.getline(code.co_filename, code.co_firstlineno).strip()}"


def _reason(error: Exception) -> str:
    """The first line of the message, with Dynamo's explanation; if the captured code raised an exception, that exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = next((said for line in lines for _, found, said in [line.partition("context: raised exception ")] if found), None)
    if raised is not None:
        return raised
    first = lines[0] if lines else type(error).__name__
    known = DATA_DEPENDENT.get(type(error).__name__)
    if known is not None:
        return f"{first} {known}"
    explanation = next((line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), "")
    return f"{first}: {explanation}" if explanation else first


def _user_line(error: Exception) -> str | None:
    """The user's line: from Dynamo's stack, else from the error's text, its traceback, or the node that was running."""
    stack = [(f.filename, f.lineno, f.line) for f in getattr(error, "real_stack", None) or ()]
    text = re.findall(r'File "([^"]+)", line (\d+)(?:, in \S+)?\n\s*(.*)', str(error))
    raised = [(f.filename, f.lineno, f.line) for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OURS)]
    for frames in (stack, text, raised):
        mine = [frame for frame in frames if is_user_file(frame[0])]
        if mine:
            return "{}:{}: {}".format(*mine[-1])
    node = _running_node(error)
    return None if node is None else source_line(node)


def _running_node(error: Exception) -> fx.Node | None:
    """The node that an interpreter was running when ``error`` was raised."""
    found, step = None, error.__traceback__
    while step is not None:
        node: Any = step.tb_frame.f_locals.get("n") if step.tb_frame.f_code.co_name == "run_node" else None
        found = node if isinstance(node, fx.Node) else found
        step = step.tb_next
    return found
