"""The anchors: problems small enough for two cores, each like one for which some mechanism was made.

An anchor is prepared once; the function that this returns runs again with each mechanism switched off.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import fxshard
from bench.families.family import Case, Loss, config_of
from bench.planning.models import MODELS
from fxshard.errors import ConstraintError
from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.pipeline import LOWERING, PLANNING, Compilation, Request, make_plan, run
from fxshard.solver import InfeasibleError, NoPlanError, PlacementProblem, solve

Result = tuple[float, float]
"""(objective, lower bound) in the anchor's own unit."""

Prepared = Callable[[], Result]
SOLVE, DECIDE = 3, 5
"""The measured passes are ``PLANNING[SOLVE:DECIDE]``."""


@dataclass(frozen=True)
class Anchor:
    """``of``: its stage; ``prepare(data)`` returns the function to measure; ``data``: the folder of published instances, or None."""

    name: str
    of: str
    prepare: Callable[[Path | None], Prepared]
    needs_data: bool = False

    def with_own_limits(self) -> Anchor:
        """The anchor with fxshard's own limits on work."""
        return replace(self, prepare=replace(self.prepare, work=None)) if isinstance(self.prepare, Planned) else self


@dataclass(frozen=True)
class Planned:
    """Planning a model. ``limit``: the memory limit as a fraction of the memory of the plan without it; ``half``: the axis on which at most
    half of that plan's bytes may be sent."""

    build: Callable[[], Case]
    mesh: str
    hardware: str = "h100"
    asked: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = None
    half: str | None = None
    least: bool = False
    work: float | None = None
    """Limit on the work of each solve in table entries; None for fxshard's own limit."""

    def state(self) -> Compilation:
        """The state before the solve: annotated and constrained."""
        model, args, kwargs = self.build()
        request = Request(model, args, kwargs, cache=False, **self.asked)
        if self.limit is None and self.half is None:
            return run(PLANNING[:SOLVE], Compilation(parse_mesh(self.mesh, self.hardware), request), None)
        free = make_plan(Compilation(parse_mesh(self.mesh, self.hardware), request))
        assert free.plan is not None
        if self.limit is not None:
            request = replace(request, memory_limit=int(self.limit * sum(free.plan.memory.values())))
        if self.half is not None:
            sent = sum(c.bytes for c in free.plan.collectives if c.axis == self.half)
            request = replace(request, constraints=[fxshard.Communication(self.half, at_most=sent // 2)])
        return run(PLANNING[2:SOLVE], replace(free, request=request), None)

    def __call__(self, data: Path | None) -> Prepared:
        state = self.state()

        def planned() -> Result:
            try:
                with _within(self.work):
                    plan = run(PLANNING[SOLVE:DECIDE], state, None).plan
            except ConstraintError as error:
                if not self.least:
                    raise
                return _least(error)
            assert plan is not None
            return plan.objective, plan.lower_bound

        return planned


@dataclass(frozen=True)
class Traced:
    """Planning a model from its trace: what it costs without a mechanism that offers layouts, paths or places."""

    planned: Planned

    def __call__(self, data: Path | None) -> Prepared:
        model, args, kwargs = self.planned.build()
        request = Request(model, args, kwargs, cache=False, **self.planned.asked)
        traced = run(PLANNING[:1], Compilation(parse_mesh(self.planned.mesh, self.planned.hardware), request), None)
        if self.planned.limit is not None:
            free = make_plan(traced).plan
            assert free is not None
            traced = replace(traced, request=replace(request, memory_limit=int(self.planned.limit * sum(free.memory.values()))))

        def planned() -> Result:
            with _within(self.planned.work):
                plan = run(PLANNING[1:DECIDE], traced, None).plan
            assert plan is not None
            return plan.objective, plan.lower_bound

        return planned


@dataclass(frozen=True)
class Staged:
    """A step of a pipeline of ``microbatches`` on the axis "pp", in predicted microseconds."""

    build: Callable[[], Case]
    mesh: str
    microbatches: int

    def __call__(self, data: Path | None) -> Prepared:
        model, args, kwargs = self.build()
        mesh = parse_mesh(self.mesh, "h100")

        def planned() -> Result:
            found = fxshard.plan_pipeline(model, args, mesh, microbatches=self.microbatches, mb_kwargs=kwargs, cache=False)
            return found.step_time, found.step_time

        return planned


@contextlib.contextmanager
def _within(work: float | None) -> Iterator[None]:
    """A context with lower limits on work, with which small anchors show what large ones need much more for."""
    with contextlib.ExitStack() as stack:
        for name in ("WORK_LIMIT", "LIMITED_WORK") if work is not None else ():
            stack.enter_context(mock.patch(f"fxshard.passes.planning.choose.{name}", work))
        yield


def _least(error: ConstraintError) -> Result:
    """The smallest memory found, and its proven lower bound."""
    cause = error.__cause__
    missed = [cause] if isinstance(cause, InfeasibleError) else list(cause.misses) if isinstance(cause, NoPlanError) else []
    if not missed or missed[0].least_usage is None:
        return math.inf, -math.inf
    return missed[0].least_usage, missed[0].usage_bound or 0.0


@dataclass(frozen=True)
class Asked:
    """Questions to a plan: random values, half of them parameters, each pinned to another layout. The result is the sum of the answers'
    totals."""

    planned: Planned
    questions: int = 6

    def __call__(self, data: Path | None) -> Prepared:
        model, args, kwargs = self.planned.build()
        mesh = fxshard.Mesh(dict((axis, int(size)) for axis, size in (a.split("=") for a in self.planned.mesh.split(","))), hardware="h100")
        free = fxshard.plan(model, args, mesh, kwargs, cache=False, **self.planned.asked)
        limit = None if self.planned.limit is None else int(self.planned.limit * sum(free.memory.values()))
        plan = free if limit is None else fxshard.plan(model, args, mesh, kwargs, cache=False, memory_limit=limit, **self.planned.asked)
        rng, origin = random.Random(0), plan.origin
        parameters = [end.name for end in plan.inputs if end.kind == "parameter"]
        nodes = [n.name for n in plan.nodes if n.op.startswith(("aten", "fxshard")) and len(n.shapes) == 1]
        wanted = []
        for name in [*rng.sample(parameters, self.questions // 2), *rng.sample(nodes, self.questions - self.questions // 2)]:
            layouts = dict.fromkeys(origin.value(name).layouts)  # type: ignore[union-attr]  # the plan was made here
            others = [str(layout) for layout in layouts if layout != plan.layout_of(name)]
            if others:
                wanted.append((name, rng.choice(others)))
        plan.explain(*wanted[0])

        def asked() -> Result:
            total, bound = 0.0, 0.0
            for name, layout in wanted:
                (choice,) = plan.explain(name, layout).choices
                if choice.total is not None:
                    total += choice.total
                    bound += choice.total * (1 - (choice.gap or 0.0))
            return total, bound

        return asked


@dataclass(frozen=True)
class Lowered:
    """The microseconds that the timeline predicts for a plan's program after all passes."""

    planned: Planned

    def __call__(self, data: Path | None) -> Prepared:
        state = self.planned.state()
        with _within(self.planned.work):
            plan = run(PLANNING[SOLVE:DECIDE], state, None).plan
        assert plan is not None
        lowered = run(LOWERING[:1], Compilation(state.mesh, graph=state.graph, plan=plan, legal=True), None)

        def optimised() -> Result:
            program = run(LOWERING[1:], lowered, None).program
            assert program is not None
            total = program.effects[-1].after.total if not program.effects[-1].left_out else program.effects[-1].before.total
            return total, total

        return optimised


@dataclass(frozen=True)
class File:
    """A published instance, solved with a limit on work."""

    file: str
    work: float

    def __call__(self, data: Path | None) -> Prepared:
        assert data is not None
        problem = PlacementProblem.read(data / self.file)

        def solved() -> Result:
            try:
                solution = solve(problem, work_limit=self.work)
            except NoPlanError:
                return math.inf, -math.inf
            return solution.objective, solution.lower_bound

        return solved


def model(name: str, layers: int) -> Callable[[], Case]:
    """One of the models of ``bench.planning``."""
    return lambda: MODELS[name](layers)


def gpt(layers: int, width: int, vocabulary: int = 50257, batch: int = 8, length: int = 512, dropout: bool = False) -> Callable[[], Case]:
    """transformers' GPT2LMHeadModel with its loss, on meta."""

    def build() -> Case:
        from transformers import AutoModelForCausalLM

        config = config_of("gpt2", dropout, n_layer=layers, n_embd=width, n_head=width // 64 or 1, vocab_size=vocabulary, use_cache=False)
        with torch.device("meta"):
            ids = torch.zeros(batch, length, dtype=torch.int64)
            return Loss(AutoModelForCausalLM.from_config(config), shift=True), (), {"input_ids": ids, "target": ids}

    return build


def bert(layers: int) -> Callable[[], Case]:
    """transformers' BertForMaskedLM of the base size with its loss, 8 x 512 tokens, on meta."""

    def build() -> Case:
        from transformers import AutoModelForMaskedLM

        with torch.device("meta"):
            ids = torch.zeros(8, 512, dtype=torch.int64)
            return (
                Loss(AutoModelForMaskedLM.from_config(config_of("bert", False, num_hidden_layers=layers))),
                (),
                {"input_ids": ids, "target": ids},
            )

    return build


def long_llama() -> Case:
    """A layer with fewer heads than ranks, and one sequence of 65,536 tokens."""
    from examples.llama import Llama, LlamaConfig

    with torch.device("meta"):
        ids = torch.zeros(1, 65_536, dtype=torch.int64)
        config = LlamaConfig(vocab=8192, layers=1, dim=1024, heads=4, kv_heads=4, ffn=4096)
        return Llama(config).to(torch.bfloat16), (ids, ids), {}


class Blocks(nn.Module):
    """A perceptron of blocks that can be recomputed."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x * x).mean()


def perceptron() -> Case:
    """Four blocks of width 512, with 1024 rows."""
    with torch.device("meta"):
        return Blocks(4, 512), (torch.zeros(1024, 512),), {}


SMALL_WORK = 3e8
ADAM = {"optimizer": "adamw"}
HOST = {**ADAM, "offload": True}
EIGHT, FOUR, TWO = "dp=8,tp=8", "dp=4,tp=4", "dp=2,tp=2"

ANCHORS: tuple[Anchor, ...] = (
    Anchor("llama 2, 2x2", "solve", Planned(model("llama", 2), TWO)),
    Anchor("llama 4, 4x4", "solve", Planned(model("llama", 4), FOUR)),
    Anchor("llama 8, 8x8", "solve", Planned(model("llama", 8), EIGHT)),
    Anchor("gpt 4, cpu 2x4", "solve", Planned(gpt(4, 768, dropout=True), "dp=2,tp=4", "cpu", work=1e9)),
    Anchor("bert 2, 2x2", "solve", Planned(bert(2), TWO, work=1e9)),
    Anchor("t5 2, 4x4", "solve", Planned(model("t5", 2), FOUR)),
    Anchor("experts 2, 4x4", "solve", Planned(model("moe", 2), FOUR)),
    Anchor("perceptron, 0.6 of memory", "solve", Planned(perceptron, TWO, "cpu", ADAM, limit=0.6, work=SMALL_WORK)),
    Anchor("llama 2, 4x4, 0.8 of memory", "solve", Planned(model("llama", 2), FOUR, asked=ADAM, limit=0.8, work=SMALL_WORK)),
    Anchor("gpt 2, 2x2, 0.9 of memory", "solve", Planned(gpt(2, 128, 1024), TWO, "cpu", ADAM, limit=0.9, work=SMALL_WORK)),
    Anchor("gpt 2, 2x2, least memory", "solve", Planned(gpt(2, 128, 1024), TWO, "cpu", ADAM, limit=0.05, least=True, work=SMALL_WORK)),
    Anchor("llama 2, 4x4, half of tp", "solve", Planned(model("llama", 2), FOUR, half="tp", work=SMALL_WORK)),
    Anchor(
        "llama 1, tp=8, bytes",
        "solve",
        Planned(model("llama", 1), "tp=8", asked={"objective": "communication"}, limit=0.3, work=SMALL_WORK),
    ),
    Anchor("IOPDDL example", "solve", File("iopddl/example.json", 1e9), True),
    Anchor("IOPDDL G", "solve", File("iopddl/asplos-2025-iopddl-G.json.gz", 1e9), True),
    Anchor("IOPDDL B", "solve", File("iopddl/asplos-2025-iopddl-B.json.gz", 1e9), True),
    Anchor("IOPDDL V", "solve", File("iopddl/asplos-2025-iopddl-V.json.gz", 1e9), True),
    Anchor("IOPDDL A", "solve", File("iopddl/asplos-2025-iopddl-A.json.gz", 1e9), True),
    Anchor("published llama 8, 8x8", "solve", File("placement/llama3-8b-8layers-8x8.json.gz", 6e9), True),
    Anchor("gpt 2, 2x2", "plan", Traced(Planned(gpt(2, 768), TWO))),
    Anchor("llama 2, 2x2x2", "plan", Traced(Planned(model("llama", 2), "a=2,b=2,c=2", work=SMALL_WORK))),
    Anchor("long llama 1, cp=8", "plan", Traced(Planned(long_llama, "cp=8", work=SMALL_WORK))),
    Anchor("experts 1, 8", "plan", Traced(Planned(model("moe", 1), "ep=8", work=SMALL_WORK))),
    Anchor("perceptron from trace, 0.6", "plan", Traced(Planned(perceptron, TWO, "cpu", ADAM, limit=0.6, work=SMALL_WORK))),
    Anchor("perceptron from trace, 0.6, host", "plan", Traced(Planned(perceptron, TWO, "cpu", HOST, limit=0.6, work=SMALL_WORK))),
    Anchor("llama 6, two stages", "pipeline", Staged(model("llama", 6), "pp=2,tp=8", 8)),
    Anchor("llama 8, 8x8, questions", "ask", Asked(Planned(model("llama", 8), EIGHT))),
    Anchor("perceptron, 0.6, questions", "ask", Asked(Planned(perceptron, TWO, "cpu", ADAM, limit=0.6))),
    Anchor("llama 2, 8x8, lowered", "lower", Lowered(Planned(model("llama", 2), EIGHT))),
    Anchor("llama 2, tp=8, lowered", "lower", Lowered(Planned(model("llama", 2), "tp=8"))),
    Anchor("gpt 2, cpu 2x2, lowered", "lower", Lowered(Planned(gpt(2, 256, 1024), TWO, "cpu", work=SMALL_WORK))),
    Anchor("t5 2, 4x4, lowered", "lower", Lowered(Planned(model("t5", 2), FOUR))),
)
