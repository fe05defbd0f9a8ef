"""Local graphs in torch's export format: ``torch.export`` writes them; a strict reader of our own reads them.

torch's reader looks names up in all of torch and evaluates expressions, so it is unsafe for files from outside. Ours accepts tensors,
numbers and a few words (``WORDS``), and calls only functional operators of three namespaces; it recomputes the shapes of all nodes and
compares them with those in the file. In torch's format, dynamic sizes are the first inputs of a graph, and nodes compute the sizes that
calls need. Our reader drops these inputs and nodes: in the graph that it returns, the sizes are symbols in the arguments again.
"""

from __future__ import annotations

import io
import json
import keyword
import math
import operator
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec, SymIntArgument, TensorArgument

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat import OpOverload, pytree
from fxshard._torch_compat.export_names import export_dtypes, export_memory_formats
from fxshard._torch_compat.fakes import kernels_for_shapes
from fxshard._torch_compat.nodes import lazy_graph_module
from fxshard._torch_compat.operators import is_composite, schema_of
from fxshard._torch_compat.sizes.expressions import SIZE_CALLS
from fxshard._torch_compat.sizes.needless_guards import without_needless_guards
from fxshard._torch_compat.sizes.symbols import SYMBOLIC, expression, is_symbolic, oblivious, ranges_of, surely, symbolic_kernels
from fxshard.archive.flex_texts import check_texts
from fxshard.archive.sizes import FileSizes, is_number
from fxshard.errors import FileError
from fxshard.files import Field, parse_json
from fxshard.graph.planning_graph import example_shape
from fxshard.layout.layouts import REDUCE_OPS
from fxshard.program.sharded_program import COMBINE, DISPATCH, ROOM, ProgramSize
from fxshard.program.size_inputs import add_size_inputs
from fxshard.shapes.expressions import to_text

