"""nn.LSTM, nn.GRU and nn.RNN while tracing: unrolled over time into contractions and pointwise operators, each with a rule.

With hidden size h and k gates, torch's weight [k h, x] is viewed as [k, h, x], so that a shard of h contains its part of every gate. The
input is multiplied once for all steps; each step multiplies the state [b, h], and the rest of it is pointwise:

    read = einsum(x, w_ih) + b_ih        s b x, k h x -> s b k h
    gates = read[t] + einsum(h, w_hh)    b y, k h y -> b k h

If the batch is sharded, no step communicates, and gradients of weights stay pending sums until all steps are added up. If h is sharded,
each step gathers its state or reduces its product. The graph grows with the number of steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.nn.utils.rnn import PackedSequence

from fxshard._torch_compat import pytree
from fxshard._torch_compat.dynamo.capture import computed_as, recurrent_modules
from fxshard._torch_compat.sizes.symbols import asking
from fxshard.errors import TraceError
from fxshard.passes.trace.functions.draws import masked

State = tuple[Tensor, ...]
"""The state of one layer and direction: h, and for an LSTM c, each [b, h]."""


class Mode(AbstractContextManager[Any], Protocol):
    """The function mode of a trace, which is disabled inside a replacement; it numbers the draws."""

    draws: Iterator[int]


@dataclass(frozen=True)
class Weights:
    """The weights of one layer and direction: ``read`` [k, h, x], ``recur`` [k, h, y], biases [k, h] or None, and an LSTM's projection
    [p, h] or None."""

    read: Tensor
    recur: Tensor
    read_bias: Tensor | None
    recur_bias: Tensor | None
    project: Tensor | None


Step = Callable[[Tensor, State, Weights], State]


def lstm_step(read: Tensor, state: State, w: Weights) -> State:
    i, f, g, o = _gates(read, state, w).unbind(1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if w.project is None else torch.einsum("bh,ph->bp", h, w.project)), c


def gru_step(read: Tensor, state: State, w: Weights) -> State:
    """The reset gate scales the state's contribution to the new gate, its bias included."""
    h = state[0]
    recur = _biased(torch.einsum("by,khy->bkh", h, w.recur), w.recur_bias)
    (r, z, n), (of_r, of_z, of_n) = read.unbind(1), recur.unbind(1)
    new = (n + (r + of_r).sigmoid() * of_n).tanh()
    return ((h - new) * (z + of_z).sigmoid() + new,)


def rnn_step(activation: Callable[[Tensor], Tensor]) -> Step:
    return lambda read, state, w: (activation(_gates(read, state, w).squeeze(1)),)


def _gates(read: Tensor, state: State, w: Weights) -> Tensor:
    return read + torch.einsum("by,khy->bkh", state[0], w.recur)


def _biased(value: Tensor, bias: Tensor | None) -> Tensor:
    return value if bias is None else value + bias.to(value.dtype)


@dataclass(frozen=True)
class Kind:
    """A recurrent operator. ``gates``: their number; ``states``: the number of tensors in its state; ``one_bias``: whether both biases are
    only added, so that their sum replaces them; ``casts_all``: whether autocast casts all arguments rather than the products' operands."""

    name: str
    gates: int
    states: int
    step: Step
    one_bias: bool = True
    casts_all: bool = False


KINDS = {
    torch.lstm: Kind("nn.LSTM", 4, 2, lstm_step, casts_all=True),
    torch.gru: Kind("nn.GRU", 3, 1, gru_step, one_bias=False),
    torch.rnn_tanh: Kind("nn.RNN", 1, 1, rnn_step(torch.tanh)),
    torch.rnn_relu: Kind("nn.RNN", 1, 1, rnn_step(torch.relu)),
}


def recurrent(kind: Kind) -> Callable[..., Any]:
    """The replacement for ``torch.lstm`` and the like, which returns (output, final states)."""

    def traced(mode: Mode, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        packed = isinstance(given.get("params"), Tensor) or isinstance(given["hx"], Tensor) == (kind.states > 1)
        if packed or "batch_sizes" in given:
            raise packed_error(f"the input of {kind.name}")
        with mode:
            return _layers(mode, kind, **(pytree.tree_map(_autocast, given) if kind.casts_all else given))

    return traced


ARGUMENTS = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
"""The arguments of all recurrent functions; for a PackedSequence the second one is a tensor of batch sizes."""


def is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


@contextlib.contextmanager
def recurrent_captured() -> Iterator[None]:
    """While Dynamo captures: traces through recurrent modules, and raises TraceError where a PackedSequence is made."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise packed_error("the result of pack_padded_sequence")

    with recurrent_modules(refuse), recurrent_shapes():
        yield


def recurrent_shapes() -> AbstractContextManager[None]:
    """While fakes are computed: a recurrent operator returns fakes of the right shapes without running its steps.

    Torch's fake implementation runs every step of the sequence, and branches on whether a size is 1.
    """
    return computed_as(SHAPES)


def has_recurrent(module: fx.GraphModule) -> bool:
    """Whether a captured graph or a subgraph of it calls a recurrent operator.

    ``recurrent_shapes`` is needed only then. It is not used otherwise because it has a side effect: under it a dropout that drops nothing
    returns a new tensor, not its input."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    return any(node.target in KINDS for graph in graphs for node in graph.nodes if node.op == "call_function")


def _shapes(kind: Kind) -> Callable[..., Any]:
    def shaped(*args: Any) -> tuple[Tensor, ...]:
        given = dict(zip(ARGUMENTS, args, strict=True))
        input, states = given["input"], given["hx"] if kind.states > 1 else [given["hx"]]
        needed = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor) and t.requires_grad]
        zero = sum((t.sum() for t in needed), input.new_zeros(()))  # so that each of them gets a gradient
        steps, batch = (input.shape[1], input.shape[0]) if given["batch_first"] else input.shape[:2]
        output = input.new_empty(steps, batch, states[0].shape[2] * (2 if given["bidirectional"] else 1)) + zero
        return (output.transpose(0, 1) if given["batch_first"] else output, *(s + zero for s in states))

    return shaped


