"""Local graphs in torch's own export format: written by ``torch.export``, read by a strict reader of ours.

torch's reader looks names up in all of torch and evaluates expressions, so it is not for files from outside. Ours knows
tensors, numbers and a few words, and calls nothing but functional operators of three namespaces; the shapes of all
nodes are computed anew and compared with those in the file.
"""

from __future__ import annotations

import io
import keyword
import operator
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat import FakeTensorMode, OpOverload, export_dtypes, export_memory_formats, lazy_graph_module, pytree, schema_of
from fxshard.errors import FileError
from fxshard.files import Field, parse_json
from fxshard.layout import REDUCE_OPS

NAMESPACES = ("aten", "fxshard", "_c10d_functional")
_TARGET = re.compile(rf"torch\.ops\.({'|'.join(NAMESPACES)})\.(\w+)\.(\w+)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
WORDS = frozenset(("none", "tanh", "floor", "trunc", "left", "right", "sum", "mean", "prod", "max", "min", "amax", "amin"))
"""Texts that aten's functional operators take; a path is none of them."""


def write_graph(module: fx.GraphModule) -> bytes:
    """``models/model.json`` of ``torch.export.save``; raises FileError for a graph that ``read_graph`` would refuse."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        _check_node(node)
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].name = node.name
        copies[node].meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    buffer = io.BytesIO()
    try:
        torch.export.save(_exported(fx.GraphModule(nn.Module(), graph)), buffer)
    except Exception as error:
        raise FileError(f"a local graph cannot be stored: {error}", remedy="please report it") from error
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/models/model.json")


def _check_node(node: fx.Node) -> None:
    known = node.op in ("placeholder", "output") or (node.op == "call_function" and _storable(node.target))
    if not known:
        remedy = f"a stored program may call functional operators of {', '.join(NAMESPACES)}"
        raise FileError(f"node {node.name} ({node.op} {node.target}) cannot be stored", where=node.name, remedy=remedy)


def _storable(target: Any) -> bool:
    return target is operator.getitem or (_TARGET.fullmatch(f"torch.ops.{target}") is not None and is_functional(target))


def _exported(module: fx.GraphModule) -> ExportedProgram:
    """The graph as an ExportedProgram whose inputs and outputs are all the user's: tensors in, a tuple out."""
    ends = [n for n in module.graph.nodes if n.op == "placeholder"]
    results = module.graph.output_node().args[0]
    inputs, outputs = ([TensorArgument(n.name) for n in nodes] for nodes in (ends, results))
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, one, None) for one in inputs], [OutputSpec(OutputKind.USER_OUTPUT, one, None) for one in outputs]
    )
    specs = pytree.tree_structure((tuple(inputs), {})), pytree.tree_structure(tuple(outputs))
    call = ModuleCallEntry("", ModuleCallSignature(inputs, outputs, *specs))
    return ExportedProgram(module, module.graph, signature, {}, {}, [call])


def is_functional(target: Any) -> bool:
    """Whether ``target`` is an operator that makes new tensors from its arguments and writes into none."""
    schema = schema_of(target) if isinstance(target, OpOverload) else None
    if schema is None:
        return False
    returns = [str(one.type) for one in schema.returns]
    return not schema.is_mutable and bool(returns) and all(kind in ("Tensor", "Optional[Tensor]", "List[Tensor]") for kind in returns)


def read_graph(text: bytes, where: str, axes: Iterable[str]) -> fx.GraphModule:
    """The graph that ``write_graph`` wrote, with fake tensors in ``meta["val"]``; raises FileError on anything else.

    ``axes``: names of the mesh's axes, the only groups that a collective may have.
    """
    root = parse_json(text, where)
    graph = root.get("graph_module", lambda f: f.get("graph", lambda g: g))
    return lazy_graph_module(_Reader(graph, frozenset(axes)).read())