NAMESPACES = ("aten", "fxshard", "_c10d_functional")
_AFTER_BINDING = r"fxshard\.flex_attention_fused"
"""Operators that only a graph bound to a device has; they read texts, which ``check_texts`` does not know."""
_TARGET = re.compile(rf"torch\.ops\.(?!{_AFTER_BINDING})({'|'.join(NAMESPACES)})\.(\w+)\.(\w+)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PRIVATE = re.compile(r"_(?!_)")
WORDS = frozenset(("none", "tanh", "floor", "trunc", "left", "right", "sum", "mean", "prod", "max", "min", "amax", "amin"))
"""The strings that aten's functional operators accept as arguments; none of them is a path."""


def write_graph(module: fx.GraphModule, sizes: Sequence[ProgramSize] = ()) -> bytes:
    """``models/model.json`` of ``torch.export.save``; raises FileError for a graph that ``read_graph`` would refuse.

    ``sizes``: the program's dynamic sizes, which occur in the graph's arguments and values.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        _check_node(node)
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].name = node.name
        copies[node].meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    buffer, stored = io.BytesIO(), fx.GraphModule(nn.Module(), graph)
    try:
        with oblivious() if sizes else nullcontext():
            _compute_sizes(stored, sizes)
            torch.export.save(_exported(stored, sizes), buffer)
    except FileError:
        raise
    except Exception as error:
        raise FileError(f"a local graph cannot be stored: {error}", remedy="please report it") from error
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/models/model.json")


def _compute_sizes(module: fx.GraphModule, sizes: Sequence[ProgramSize]) -> None:
    """Makes ``sizes`` inputs of the graph and adds nodes that compute expressions of them, with values, in place.

    These inputs come first: torch's reader derives the other inputs' sizes from them.
    """
    before, top = set(module.graph.nodes), next(iter(module.graph.nodes))
    names = {n.name for n in before}
    add_size_inputs(module, sizes)
    added = [n for n in module.graph.nodes if n not in before]
    for number, node in enumerate(added):
        node.name = next(name for i in range(len(names) + 1) if (name := f"size_{number + i * len(added)}") not in names)
        if node.op == "placeholder":
            top.prepend(node)
        if "val" in node.meta:
            if is_symbolic(node.meta["val"]):
                to_text(expression(node.meta["val"]))  # raises if the reader would refuse it
            continue
        if _name(node.target) not in SIZE_CALLS:
            raise FileError(f"a size is computed by {_name(node.target)}, which cannot be stored", remedy="export with static sizes")
        node.meta["val"] = node.target(*[a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args])


def _name(target: Any) -> str:
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _check_node(node: fx.Node) -> None:
    known = node.op in ("placeholder", "output") or (node.op == "call_function" and _storable(node.target))
    if not known:
        remedy = f"a stored program may call functional operators of {', '.join(NAMESPACES)}"
        raise FileError(f"node {node.name} ({node.op} {node.target}) cannot be stored", where=node.name, remedy=remedy)


def _storable(target: Any) -> bool:
    return target is operator.getitem or (_TARGET.fullmatch(f"torch.ops.{target}") is not None and is_functional(target))


def _exported(module: fx.GraphModule, sizes: Sequence[ProgramSize]) -> ExportedProgram:
    """The graph as an ExportedProgram with user inputs and outputs only: tensors and sizes in, a tuple of tensors out."""
    ends = [n for n in module.graph.nodes if n.op == "placeholder"]
    results = module.graph.output_node().args[0]
    inputs: list[Any] = [TensorArgument(n.name) if isinstance(n.meta["val"], torch.Tensor) else SymIntArgument(n.name) for n in ends]
    outputs: list[Any] = [TensorArgument(n.name) for n in results]
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, one, None) for one in inputs], [OutputSpec(OutputKind.USER_OUTPUT, one, None) for one in outputs]
    )
    specs = pytree.tree_structure((tuple(inputs), {})), pytree.tree_structure(tuple(outputs))
    call = ModuleCallEntry("", ModuleCallSignature(inputs, outputs, *specs))
    ranges = ranges_of([(one.value, -(-one.least // one.unit), one.most and one.most // one.unit) for one in sizes])
    return ExportedProgram(module, module.graph, signature, {}, ranges, [call])


def is_functional(target: Any) -> bool:
    """Whether ``target`` is an operator that returns new tensors and writes into none of its arguments, and not a private composite of
    torch, some of which crash on operands that their callers would not give."""
    schema = schema_of(target) if isinstance(target, OpOverload) else None
    if schema is None or (_PRIVATE.match(target.overloadpacket.__name__) and is_composite(target)):
        return False
    returns = [str(one.type) for one in schema.returns]
    return not schema.is_mutable and bool(returns) and all(kind in ("Tensor", "Optional[Tensor]", "List[Tensor]") for kind in returns)


def read_graph(text: bytes, where: str, axes: Mapping[str, int], sizes: FileSizes | None = None) -> fx.GraphModule:
    """Reads the output of ``write_graph``, with fake tensors in ``meta["val"]``; raises FileError for anything else.

    ``axes``: the mesh's axes, the only groups that a collective may have, and their sizes. ``sizes``: the program's dynamic sizes.
    """
    root = parse_json(text, where)
    graph = root.get("graph_module", lambda f: f.get("graph", lambda g: g))
    sizes = sizes or FileSizes()
    with oblivious() if sizes.sizes else nullcontext():
        return lazy_graph_module(_Reader(graph, axes, sizes).read())


class _Reader:
    """Builds one graph, node by node, from a Field with torch's description of it."""

    def __init__(self, field: Field, axes: Mapping[str, int], sizes: FileSizes) -> None:
        self.field, self.groups, self.sizes = field, frozenset((*axes, *REDUCE_OPS)), sizes
        self.ranks = math.prod(axes.values())
        self.graph = fx.Graph()
        self.values: dict[str, fx.Node] = {}
        self.names: set[str] = set()
        self.numbers: dict[str, Any] = {}
        self.given = iter(sizes.values)
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
            "as_sym_int": self.number,
            "as_sym_ints": lambda f: list(f.tuple_of(self.number)),
            "as_sym_float": self.number,
            "as_sym_bool": self.number,
        }

    def read(self) -> fx.Graph:
        for one in self.field.get("inputs", Field.items):
            self.placeholder(one)
        if next(self.given, None) is not None:
            raise self.field.fail("the graph does not take all sizes of the program")
        nodes = self.field.get("nodes", Field.items)
        self.used = _names_read([*nodes, *self.field.get("outputs", Field.items)])
        for one in nodes:
            self.call(one)
        self.graph.output(tuple(one.get("as_tensor", self.tensor) for one in self.field.get("outputs", Field.items)))
        return self.graph

    def placeholder(self, field: Field) -> None:
        if "as_sym_int" in field.known(("as_tensor", "as_sym_int")):
            value = next(self.given, None)
            if value is None:
                raise field.fail("the graph takes more sizes than the program has")
            self.keep_number(field, value)
            return
        name = field.get("as_tensor", lambda f: f.get("name", Field.text))
        shape, dtype = self.described(name, field)
        value = self.fake(lambda: torch.empty(shape, dtype=dtype), field, "an input")
        self.keep(self.graph.placeholder(name), name, value, field)

    def call(self, field: Field) -> None:
        field.known(("target", "inputs", "outputs", "metadata", "is_hop_single_tensor_return", "name"))
        if field.get("target", Field.text) in SIZE_CALLS:
            self.compute(field, SIZE_CALLS[field.get("target", Field.text)])
            return
        target = field.get("target", _target)
        args, kwargs = self.arguments(field, target)
        values = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
        check_results(target, values[0], field)
        check_room(target, args, self.ranks, field)
        check_texts(target, values[0], field, WORDS, lambda make, what: self.fake(make, field, what))
        with kernels_for_shapes(self.sizes.mode, bytes_of(values) <= MAX_OPERANDS):
            value = self.fake(lambda: target(*values[0], **values[1]), field, str(target))
        node = self.graph.create_node("call_function", target, args, kwargs)
        self.results(node, value, field)

    def fake(self, make: Callable[[], Any], field: Field, what: str) -> Any:
        """The result of ``make`` on fake tensors; any exception of torch's is a fault of the file."""
        try:
            with self.sizes.mode, torch.no_grad():
                if not self.sizes.sizes:
                    return make()
                with symbolic_kernels():
                    return without_needless_guards(self.sizes.mode, make)
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise field.fail(f"{what} cannot have these shapes and arguments: {reason}") from error

    def compute(self, field: Field, function: Callable[..., Any]) -> None:
        """A call that computes a size; its result must equal the file's expression, which then replaces it in arguments."""
        args = [one.get("arg", self.argument) for one in field.get("inputs", Field.items)]
        if not all(map(is_number, args)):
            raise field.fail("a size may be computed from sizes only")
        value = self.fake(lambda: function(*args), field, "a size")
        (output,) = field.get("outputs", lambda f: f.items(1))
        self.keep_number(output, value)

    def keep_number(self, field: Field, value: Any) -> None:
        """Names a computed number; it must equal the file's description of this name."""
        entries = field.known(("as_sym_int", "as_sym_float", "as_sym_bool"))
        if len(entries) != 1:
            raise field.fail("a size is one number")
        ((kind, named),) = entries.items()
        name = named.get("as_name", Field.text)
        declared = self.field.get(f"{kind.removeprefix('as_')}_values", Field.entries)
        if name not in declared or name in self.numbers:
            raise field.fail(f"the file does not describe the size {name!r}, or it is made twice")
        said = declared[name].get("as_expr", lambda f: f.get("expr_str", self.sizes.number))
        if type(said) is not type(value) or not _equal(said, value):
            raise field.fail(f"the size {name!r} is {value}, the file says {said}")
        self.numbers[name] = said

    def number(self, field: Field) -> Any:
        """A number in the arguments of a call: literal, or the name of a computed one."""
        entries = field.known(("as_name", "as_int", "as_float", "as_bool"))
        if len(entries) != 1:
            raise field.fail("a number in an argument is a literal or the name of a computed number")
        if "as_name" not in entries:
            ((_, plain),) = entries.items()
            return plain.value if isinstance(plain.value, bool) else _int(plain) if "as_int" in entries else _float(plain)
        name = entries["as_name"].text()
        if name not in self.numbers:
            raise field.fail(f"the size {name!r} is read before it is computed")
        return self.numbers[name]

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
        """A text must be one of aten's words, a mesh axis or a reduction; fxshard's own operators check their texts themselves."""
        allowed = {"aten": WORDS, "_c10d_functional": self.groups}.get(target.namespace)
        if isinstance(value, str) and allowed is not None and value not in allowed:
            raise field.fail(f"the text {value[:60]!r} is not an argument of {target}")

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
            raise field.fail(f"the tensor {name!r} is read before it is computed")
        return self.values[name]

    def results(self, node: fx.Node, value: Any, field: Field) -> None:
        """Names the results of a call: the call itself if it is one tensor, else a getitem for each part that is read."""
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
        if name in self.values or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise field.fail(f"{name!r} is made twice, or is not a strided tensor")
        shape, dtype = self.described(name, field)
        alike = len(shape) == value.dim() and all(_equal(said, size) for said, size in zip(shape, value.shape, strict=True))
        if not alike or value.dtype != dtype:
            raise field.fail(f"{name!r} is {list(value.shape)} of {value.dtype}, the file says otherwise")
        node.meta["val"] = value
        self.rename(node, name, field)
        self.values[name] = node

    def rename(self, node: fx.Node, name: str, field: Field) -> None:
        if not _NAME.fullmatch(name) or keyword.iskeyword(name):
            raise field.fail(f"{name[:60]!r} cannot be the name of a node")
        if name in self.names:
            raise field.fail(f"two nodes are called {name[:60]!r}")
        self.names.add(name)
        node.name = name

    def size(self, field: Field) -> Any:
        if "as_expr" in field.known(("as_int", "as_expr")):
            return field.get("as_expr", lambda f: f.get("expr_str", self.sizes.number))
        return field.get("as_int", Field.whole)

    def described(self, name: str, field: Field) -> tuple[tuple[Any, ...], torch.dtype]:
        """The file's (shape, dtype) of a tensor."""
        if name not in self.declared:
            raise field.fail(f"the file does not describe the tensor {name!r}")
        described = self.declared[name]
        shape = described.get("sizes", lambda f: f.tuple_of(self.size))
        return shape, described.get("dtype", lambda f: _enum(f, export_dtypes))


