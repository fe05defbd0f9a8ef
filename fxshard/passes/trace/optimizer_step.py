"""with_step: a training graph and an optimiser to one graph that takes a batch, returns the loss and updates parameters and state.

The graph of forward and backward (``trace(train=True)``) has tangents as inputs and gradients as outputs. Here the tangent of the loss is
one, and each gradient goes into the optimiser's formula, written in aten: what was a gradient is then the new value of a parameter. State
and learning rates are inputs like parameters, under names that begin with ``optimizer``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.errors import OptionError, TraceError
from fxshard.graph.planning_graph import GraphInput, GraphOutput, PlanningGraph

ROOT = "optimizer"
Values = dict[str, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Values, Mapping[str, Any]], tuple[torch.Tensor, Values]]
"""(parameter, gradient, learning rate, state, options of the group) -> (new parameter, new state)."""


def _sgd(p: torch.Tensor, grad: torch.Tensor, lr: torch.Tensor, state: Values, o: Mapping[str, Any]) -> tuple[torch.Tensor, Values]:
    """The update of ``torch.optim.SGD``."""
    grad = _descent(p, grad, o, decays=True)
    new = {name: value * o["momentum"] + grad * (1 - o["dampening"]) for name, value in state.items()}
    for buffer in new.values():
        grad = grad + buffer * o["momentum"] if o["nesterov"] else buffer
    return p - grad * lr, new


def _adam(p: torch.Tensor, grad: torch.Tensor, lr: torch.Tensor, state: Values, o: Mapping[str, Any]) -> tuple[torch.Tensor, Values]:
    """The update of ``torch.optim.Adam``, or of ``AdamW``, whose decay is decoupled from the gradient."""
    first, second = map(float, o["betas"])
    grad = _descent(p, grad, o, decays=not o["decoupled_weight_decay"])
    if o["decoupled_weight_decay"] and o["weight_decay"]:
        p = p * (1 - lr * o["weight_decay"])
    step = state["step"] + 1
    mean = state["exp_avg"] + (grad - state["exp_avg"]) * (1 - first)
    square = state["exp_avg_sq"] * second + grad * grad * (1 - second)
    new = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
    if o["amsgrad"]:
        new["max_exp_avg_sq"] = square = torch.maximum(state["max_exp_avg_sq"], square)
    counted = step.double()
    unbiased = square.sqrt() / (1 - second**counted).sqrt() + o["eps"]
    return p - mean / unbiased * (lr / (1 - first**counted)), new


def _descent(p: torch.Tensor, grad: torch.Tensor, o: Mapping[str, Any], *, decays: bool) -> torch.Tensor:
    grad = -grad if o["maximize"] else grad
    return grad + p * o["weight_decay"] if decays and o["weight_decay"] else grad


RULES: Mapping[type, Step] = {torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adam}


def _state_names(kind: type, o: Mapping[str, Any]) -> tuple[str, ...]:
    if kind is torch.optim.SGD:
        return ("momentum_buffer",) if o["momentum"] else ()
    return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if o["amsgrad"] else ()))


@dataclass(frozen=True)
class Trained:
    """A parameter that the optimiser updates: its group's number and options, and its state, by the names of torch's optimisers."""

    name: str
    group: int
    options: Mapping[str, Any]
    state: Mapping[str, torch.Tensor]

    def path(self, key: str) -> str:
        return f"{ROOT}.{self.name}.{key}"

    @property
    def rate(self) -> str:
        return f"{ROOT}.groups.{self.group}.lr"


def trained_parameters(model: nn.Module, optimizer: Any) -> tuple[type, list[Trained]]:
    """(the class, what it updates) of an optimiser of ``model``: an object, or a class or function of parameters. Raises OptionError."""
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else _made(model, optimizer)
    if type(made) not in RULES:
        remedy = f"use {', '.join(sorted(one.__name__ for one in RULES))}; or export without optimizer= and step outside of the program"
        raise OptionError(f"a program cannot hold the step of {type(made).__name__}", where="optimizer", remedy=remedy)
    if any(name == ROOT for name, _ in model.named_children()):
        raise OptionError(f"the model has a submodule {ROOT!r}, the name of the state", where="optimizer", remedy="rename the submodule")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for number, group in enumerate(made.param_groups):
        if group.get("dampening") and group["momentum"]:
            raise OptionError("dampening has another first step than later ones", where="optimizer", remedy="use dampening=0")
        for parameter in group["params"]:
            if id(parameter) not in names:
                remedy = "make it from model.parameters() of the model that is exported"
                raise OptionError("the optimizer updates a parameter that the model does not have", where="optimizer", remedy=remedy)
            held = made.state.get(parameter, {})
            state = {key: held[key] if held.get(key) is not None else _zeros(key, parameter) for key in _state_names(type(made), group)}
            found.append(Trained(names[id(parameter)], number, group, state))
    return type(made), found


def _made(model: nn.Module, optimizer: Any) -> Any:
    try:
        return optimizer([p for p in model.parameters() if p.requires_grad])
    except Exception as error:
        remedy = "give torch.optim.AdamW, functools.partial(torch.optim.AdamW, lr=1e-3), or an optimiser of the model's parameters"
        raise OptionError(f"cannot make an optimiser of {optimizer!r:.80}: {error}", where="optimizer", remedy=remedy) from error


def _zeros(key: str, parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), device=parameter.device) if key == "step" else torch.zeros_like(parameter, requires_grad=False)


def with_step(graph: PlanningGraph, model: nn.Module, optimizer: Any) -> tuple[PlanningGraph, Values]:
    """(``graph`` with the step of ``optimizer`` in it, the initial state by name). Raises OptionError, TraceError without a loss."""
    kind, trained = trained_parameters(model, optimizer)
    graphed = {end.name for end in graph.outputs if end.kind == "gradient"}
    trained = [one for one in trained if graph.aliases.get(one.name, one.name) in graphed]
    trained = [replace(one, name=graph.aliases.get(one.name, one.name)) for one in trained]
    every_size = graph if graph.family is None else replace(graph, module=graph.family.module)
    made, state = _Builder(every_size, kind, trained).build()
    return made.with_family(made.module), state


class _Builder:
    def __init__(self, graph: PlanningGraph, kind: type, trained: list[Trained]) -> None:
        self.before, self.rule, self.trained = graph, RULES[kind], trained
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inputs: list[GraphInput] = []
        self.nodes: dict[str, fx.Node] = {}
        self.state: Values = {}

    def build(self) -> tuple[PlanningGraph, Values]:
        loss = self.loss()
        placeholders = [n for n in self.before.nodes if n.op == "placeholder"]
        mode = placeholders[0].meta["val"].fake_mode
        tangents = []
        for node, end in zip(placeholders, self.before.inputs, strict=True):
            if end.kind == "tangent":
                tangents.append((node, end.name))
                continue
            self.copies[node] = self.graph.node_copy(node)
            self.inputs.append(end)
            self.nodes[end.name] = self.copies[node]
        for one in self.trained:
            for name, value in self.values_of(one).items():
                self.input(name, value, mode)
        for node, name in tangents:
            self.copies[node] = self.constant(node.meta["val"], 1.0 if name == loss else 0.0, mode)
        for node in self.before.nodes:
            if node.op == "call_function":
                self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
                self.copies[node].meta = {k: v for k, v in node.meta.items() if k not in ("partitioner_tag", "recompute", "ac_graph_id")}
        self.finish()
        graph = fx.GraphModule(self.before.module, self.graph)
        outputs = tuple(end for end in self.before.outputs if end.kind != "gradient")
        changed = tuple(GraphOutput("mutation", name) for name in self.changed)
        made = replace(self.before, module=graph, inputs=tuple(self.inputs), outputs=outputs + changed, train=False, unreduced=frozenset())
        return made, self.state

    def loss(self) -> str:
        """The tangent of the loss: the only output that is one floating-point number."""
        results = self.before.module.graph.output_node().args[0]
        ends = [(end, node) for end, node in zip(self.before.outputs, results, strict=True) if end.kind == "output"]
        tangents = {end.name for end in self.before.inputs if end.kind == "tangent"}
        numbers = [end.tangent for end, node in ends if node.meta["val"].dim() == 0 and end.tangent in tangents]
        if len(numbers) != 1 or numbers[0] is None:
            what = f"the model returns {len(numbers)} differentiable numbers, one of which would be the loss"
            raise TraceError(what, where="optimizer", remedy="return one number, the loss, with other tensors if need be")
        return numbers[0]

    def values_of(self, one: Trained) -> Values:
        rate = torch.tensor(float(one.options["lr"]), dtype=torch.float64)
        return {one.rate: rate, **{one.path(key): value for key, value in one.state.items()}}

    def input(self, name: str, value: torch.Tensor, mode: Any) -> None:
        if name in self.nodes:
            return
        node = self.graph.placeholder(f"{ROOT}_{len(self.state)}")
        with mode:
            node.meta["val"] = torch.empty(value.shape, dtype=value.dtype)
        self.inputs.append(GraphInput(node.name, "parameter", name))
        self.nodes[name], self.state[name] = node, value.detach().clone()

    def constant(self, like: torch.Tensor, number: float, mode: Any) -> fx.Node:
        with mode:
            value = torch.ops.aten.full.default(list(like.shape), number, dtype=like.dtype, device=torch.device("cpu"), pin_memory=False)
        arguments = {"dtype": like.dtype, "device": torch.device("cpu"), "pin_memory": False}
        node = self.graph.call_function(torch.ops.aten.full.default, (list(like.shape), number), arguments)
        node.meta["val"] = value
        return node

    def finish(self) -> None:
        """Appends the optimiser's formulas and the results."""
        results = self.before.module.graph.output_node().args[0]
        named = list(zip(self.before.outputs, results, strict=True))
        gradients = {end.name: self.copies[node] for end, node in named if end.kind == "gradient"}
        kept = [self.copies[node] for end, node in named if end.kind != "gradient"]
        self.changed: dict[str, fx.Node] = {}
        for one in self.trained:
            paths = {key: one.path(key) for key in one.state}
            places = [self.nodes[one.name], gradients[one.name], self.nodes[one.rate], *(self.nodes[path] for path in paths.values())]
            for name, node in zip((one.name, *paths.values()), self.inlined(one, places), strict=True):
                self.changed[name] = node
        self.graph.output((*kept, *self.changed.values()))
        self.graph.eliminate_dead_code()

    def inlined(self, one: Trained, places: list[fx.Node]) -> list[fx.Node]:
        """The nodes of the new parameter and the new state, in order."""

        def step(p: torch.Tensor, grad: torch.Tensor, lr: torch.Tensor, *state: torch.Tensor) -> list[torch.Tensor]:
            new, after = self.rule(p, grad, lr, dict(zip(one.state, state, strict=True)), one.options)
            return [new, *(after[key] for key in one.state)]

        with torch.no_grad():
            traced = make_fx(step)(*(node.meta["val"] for node in places))
        copies = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), places, strict=True))
        for node in traced.graph.nodes:
            if node.op == "call_function":
                copies[node] = self.graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {"val": node.meta["val"]}
        return [copies[node] for node in traced.graph.output_node().args[0]]