class _Reader:
    """Builds one graph, node by node, from a Field that holds torch's description of it."""

    def __init__(self, field: Field, axes: frozenset[str]) -> None:
        self.field, self.groups = field, axes | frozenset(REDUCE_OPS)
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values: dict[str, fx.Node] = {}
        self.declared = field.get("tensor_values", Field.entries)
        self.readers: dict[str, Callable[[Field], Any]] = {
            "as_none": lambda f: None,
            "as_tensor": self.tensor,
            "as_tensors": lambda f: list(f.tuple_of(self.tensor)),
            "as_optional_tensors": lambda f: list(f.tuple_of(self.argument)),
            "as_int": _int,
            "as_ints": lambda f: list(f.tuple_of(_int)),
            "as_float": _float,
            "as_floats": lambda f: list(f.tuple_of(_float)),
            "as_bool": Field.boolean,
            "as_bools": lambda f: list(f.tuple_of(Field.boolean)),
            "as_string": Field.text,
            "as_scalar_type": lambda f: _enum(f, export_dtypes),
            "as_memory_format": lambda f: _enum(f, export_memory_formats),
            "as_layout": _layout,
            "as_device": _device,
        }

    def read(self) -> fx.Graph:
        for one in self.field.get("inputs", Field.items):
            self.placeholder(one)
        nodes = self.field.get("nodes", Field.items)
        self.used = _names_read([*nodes, *self.field.get("outputs", Field.items)])
        for one in nodes:
            self.call(one)
        self.graph.output(tuple(one.get("as_tensor", self.tensor) for one in self.field.get("outputs", Field.items)))
        return self.graph

    def placeholder(self, field: Field) -> None:
        field.known(("as_tensor",))
        name = field.get("as_tensor", lambda f: f.get("name", Field.text))
        shape, dtype = self.described(name, field)
        value = self.fake(lambda: torch.empty(shape, dtype=dtype), field, "an input")
        self.keep(self.graph.placeholder(name), name, value, field)

    def call(self, field: Field) -> None:
        field.known(("target", "inputs", "outputs", "metadata", "is_hop_single_tensor_return", "name"))
        target = field.get("target", _target)
        args, kwargs = self.arguments(field, target)
        values = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
        value = self.fake(lambda: target(*values[0], **values[1]), field, str(target))
        node = self.graph.create_node("call_function", target, args, kwargs)
        self.results(node, value, field)

    def fake(self, make: Callable[[], Any], field: Field, what: str) -> Any:
        """What ``make`` gives on fake tensors; whatever torch finds wrong with its arguments is a fault of the file."""
        try:
            with self.mode, torch.no_grad():
                return make()
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise field.fail(f"{what} cannot have these shapes and arguments: {reason}") from error

    def arguments(self, field: Field, target: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = [], {}
        for one in field.get("inputs", Field.items):
            one.known(("name", "arg", "kind"))
            value = one.get("arg", self.argument)
            self.check_words(value, target, one)
            if one.get("kind", Field.whole) == 1:
                args.append(value)
            else:
                kwargs[one.get("name", Field.text)] = value
        return tuple(args), kwargs

    def check_words(self, value: Any, target: Any, field: Field) -> None:
        """A text is one of aten's words, a mesh axis or a reduction; fxshard's own operators read their texts themselves."""
        allowed = {"aten": WORDS, "_c10d_functional": self.groups}.get(target.namespace)
        if isinstance(value, str) and allowed is not None and value not in allowed:
            raise field.fail(f"the text {value[:60]!r} is no argument of {target}")

    def argument(self, field: Field) -> Any:
        entries = field.entries()
        if len(entries) != 1 or next(iter(entries)) not in self.readers:
            raise field.fail(f"an argument of a kind that a program does not have: {', '.join(entries)[:60]}")
        ((kind, value),) = entries.items()
        return self.readers[kind](value)

    def tensor(self, field: Field) -> fx.Node:
        field.known(("name",))
        name = field.get("name", Field.text)
        if name not in self.values:
            raise field.fail(f"there is no tensor {name!r} before it is read")
        return self.values[name]

    def results(self, node: fx.Node, value: Any, field: Field) -> None:
        """Names what a call gives: itself where it is one tensor, else a getitem for each part that is read."""
        outputs = field.get("outputs", Field.items)
        if isinstance(value, torch.Tensor):
            if len(outputs) != 1:
                raise field.fail(f"{node.target} gives one tensor, the file says {len(outputs)}")
            self.keep(node, outputs[0].get("as_tensor", _name_of), value, field)
            return
        node.meta["val"] = value
        self.rename(node, field.get("name", Field.text), field)
        listed = outputs[0].get("as_tensors", Field.items, None) if len(outputs) == 1 else None
        names = [_name_of(one) for one in listed] if listed is not None else [one.get("as_tensor", _name_of, None) for one in outputs]
        if len(names) != len(value):
            raise field.fail(f"{node.target} gives {len(value)} values, the file says {len(names)}")
        for index, (name, part) in enumerate(zip(names, value, strict=True)):
            if name is not None and name in self.used:
                self.keep(self.graph.call_function(operator.getitem, (node, index)), name, part, field)

    def keep(self, node: fx.Node, name: str, value: Any, field: Field) -> None:
        if name in self.values or not isinstance(value, torch.Tensor):
            raise field.fail(f"{name!r} is made twice, or is no tensor")
        if (tuple(value.shape), value.dtype) != self.described(name, field):
            raise field.fail(f"{name!r} is {list(value.shape)} of {value.dtype}, the file says otherwise")
        node.meta["val"] = value
        self.rename(node, name, field)
        self.values[name] = node

    def rename(self, node: fx.Node, name: str, field: Field) -> None:
        if not _NAME.fullmatch(name) or keyword.iskeyword(name):
            raise field.fail(f"{name[:60]!r} cannot be the name of a node")
        node.name = name

    def described(self, name: str, field: Field) -> tuple[tuple[int, ...], torch.dtype]:
        """(shape, dtype) that the file gives for a tensor."""
        if name not in self.declared:
            raise field.fail(f"the file does not describe the tensor {name!r}")
        described = self.declared[name]
        shape = described.get("sizes", lambda f: f.tuple_of(lambda size: size.get("as_int", Field.whole)))
        return shape, described.get("dtype", lambda f: _enum(f, export_dtypes))


def _names_read(fields: list[Field]) -> set[str]:
    """Names of all tensors that occur as arguments or outputs of the graph."""
    found: set[str] = set()
    stack = [f.value.get("inputs", f.value) if isinstance(f.value, dict) else None for f in fields]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            name = value.get("name")
            found |= {name} if isinstance(name, str) else set()
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return found


def _target(field: Field) -> Any:
    """The operator of a name like ``torch.ops.aten.mm.default``."""
    match = _TARGET.fullmatch(field.text())
    packet = getattr(getattr(torch.ops, match[1]), match[2], None) if match else None
    target = getattr(packet, match[3], None) if match else None
    if not is_functional(target):
        raise field.fail(f"{field.text()[:80]!r} is not an operator that a program may call")
    return target


def _name_of(field: Field) -> str:
    return field.get("name", Field.text)


def _int(field: Field) -> int:
    return field.whole(-(2**63))


def _float(field: Field) -> float:
    special = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
    return special[field.value] if isinstance(field.value, str) and field.value in special else field.number()


def _enum(field: Field, table: Mapping[int, Any]) -> Any:
    number = field.whole()
    if number not in table:
        raise field.fail(f"{number} is no kind that this version of torch knows")
    return table[number]


def _layout(field: Field) -> torch.layout:
    if field.whole() != 7:
        raise field.fail("only strided tensors can be in a program")
    return torch.strided


def _device(field: Field) -> torch.device:
    """A graph is neutral to the device: what makes tensors makes them on the CPU until the program is bound."""
    if field.get("type", Field.text) != "cpu":
        raise field.fail("a program names no device but cpu before it is bound")
    return torch.device("cpu")