MAX_RESULTS, MAX_OPERANDS = 2**14, 2**26
"""Limits on what is computed to find shapes: number of parts that a call may split a tensor into, unless the file names as many; bytes of
operands of an operator whose shapes only its kernel knows."""
_DIM_AFTER = {"split": 2, "split_copy": 2, "unsafe_split": 2, "unbind": 1, "unbind_copy": 1}
_SECTIONS = ("chunk", "unsafe_chunk", "tensor_split", "hsplit", "vsplit", "dsplit")


def check_results(target: Any, args: Sequence[Any], field: Field) -> None:
    """Raises FileError for a call that would split a tensor into more parts than ``MAX_RESULTS`` and than the file names."""
    name = target.overloadpacket.__name__
    if not args or not isinstance(args[0], torch.Tensor) or name not in (*_DIM_AFTER, *_SECTIONS):
        return
    if name in _SECTIONS:
        parts = args[1] if len(args) > 1 else 0
    else:
        place = _DIM_AFTER[name]
        length, each = _length(args[0], args[place] if len(args) > place else 0), args[1] if place == 2 and len(args) > 1 else 1
        parts = -(-length // each) if isinstance(each, int) and each > 0 else 0
    if isinstance(parts, int) and parts > max(MAX_RESULTS, len(json.dumps(field.get("outputs", Field.plain, []))) // 8):
        raise field.fail(f"{target} gives {parts} parts, more than the file names")


def check_room(target: Any, args: Sequence[Any], ranks: int, field: Field) -> None:
    """Raises FileError if rows of experts have room for less than they are expected to be, or for more than all ``ranks`` hold: what a rank
    sends is divided by it."""
    room = args[ROOM] if len(args) > ROOM else None
    if target in (DISPATCH, COMBINE) and not (type(room) is int and 1 <= room <= ranks):
        raise field.fail(f"{target} has room for {str(room)[:40]} times the expected rows, which is not 1 to {ranks}")


def _length(tensor: torch.Tensor, dim: Any) -> int:
    """The size of a dim in the example; 0 if there is none."""
    sizes = example_shape(tensor.shape)
    return sizes[dim] if isinstance(dim, int) and -len(sizes) <= dim < len(sizes) else 0


def bytes_of(values: Any) -> int:
    """Bytes of all tensors among the arguments of a call, in the example."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return sum(math.prod(example_shape(t.shape)) * t.dtype.itemsize for t in tensors)


def _equal(said: Any, found: Any) -> bool:
    """Whether two numbers are equal at all sizes; adds no guards."""
    if isinstance(said, SYMBOLIC) and isinstance(found, SYMBOLIC) and expression(said) == expression(found):
        return True
    return surely(said == found)


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
    """The operator with a name like ``torch.ops.aten.mm.default``."""
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
        raise field.fail(f"{number} is not a dtype or memory format of this version of torch")
    return table[number]


def _layout(field: Field) -> torch.layout:
    if field.whole() != 7:
        raise field.fail("only strided tensors can be in a program")
    return torch.strided


def _device(field: Field) -> torch.device:
    """Graphs are device-neutral: factories create tensors on the CPU until the program is bound."""
    if field.get("type", Field.text) != "cpu":
        raise field.fail("before it is bound, a program may name no device but cpu")
    return torch.device("cpu")