def packed_error(what: str) -> TraceError:
    return TraceError(
        f"{what} is a PackedSequence: the number of rows at each step depends on its data, which a graph cannot read",
        remedy="give the module the padded tensor, and mask its output: with batch_first the last step of each row is "
        "output[torch.arange(batch), lengths - 1]; of a bidirectional module the backward direction then begins in the padding",
    )


def _autocast(value: Any) -> Any:
    """A tensor cast as autocast would cast it; other values unchanged."""
    if not isinstance(value, Tensor) or not torch.is_autocast_enabled(value.device.type) or value.dtype == torch.float64:
        return value
    return value.to(torch.get_autocast_dtype(value.device.type)) if value.is_floating_point() else value


def _layers(
    mode: Mode,
    kind: Kind,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    runs = num_layers * (2 if bidirectional else 1)
    states = list(zip(*(s.unbind(0) for s in (hx if kind.states > 1 else [hx])), strict=True))
    each = len(params) // runs
    weights = [_weights(kind, params[i * each : (i + 1) * each], has_biases) for i in range(runs)]
    x, finals, per = input.transpose(0, 1) if batch_first else input, list[State](), runs // num_layers
    for layer in range(num_layers):
        if layer and train and dropout:
            x = masked(mode, x, dropout, kind.name)
        outputs = []
        for i in range(layer * per, (layer + 1) * per):
            output, final = _over_time(kind, x, states[i], weights[i], reverse=i % per == 1)
            outputs.append(output)
            finals.append(final)
        x = torch.cat(outputs, 2) if bidirectional else outputs[0]
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(f) for f in zip(*finals, strict=True)))


def _weights(kind: Kind, params: Sequence[Tensor], has_biases: bool) -> Weights:
    """The weights of one layer and direction. ``params``: both weights, both biases if any, a projection if any."""
    read, recur = (w.view(kind.gates, -1, w.shape[1]) for w in params[:2])
    rest = list(params[2:])
    biases = [b.view(kind.gates, -1) for b in rest[:2]] if has_biases else []
    if kind.one_bias:
        biases = [sum(biases[1:], biases[0])] if biases else []
    of_read, of_recur = (*biases, None, None)[:2]
    return Weights(read, recur, of_read, of_recur, (*rest[2 if has_biases else 0 :], None)[0])


def _over_time(kind: Kind, x: Tensor, state: State, w: Weights, reverse: bool) -> tuple[Tensor, State]:
    """(h of all steps [s, b, h], the final state) of one layer and direction."""
    read_at_once = _biased(torch.einsum("sbx,khx->sbkh", x, w.read), w.read_bias)
    with asking(f"{kind.name}, which is written out step by step"):
        reads = read_at_once.unbind(0)
    if not reads:
        raise TraceError(f"{kind.name} gets a sequence without steps", remedy="give it at least one step, or leave the call out")
    steps = []
    for read in reversed(reads) if reverse else reads:
        state = kind.step(read, state, w)
        steps.append(state[0])
    return torch.stack(steps[::-1] if reverse else steps), state


def cell(kind: Kind) -> Callable[..., Any]:
    """The replacement for ``torch.lstm_cell`` and the like: one step."""

    def traced(
        mode: Mode, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        biases = [b for b in (b_ih, b_hh) if b is not None]
        if len(biases) == 1:  # torch's modules have both or none
            return NotImplemented
        with mode:
            w = _weights(kind, [w_ih, w_hh, *biases], bool(biases))
            read = _biased(torch.einsum("bx,khx->bkh", input, w.read), w.read_bias)
            state = kind.step(read, tuple(hx) if kind.states > 1 else (hx,), w)
        return state if kind.states > 1 else state[0]

    return traced


SHAPES = {getattr(torch.ops.aten, function.__name__).input: _shapes(kind) for function, kind in KINDS.items()}
RECURRENT = {function: recurrent(kind) for function, kind in KINDS.items()}
RECURRENT |= {getattr(torch, f"{function.__name__}_cell"): cell(kind) for function, kind in KINDS.items()}
