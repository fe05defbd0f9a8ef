"""Runs a captured graph on fakes to see what it returns; nothing is computed, and no random numbers are drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from fxshard._torch_compat import pytree
from fxshard._torch_compat.dynamo.transforms import transforms_ended
from fxshard._torch_compat.fakes import FakeTensor, FakeTensorMode
from fxshard._torch_compat.sizes.needless_guards import run_on_symbols
from fxshard._torch_compat.tracing import without_saved_tensor_hooks
from fxshard.passes.trace.functions.recurrent import has_recurrent, recurrent_shapes

NEW = frozenset({functional.linear, functional.cross_entropy, functional.mse_loss, functional.nll_loss, functional.layer_norm})
"""Common last functions of models, whose result shares memory with no other tensor."""


def returns_new_memory(graph: fx.Graph) -> bool:
    """Whether it is evident, without running the graph, that no output shares memory with an input or another output. False for graphs
    with sizes known only at run time: AOTAutograd relies on a run that has seen them before."""
    if any(node.meta.get("unbacked_bindings") for node in graph.nodes):
        return False
    leaves = [leaf for leaf in pytree.tree_leaves(graph.output_node().args[0]) if isinstance(leaf, fx.Node)]
    return len(set(leaves)) == len(leaves) and all(leaf.op == "call_function" and leaf.target in NEW for leaf in leaves)


def probe(
    module: fx.GraphModule,
    args: Sequence[Any],
    grad: bool = False,
    run: Callable[[fx.GraphModule, Sequence[Any]], Any] = lambda module, args: fx.Interpreter(module).run(*args),
) -> list[Any]:
    """The flat results of ``module`` on fake ``args``. ``grad``: with autograd enabled; ``run``: runs the module, a second time if its
    first run fails. Restores the user's random state."""
    held = (*args, *module.parameters(), *module.buffers())
    mode = next((t.fake_mode for t in held if isinstance(t, FakeTensor)), None) or FakeTensorMode(allow_non_fake_inputs=True)
    env = mode.shape_env  # sizes known only at run time become new symbols here, which no node will define
    symbols = env.ignore_fresh_unbacked_symbols() if env else contextlib.nullcontext()
    shapes = recurrent_shapes() if has_recurrent(module) else contextlib.nullcontext()
    with (
        mode,
        shapes,
        without_saved_tensor_hooks(),
        torch.set_grad_enabled(grad),
        symbols,
        transforms_ended(),
        torch.random.fork_rng(devices=[]),
    ):
        results = run_on_symbols(env, lambda: run(module, args)) if env else run(module, args)
    return pytree.tree_leaves(results)
