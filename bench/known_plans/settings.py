"""The settings, in each of which one known plan is known to be best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import fxshard
from bench.known_plans import formulas
from bench.known_plans.compare import Setting
from bench.known_plans.formulas import Sizes
from bench.known_plans.layouts import KnownLayouts
from examples.llama import LlamaConfig
from fxshard.mesh.mesh import Mesh

WIDE = LlamaConfig(layers=2)
"""Two layers of Llama 3 8B."""
NARROW = LlamaConfig(vocab=8192, layers=2, dim=1024, heads=32, kv_heads=8, ffn=4096)

TENSOR = KnownLayouts("S(0)", "S(1)", "R", "S(0)", "R", added="P", embedded="P", statistics="P")
DATA = KnownLayouts("R", "R", "R", "R", "S(0)", learned="P", sums="P")
CUT = tuple(fxshard.Forbid(name, "R") for name in ("tok_embeddings.weight", "output.weight", "layers.*.w?.weight"))
"""No matrix may be replicated."""
SPREAD = tuple(fxshard.Forbid(name, "R") for name in ("layers.?", "layers.?.*norm", "layers.?.attention", "output"))
"""The results of layers, norms and attention, and the logits, may not be replicated: tokens stay sharded."""


def megatron() -> Setting:
    sizes = Sizes(WIDE, batch=1, length=128)
    terms = (*formulas.megatron(sizes, "tp", 8), *formulas.vocabulary(sizes, "tp", 8))
    best = "one short sequence, replicated: activations are small compared with the weights"
    return Setting("Megatron", best, sizes, Mesh({"tp": 8}, "h100"), "R", TENSOR, terms)


def megatron_by_bytes() -> Setting:
    """Like ``megatron``, but no matrix may be replicated, because a plan that replicates all of them sends nothing."""
    return replace(megatron(), name="Megatron, bytes", objective="communication", constraints=CUT)


def sequence() -> Setting:
    sizes = Sizes(WIDE, batch=1, length=4096)
    layouts = replace(TENSOR, stream="S(1)", learned="P")
    best = "one long sequence: it is worth sharding norms and residuals too"
    terms = formulas.sequence_parallel(sizes, "tp", 8)
    return Setting("Megatron + sequence", best, sizes, Mesh({"tp": 8}, "h100"), "R", layouts, terms)


def sequence_by_bytes() -> Setting:
    """Like ``sequence``, but shorter: for a sequence as long as that, gathering the weights of attention sends less."""
    sizes = Sizes(WIDE, batch=1, length=512)
    terms = formulas.sequence_parallel(sizes, "tp", 8)
    name = "Megatron + sequence, bytes"
    return replace(sequence(), name=name, sizes=sizes, terms=terms, objective="communication", constraints=CUT)


def vocabulary() -> Setting:
    sizes = Sizes(replace(WIDE, layers=0), batch=1, length=512)
    best = "embedding, head and loss alone, 128,256 words"
    return Setting("vocabulary", best, sizes, Mesh({"tp": 8}, "h100"), "R", TENSOR, formulas.vocabulary(sizes, "tp", 8))


def vocabulary_by_bytes() -> Setting:
    return replace(vocabulary(), name="vocabulary, bytes", objective="communication", constraints=CUT[:2])


def data() -> Setting:
    sizes = Sizes(NARROW, batch=64, length=2048)
    best = "a large batch, small weights, no memory limit"
    return Setting("DDP", best, sizes, Mesh({"dp": 8}, "h100"), "S(0)", DATA, formulas.data_parallel(sizes, "dp", 8))


def data_by_bytes() -> Setting:
    """Like ``data``, but tokens must stay sharded, because a plan with all tokens on each rank sends almost nothing."""
    return replace(data(), name="DDP, bytes", objective="communication", constraints=SPREAD)


def sharded() -> Setting:
    sizes = Sizes(NARROW, batch=64, length=4096)
    layouts = KnownLayouts("S(0)", "S(0)", "S(0)", "S(0)", "S(0)", learned="P", embedded="S(0)", sums="P", looked_up="P")
    best = "data parallel, and a device has no room for all weights with their Adam state"
    mesh, terms = Mesh({"dp": 8}, "h100"), formulas.fully_sharded(sizes, "dp", 8, gathers=1)
    return Setting("FSDP", best, sizes, mesh, "S(0)", layouts, terms, memory_limit=8_720_000_000, optimizer="adam")


def sharded_by_bytes() -> Setting:
    return replace(sharded(), name="FSDP, bytes", objective="communication", memory_limit=None, constraints=(*CUT, *SPREAD))


def sharded_again() -> Setting:
    """Like ``sharded``, but wide, and with almost no room for gathered weights beside the saved activations."""
    sizes = Sizes(replace(WIDE, vocab=8192), batch=16, length=4096)
    terms = formulas.fully_sharded(sizes, "dp", 8, gathers=2)
    best = "data parallel, and a device has no room for weights that are kept gathered from the forward to the backward"
    return replace(sharded(), name="FSDP, gathered again", best=best, sizes=sizes, terms=terms, memory_limit=5_488_000_000)


def hybrid() -> Setting:
    sizes = Sizes(NARROW, batch=128, length=4096)
    weights = "RS(0)"
    layouts = KnownLayouts(weights, weights, weights, weights, "S(0)S(0)", learned="PP", sums="PP")
    best = "as FSDP, on two nodes with a slow link between them"
    mesh, terms = Mesh({"dp": 2, "fsdp": 8}, "h100"), formulas.hybrid(sizes, "fsdp", 8, "dp", 2, gathers=1)
    return Setting("HSDP", best, sizes, mesh, "S(0)S(0)", layouts, terms, memory_limit=8_720_000_000, optimizer="adam")


def hybrid_by_bytes() -> Setting:
    """FSDP over both axes sends as much, because bytes do not depend on the links."""
    whole = [fxshard.Forbid(one.name, "RR") for one in CUT]
    spread = [fxshard.Forbid(one.name, "R", axis=axis) for one in SPREAD for axis in ("dp", "fsdp")]
    return replace(hybrid(), name="HSDP, bytes", objective="communication", memory_limit=None, constraints=(*whole, *spread))


def hybrid_again() -> Setting:
    sizes = Sizes(replace(WIDE, vocab=8192), batch=32, length=4096)
    terms = formulas.hybrid(sizes, "fsdp", 8, "dp", 2, gathers=2)
    best = sharded_again().best
    return replace(hybrid(), name="HSDP, gathered again", best=best, sizes=sizes, terms=terms, memory_limit=5_488_000_000)


def sharded_and_tensor() -> Setting:
    sizes = Sizes(replace(WIDE, vocab=16384), batch=8, length=4096)
    layouts = KnownLayouts(
        columns="S(1)S(0)",
        rows="S(0)S(1)",
        norms="RR",
        tables="S(1)S(0)",
        stream="S(0)S(1)",
        added="S(0)P",
        learned="PP",
        embedded="S(0)P",
        statistics="S(0)P",
        sums="PR",
        looked_up="PS(0)",
    )
    best = "eight nodes, one sequence on each, and a device has no room for an eighth of the weights with its Adam state"
    mesh, terms = Mesh({"dp": 8, "tp": 8}, "h100"), formulas.sharded_and_tensor_parallel(sizes, "dp", 8, "tp", 8, gathers=1)
    return Setting("FSDP x TP", best, sizes, mesh, "S(0)R", layouts, terms, memory_limit=745_000_000, optimizer="adam")


def ulysses() -> Setting:
    sizes = Sizes(NARROW, batch=1, length=65536)
    layouts = replace(DATA, stream="S(1)")
    terms = (*formulas.ulysses(sizes, "cp", 8), *formulas.data_parallel(sizes, "cp", 8))
    best = "one very long sequence, sharded"
    return Setting("Ulysses", best, sizes, Mesh({"cp": 8}, "h100"), "S(1)", layouts, terms)


def ulysses_by_bytes() -> Setting:
    return replace(ulysses(), name="Ulysses, bytes", objective="communication", constraints=SPREAD)


SETTINGS: dict[str, Callable[[], Setting]] = {
    make.__name__: make
    for make in (
        megatron,
        megatron_by_bytes,
        sequence,
        sequence_by_bytes,
        vocabulary,
        vocabulary_by_bytes,
        data,
        data_by_bytes,
        sharded,
        sharded_again,
        sharded_by_bytes,
        hybrid,
        hybrid_again,
        hybrid_by_bytes,
        sharded_and_tensor,
        ulysses,
        ulysses_by_bytes,
    )
}
