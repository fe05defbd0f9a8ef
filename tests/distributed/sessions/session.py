"""A random session: calls of a user in an order that no test lists, on the ranks and on one device, compared after each.

Every step draws from a seeded generator, so that all ranks make the same. A refusal by name ends a session: it is not a wrong number,
and the state after it is not promised.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fxshard.errors import FxshardError
from tests.distributed.sessions.models import SUBJECTS, Subject

BATCHES = (6, 6, 6, 4, 5, 7, 2)
Door = Callable[[nn.Module, Any, Any], Any]
"""Makes a model sharded, given an example; returns what the user calls, and the mesh of DTensors that it takes (None if it takes none)."""


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


@dataclass
class Side:
    """A model, what is called in its place, and its optimiser."""

    model: nn.Module
    call: Any
    mesh: DeviceMesh | None = None
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1, foreach=False)  # plain and sharded

    def state(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, p in self.model.named_parameters():
            yield name, whole(p.detach())
            yield f"gradient of {name}", None if p.grad is None else whole(p.grad)
        for name, b in self.model.named_buffers():
            yield name, whole(b)


@dataclass
class Session:
    """``done`` lists the steps; ``pair`` the ranks' side, then the reference."""

    subject: Subject
    pair: tuple[Side, Side]
    draw: random.Random
    done: list[str] = field(default_factory=list)

    def batch(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(self.draw.randrange(1 << 30))
        return self.subject.arguments(self.draw.choice(BATCHES), self.draw.random() < 0.4)

    def loss(self) -> Callable[[Any], Tensor]:
        """A function of a model's results that uses some of them."""
        seed = self.draw.randrange(1 << 30)

        def of(results: Any) -> Tensor:
            leaves = [whole(x) for x in tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
            used = random.Random(seed).sample(range(len(leaves)), random.Random(seed + 1).randint(1, len(leaves)))
            return torch.stack([(leaves[i] * (i + 1)).square().mean() for i in used]).sum()

        return of

    def each(self, what: Callable[[Side], Any]) -> None:
        """Does ``what`` on both sides; the tensors that it returns must agree, and so must the state afterwards."""
        mine, other = ([whole(x) for x in tree_leaves(what(side)) if isinstance(x, Tensor)] for side in self.pair)
        assert len(mine) == len(other), f"{len(mine)} results, not {len(other)}"
        for i, (x, y) in enumerate(zip(mine, other, strict=True)):
            agree(f"result {i}", x, y)
        for (name, x), (_, y) in zip(*(side.state() for side in self.pair), strict=True):
            agree(name, x, y)


def agree(name: str, x: Tensor | None, y: Tensor | None) -> None:
    assert (x is None) == (y is None), f"{name} is {'None' if x is None else 'a tensor'}, on one device it is not"
    if x is not None and y is not None:
        assert (x.shape, x.dtype, x.requires_grad) == (y.shape, y.dtype, y.requires_grad), f"{name}: {x.shape} {x.dtype} {x.requires_grad}"
        torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-9, atol=1e-11, msg=lambda text: f"{name}: {text}")


def train(s: Session) -> None:
    (args, kwargs), loss, none = s.batch(), s.loss(), s.draw.random() < 0.5

    def step(side: Side) -> Any:
        side.optimizer.zero_grad(set_to_none=none)
        out = side.call(*args, **kwargs)
        value = loss(out)
        value.backward()
        side.optimizer.step()
        return value, out

    s.each(step)


def accumulate(s: Session) -> None:
    (args, kwargs), loss = s.batch(), s.loss()
    s.each(lambda side: loss(side.call(*args, **kwargs)).backward())


def two_calls(s: Session) -> None:
    """One loss of two calls, of other sizes perhaps."""
    first, second, loss, other = s.batch(), s.batch(), s.loss(), s.loss()

    def step(side: Side) -> None:
        a, b = (side.call(*args, **kwargs) for args, kwargs in (first, second))
        (loss(a) * other(b)).backward()

    s.each(step)


def out_of_order(s: Session) -> None:
    """Two calls whose backwards run in the order of the calls, one of them dropped perhaps."""
    first, second, loss, other, dropped = s.batch(), s.batch(), s.loss(), s.loss(), s.draw.random() < 0.3

    def step(side: Side) -> None:
        a, b = (side.call(*args, **kwargs) for args, kwargs in (first, second))
        loss(a).backward()
        if not dropped:
            other(b).backward()

    s.each(step)


def twice_backward(s: Session) -> None:
    (args, kwargs), loss = s.batch(), s.loss()

    def step(side: Side) -> None:
        value = loss(side.call(*args, **kwargs))
        value.backward(retain_graph=True)
        (value * 2).backward()

    s.each(step)


def per_loss(s: Session) -> None:
    """A backward for each of two losses of one call."""
    (args, kwargs), loss, other = s.batch(), s.loss(), s.loss()

    def step(side: Side) -> None:
        out = side.call(*args, **kwargs)
        loss(out).backward(retain_graph=True)
        other(out).backward()

    s.each(step)


def infer(s: Session) -> None:
    (args, kwargs), training = s.batch(), s.draw.random() < 0.3
    mode = s.draw.choice((torch.no_grad, torch.inference_mode, torch.enable_grad))

    def step(side: Side) -> Any:
        side.model.train(training)
        with mode():
            out = side.call(*args, **kwargs)
        side.model.train()
        return out

    s.each(step)


def clip(s: Session) -> None:
    """torch's own clipping takes no mixture of plain parameters and DTensors, which its styles leave."""
    if len({isinstance(p, DTensor) for p in s.pair[0].model.parameters()}) > 1:
        return train(s)
    (args, kwargs), loss = s.batch(), s.loss()

    def step(side: Side) -> Any:
        loss(side.call(*args, **kwargs)).backward()
        norm = nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)
        side.optimizer.step()
        side.optimizer.zero_grad()
        return norm

    s.each(step)


