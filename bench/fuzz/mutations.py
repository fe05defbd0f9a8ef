"""Mutations of bytes, of JSON and of zip archives. Each takes ``draw``, a random.Random, and returns new contents."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from fxshard.files import write_sealed

MANIFEST = "archive/extra/fxshard/manifest.json"
Entries = list[tuple[str, bytes]]


def damaged(draw: random.Random, data: bytes) -> bytes:
    """``data`` after a fault of a disk or a hostile hand that knows nothing of the format."""
    size, out = len(data), bytearray(data)
    if not size:
        return draw.randbytes(20)
    a, b = sorted((draw.randrange(size + 1), draw.randrange(size + 1)))
    kind = draw.randrange(9)
    if kind < 3:
        for _ in range(draw.choice((1, 1, 2, 8))):
            out[draw.randrange(size)] ^= 1 << draw.randrange(8)
    elif kind == 3:
        del out[draw.randrange(size) :]
    elif kind == 4:
        del out[a : min(b, a + 40)]
    elif kind == 5:
        out[a:b] = out[a:b] * 2
    elif kind == 6:
        out[a : min(b, a + 16)] = draw.choice((b"\0", b"\xff", b"9")) * min(b - a, 16)
    elif kind == 7:
        middle = draw.randrange(a, b + 1)
        out[a:b] = out[middle:b] + out[a:middle]
    else:
        out[a:a] = draw.choice((draw.randbytes(8), b"[" * 10**5, b"PK\5\6" + bytes(18), pickle.dumps(print), b"\x1f\x8b"))
    return bytes(out)


HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 2**31, 2**40, 2**63 - 1, 2**70, 0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "lambda", "\ud800", "\0", "é" * 300, "../../etc/passwd", "__import__('os').system('x')", "S(9)", "S(0)" * 500, "P(max)R"),
    *([], {}, [[]], [0, "a"], {"as_none": True}, {"as_int": 2**62}, {"as_expr": {"expr_str": "Pow(Integer(9),Integer(999))"}}),
    *({"as_graph": {}}, {"as_string": "x" * 1000}, {"as_ints": [2**40] * 5}, {"as_custom_obj": {"name": "x", "class_fqn": "os"}}),
    *("Integer(" * 400, "sympify('1')", "Mul(" + "Integer(2), " * 300 + "Integer(1))", "torch.hub.load", "os.system", "operator.getitem"),
    *("Pow(" * 30 + "Integer(9)" + ", Integer(64))" * 30, "Mul(" + ", ".join(["Symbol('s0')"] * 3000) + ")", "n" * 10**6),
)
"""Values that a field may be replaced by."""


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    found = [way]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*way, key))
    return found


def _at(value: Any, way: tuple[Any, ...]) -> Any:
    for key in way:
        value = value[key]
    return value


def _number_like(draw: random.Random, value: Any) -> Any:
    if type(value) is int:
        return draw.choice((value + 1, value - 1, -value, value * 2, value << 20, value << 45, 10**9))
    if type(value) is float:
        return draw.choice((value * 2, -value, value * 1e300))
    if isinstance(value, str) and value.startswith("torch.ops."):
        return draw.choice(operators())
    return draw.choice(HOSTILE)


@cache
def operators() -> tuple[str, ...]:
    """The names of all overloads of aten, prims and fxshard."""
    spaces, found = ("aten", "prims", "fxshard", "_c10d_functional", "inductor", "profiler", "quantized"), []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space in spaces and hasattr(getattr(getattr(torch.ops, space), packet, None), overload or "default"):
            found.append(f"torch.ops.{space}.{packet}.{overload or 'default'}")
    return tuple(found)


def changed_json(draw: random.Random, data: bytes) -> bytes:
    """JSON with one to three of its values replaced, removed, doubled or exchanged; or written in another way."""
    value = json.loads(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        ways = [way for way in places(value) if way]
        if not ways:
            return b"[" * 10**5
        way, other = draw.choice(ways), draw.choice(ways)
        owner, key = _at(value, way[:-1]), way[-1]
        kind = draw.randrange(10)
        if kind < 3:
            owner[key] = draw.choice(HOSTILE)
        elif kind < 6:
            owner[key] = _number_like(draw, owner[key])
        elif kind == 6:
            del owner[key]
        elif kind == 7:
            owner[key] = json.loads(json.dumps(_at(value, other)))
        elif kind == 8 and isinstance(owner, list):
            owner.insert(key, owner[key])
        elif isinstance(owner, dict):
            owner["pickle"] = 1
    text = json.dumps(value)
    if draw.randrange(20) == 0:
        hostile = draw.choice(("1" * 5000, "1e999", "[" * 10**5, "NaN", '{"a": 1, "a": 2}', "-" * 9))
        numbers = [i for i, c in enumerate(text) if c.isdigit() and not text[i - 1].isalnum()]
        place = draw.choice(numbers or [0])
        text = text[:place] + hostile + text[place + 1 :]
    return text.encode("utf-8", "surrogatepass")


def unsealed(draw: random.Random, data: bytes) -> bytes:
    """A plan as somebody edits it: changed, and without its hash."""
    return changed_json(draw, json.dumps({name: value for name, value in json.loads(data).items() if name != "sha256"}).encode())


def resealed(draw: random.Random, data: bytes) -> bytes:
    """Fields changed and the hash in the file made right again; what is no JSON object is damaged."""
    if not data.startswith(b"{"):
        return damaged(draw, data)
    text = changed_json(draw, data)
    with contextlib.suppress(ValueError, AttributeError, TypeError, KeyError, RecursionError):
        said = json.loads(text)
        said.pop("sha256")
        return write_sealed(said).encode()
    return text


def changed_plan(draw: random.Random, data: bytes) -> bytes:
    return draw.choice((changed_json, unsealed, resealed))(draw, data)


NUMBERS = (-1, 0, 1, 2, 3, 7, 10**4, 10**7, 2**31, 2**40, 2**62, -(2**62))


def foreign_call(draw: random.Random, data: bytes) -> bytes:
    """A graph in which one node calls another operator, drawn from all, with arguments of the types of its schema."""
    value = json.loads(data)
    graph = value["graph_module"]["graph"]
    place = draw.randrange(len(graph["nodes"]))
    node = graph["nodes"][place]
    known = [n["arg"]["as_tensor"]["name"] for one in graph["nodes"][: place + 1] for n in one["inputs"] if "as_tensor" in n["arg"]]
    if not known:
        return changed_json(draw, data)
    node["target"] = draw.choice(operators())
    numbers = (draw.choice(NUMBERS),) if draw.randrange(3) == 0 else NUMBERS
    _, _, space, packet, overload = node["target"].split(".")
    schema = getattr(getattr(getattr(torch.ops, space), packet), overload)._schema
    node["inputs"] = [
        {"name": one.name, "arg": _argument(draw, str(one.type), known, numbers), "kind": 2 if one.kwarg_only else 1}
        for one in schema.arguments
        if not one.has_default_value() or draw.randrange(3) == 0
    ]
    for one in graph["tensor_values"].values():  # a large operand costs nothing until it is computed with
        if draw.randrange(4) == 0 and one["sizes"]:
            draw.choice(one["sizes"])["as_int"] = abs(draw.choice(numbers))
    return json.dumps(value).encode()


def _argument(draw: random.Random, kind: str, tensors: list[str], numbers: Sequence[int]) -> dict[str, Any]:
    kind = kind.removeprefix("Optional[").rstrip("]") if kind.startswith("Optional") else kind
    tensor = {"as_tensor": {"name": draw.choice(tensors)}}
    if kind in ("Tensor", "number"):
        return tensor if kind == "Tensor" else {"as_int": draw.choice(numbers)}
    if kind.startswith("List[Tensor") or kind.startswith("List[Optional"):
        return {"as_tensors": [{"name": draw.choice(tensors)} for _ in range(draw.randrange(1, 4))]}
    if kind.startswith("List[float"):
        return {"as_floats": [draw.choice((0.5, 1e9))] * draw.randrange(1, 4)}
    if kind.startswith("List[bool"):
        return {"as_bools": [True] * draw.randrange(1, 4)}
    if kind.startswith("List"):
        return {"as_ints": [draw.choice(numbers) for _ in range(draw.randrange(1, 4))]}
    plain: dict[str, Any] = {"float": {"as_float": draw.choice((0.5, 1e9, -1.0))}, "bool": {"as_bool": True}}
    texts: dict[str, Any] = {"str": {"as_string": draw.choice(("mean", "none", "bi,io->bo", "dp"))}}
    return (plain | texts).get(kind, {"as_int": draw.choice(numbers)})


def changed_function(draw: random.Random, data: bytes) -> bytes:
    """A graph in which one text of a function of flex attention is changed, as JSON or as bytes."""
    value = json.loads(data)
    texts = [n["arg"] for one in value["graph_module"]["graph"]["nodes"] for n in one["inputs"] if "as_string" in n["arg"]]
    text, mutation = draw.choice(texts), damaged if draw.randrange(4) == 0 else changed_json
    text["as_string"] = mutation(draw, text["as_string"].encode()).decode(errors="replace")
    return json.dumps(value).encode()


def unpacked(data: bytes) -> Entries:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def packed(entries: Entries, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # of names that occur twice
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=compression)
    return buffer.getvalue()


def vouched(entries: Entries) -> Entries:
    """The entries with a manifest that lists them all with the right hashes."""
    try:
        manifest = dict(json.loads(dict(entries)[MANIFEST]))
    except (ValueError, TypeError):  # the manifest itself was changed
        return entries
    listed: Mapping[str, bytes] = {name.removeprefix("archive/"): data for name, data in entries if name != MANIFEST}
    manifest["entries"] = [{"name": n, "bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in listed.items()]
    return [(name, json.dumps(manifest).encode() if name == MANIFEST else data) for name, data in entries]


def _bomb(draw: random.Random) -> bytes:
    return draw.choice((bytes(3 * 10**7), b"[" + b"[]," * 5 * 10**6 + b"0]", b'{"a":' * 10**5, b"[0," * 10**6, b'"' + b"x" * 10**7 + b'"'))


CLIMBING = ("../evil", "archive/../../evil", "/etc/evil", "archive/", "C:\\evil", "archive/models/../evil", "archive/data/weights/weight_0")


def changed_archive(draw: random.Random, data: bytes) -> bytes:
    """An archive with entries exchanged, doubled, renamed, removed, added or changed; often with a manifest that vouches for them."""
    entries = unpacked(data)
    one, other = draw.sample(range(len(entries)), 2)
    if draw.randrange(10) < 7:  # most of a program is in its JSON
        one = draw.choice([i for i, (name, _) in enumerate(entries) if name.endswith(".json") and "_config" not in name and i != other])
    name, content = entries[one]
    kind, compression = draw.randrange(12), zipfile.ZIP_STORED
    if name.startswith("archive/models/") and draw.randrange(2):
        entries[one] = (name, foreign_call(draw, content))
    elif kind < 5:
        table: Callable[[random.Random, bytes], bytes] = changed_json if name.endswith(".json") else damaged
        table = changed_plan if name.endswith("/plan.json") else table
        entries[one] = (name, table(draw, content))
    elif kind == 5:
        entries[one], entries[other] = (name, entries[other][1]), (entries[other][0], content)
    elif kind == 6:
        entries.append((name, draw.choice((content, entries[other][1]))))
    elif kind == 7:
        entries[one] = (draw.choice(CLIMBING), content)
    elif kind == 8:
        del entries[one]
    elif kind == 9:
        entries.append((draw.choice(CLIMBING), draw.choice((pickle.dumps(print), b"", content))))
    elif kind == 10:
        entries[one] = (name, draw.choice((pickle.dumps(print), b"", b"\0", draw.randbytes(50), entries[other][1])))
    else:
        compression = draw.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
        entries[one] = (name, _bomb(draw) if draw.randrange(4) == 0 else changed_json(draw, content) if name.endswith(".json") else content)
    if draw.randrange(8) and MANIFEST in dict(entries) and name != MANIFEST:
        entries = vouched(entries)
    return packed(entries, compression)