def freeze(s: Session) -> None:
    """Freezes a parameter, or lets it train again."""
    name = s.draw.choice([name for name, _ in s.pair[1].model.named_parameters()])

    def step(side: Side) -> None:
        parameter = side.model.get_parameter(name)
        parameter.requires_grad_(not parameter.requires_grad)
        side.optimizer.zero_grad()

    s.each(step)


def reload(s: Session) -> None:
    """Weights of a step before, and the optimiser's state, come back."""
    (args, kwargs), loss = s.batch(), s.loss()

    def step(side: Side) -> None:
        kept, state = ({k: v.detach().clone() for k, v in side.model.state_dict().items()}, copy.deepcopy(side.optimizer.state_dict()))
        loss(side.call(*args, **kwargs)).backward()
        side.optimizer.step()
        side.model.load_state_dict(kept)
        side.optimizer.load_state_dict(state)
        side.optimizer.zero_grad()

    s.each(step)


def average(s: Session) -> None:
    """Writes parameters in place, as an average of weights does."""
    factor = 1 - s.draw.random() / 10

    def step(side: Side) -> None:
        with torch.no_grad():
            for parameter in side.model.parameters():
                parameter.mul_(factor)

    s.each(step)


def of_inputs(s: Session) -> None:
    """Gradients with respect to the arguments, perhaps through an operation before the model."""
    (args, kwargs), loss, before = s.batch(), s.loss(), s.draw.random() < 0.5

    def step(side: Side) -> Any:
        mine = [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        given = [x * 1.5 if before and isinstance(x, Tensor) and x.requires_grad else x for x in mine]
        loss(side.call(*given, **kwargs)).backward()
        return [x.grad for x in mine if isinstance(x, Tensor) and x.requires_grad]

    s.each(step)


def by_grad(s: Session) -> None:
    """``torch.autograd.grad`` for some parameters, which leaves ``.grad`` alone."""
    (args, kwargs), loss = s.batch(), s.loss()
    count = s.draw.randint(1, 3)

    def step(side: Side) -> Any:
        wanted = [p for p in side.model.parameters() if p.requires_grad][:count]
        found = torch.autograd.grad(loss(side.call(*args, **kwargs)), wanted, allow_unused=True)
        return [torch.zeros(()) if g is None else g for g in found]

    s.each(step)


def recomputed(s: Session) -> None:
    """Without the early stop, after which it would depend on the order of operators which buffers are written twice."""
    (args, kwargs), loss = s.batch(), s.loss()
    with set_checkpoint_early_stop(False):
        s.each(lambda side: loss(checkpoint(side.call, *args, use_reentrant=False, **kwargs)).backward())


def chained(s: Session) -> None:
    """The result of one call, detached or not, decides an argument of the next."""
    (args, kwargs), loss, cut = s.batch(), s.loss(), s.draw.random() < 0.5

    def step(side: Side) -> None:
        out = side.call(*args, **kwargs)
        factor = loss(out).detach() if cut else loss(out)
        given = [x * factor if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        loss(side.call(*given, **kwargs)).backward()

    s.each(step)


def rows(s: Session) -> None:
    """DTensors as arguments, sharded by rows, unless the door takes none: results are DTensors too."""
    (args, kwargs), loss, grad = s.batch(), s.loss(), s.draw.random() < 0.3

    def step(side: Side) -> Any:
        placed = [x if side.mesh is None else distribute_tensor(x, side.mesh, [Shard(0)], src_data_rank=None) for x in args]
        mine = [x.detach().requires_grad_(grad and x.is_floating_point()) for x in placed]
        out = side.call(*mine, **kwargs)
        value = loss(out)
        value.backward()
        return value, out, [x.grad for x in mine if x.requires_grad]

    s.each(step)


STEPS = (
    train, train, train, accumulate, two_calls, out_of_order, twice_backward, per_loss, infer, infer, clip, freeze, reload, average,
    of_inputs, by_grad, recomputed, chained, rows, rows,
)  # fmt: skip


def play(door: Door, subject: str, seed: int, steps: int = 8) -> list[str]:
    """Plays a session. Returns its steps, the last with what refused it, if one was. Raises AssertionError where the sides differ."""
    draw = random.Random(f"{subject} {seed}")
    torch.manual_seed(seed)
    reference = SUBJECTS[subject].model().double()
    model = copy.deepcopy(reference)
    args, kwargs = SUBJECTS[subject].arguments(6, draw.random() < 0.5)
    call, mesh = door(model, args, kwargs)
    session = Session(SUBJECTS[subject], (Side(model, call, mesh), Side(reference, reference)), draw)
    for _ in range(steps):
        step = draw.choice(STEPS)
        session.done.append(step.__name__)
        try:
            step(session)
        except FxshardError as error:
            session.done[-1] += f": {type(error).__name__}: {str(error).splitlines()[0]}"
            break
        except Exception as error:
            error.add_note(f"{subject}, seed {seed}, after {', '.join(session.done)}")
            raise
    return session.done
