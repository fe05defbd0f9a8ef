"""The mechanisms, and the replacement that switches each one off. fxshard itself has no such switches.

A target is the dotted name of an attribute of a module or class. The replacement does as little as possible while the rest stays correct.
The code of a mechanism is a list of files of the package, or of functions and classes in them (``FILE:Class.method``).
"""

from __future__ import annotations

import ast
import contextlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import fxshard
from fxshard.passes.after_lowering.optimise import OPTIMISATIONS

ROOT = Path(fxshard.__file__).parent
SOLVER, BOUNDS, SEARCH = "fxshard.solver", "fxshard.solver.bounds", "fxshard.solver.search"
PRIMAL, REDUCTIONS = "fxshard.solver.primal", "fxshard.solver.reductions"


@dataclass(frozen=True)
class Mechanism:
    """``of``: the stage of the anchors that it affects; ``what``: what it does; ``without``: target -> replacement; ``code``: the code that
    would be deleted with it.

    ``used``: the functions whose calls show that an anchor uses it, by default the targets.
    """

    name: str
    of: str
    what: str
    without: Mapping[str, Any]
    code: tuple[str, ...] = ()
    used: tuple[str, ...] = ()

    @property
    def lines(self) -> int:
        """The number of lines that would be deleted with it, without its callers."""
        return sum(_lines(one) for one in self.code)

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """A context in which the mechanism is off."""
        with contextlib.ExitStack() as stack:
            for target, replacement in self.without.items():
                stack.enter_context(mock.patch(target, replacement))
            yield


@contextlib.contextmanager
def used_of(mechanisms: Sequence[Mechanism]) -> Iterator[set[str]]:
    """A context that records the names of the mechanisms whose functions are called."""
    used: set[str] = set()
    with contextlib.ExitStack() as stack:
        for one in mechanisms:
            for target in one.used or one.without:
                stack.enter_context(mock.patch(target, _noting(pkgutil.resolve_name(target), used, one.name)))
        yield used


def _noting(original: Callable[..., Any], used: set[str], name: str) -> Callable[..., Any]:
    def noting(*given: Any, **named: Any) -> Any:
        used.add(name)
        return original(*given, **named)

    return noting


def nothing(*given: object, **named: object) -> None:
    """Does nothing."""


def no(*given: object, **named: object) -> bool:
    """Returns False."""
    return False


def unchanged(self: object, model: Any, *budget: Any) -> Any:
    """A reduction that changes nothing."""
    return model, lambda choices: choices


def _first_half(branching: Any, case: Any, bound: float) -> tuple[float, tuple[Any, ...]]:
    branching.ascent.offer_decoded()
    return bound, ()


SOLVERS: tuple[Mechanism, ...] = (
    Mechanism(
        "tied",
        "solve",
        "start from a plan in which equal layers have equal layouts",
        {f"{SEARCH}.case_split.search_tied": no},
        ("solver/search/tied_model.py", "solver/bounds/tied_messages.py"),
    ),
    Mechanism(
        "tied messages",
        "solve",
        "also start from the messages of the tied model",
        {f"{SEARCH}.tied_model.initialise_from_tied": nothing},
        ("solver/bounds/tied_messages.py",),
    ),
    Mechanism(
        "cores",
        "solve",
        "search the states of small excess of a large model first",
        {f"{SEARCH}.core_problem.LARGE": np.inf},
        (
            "solver/search/core_problem.py:is_large",
            "solver/search/core_problem.py:search_cores",
            "solver/search/core_problem.py:search_core",
        ),
        (f"{SEARCH}.tied_model.search_cores", f"{SEARCH}.case_split.search_cores"),
    ),
    Mechanism(
        "combining",
        "solve",
        "search the states that occur in several plans",
        {f"{SEARCH}.case_split.combine": nothing, f"{SOLVER}.session.combine": nothing},
        ("solver/search/combining.py",),
    ),
    Mechanism(
        "combining by cases",
        "solve",
        "search the states of several plans by branch and bound if they are many",
        {f"{SEARCH}.combining._by_cases": nothing},
        ("solver/search/combining.py:_by_cases",),
    ),
    Mechanism(
        "cases",
        "solve",
        "branch and bound on the relaxation",
        {f"{SEARCH}.branching.Branching.run": nothing},
        ("solver/search/branching.py",),
    ),
    Mechanism(
        "settling",
        "solve",
        "sweep further at the root before branching",
        {f"{SEARCH}.branching.Branching._settle": nothing},
        ("solver/search/branching.py:Branching._settle",),
    ),
    Mechanism(
        "aiming",
        "solve",
        "search low targets at the root before branching",
        {f"{SEARCH}.branching.Branching._aim": nothing},
        ("solver/search/branching.py:Branching._aim",),
    ),
    Mechanism(
        "probing",
        "solve",
        "try six nodes before a branch is split",
        {f"{SEARCH}.branching.PROBES": 1},
        used=(f"{SEARCH}.branching.Branching._best_split",),
    ),
    Mechanism(
        "small cases",
        "solve",
        "search small branches exactly, as tables",
        {f"{SEARCH}.branching.Branching._searched": nothing},
        ("solver/search/branching.py:Branching._searched",),
    ),
    Mechanism(
        "parting",
        "solve",
        "under limits, split a branch where two plans differ",
        {f"{SEARCH}.branching._opposed": nothing},
        ("solver/search/branching.py:_opposed", "solver/search/branching.py:Branching._split_between"),
    ),
    Mechanism(
        "multipliers of cases",
        "solve",
        "compute new multipliers in each branch",
        {f"{SEARCH}.branching.Branching._repriced": _first_half},
        ("solver/search/branching.py:Branching._repriced", "solver/bounds/bounds.py:Ascent.reprice"),
    ),
    Mechanism(
        "bundle",
        "solve",
        "find multipliers by cutting planes",
        {f"{BOUNDS}.cutting_planes.Bundle.run": nothing},
        ("solver/bounds/cutting_planes.py",),
    ),
    Mechanism(
        "sharing",
        "solve",
        "redistribute shared prices among readers after sweeps",
        {f"{BOUNDS}.links.Splits.rebalance": nothing},
        ("solver/bounds/sharing.py",),
    ),
    Mechanism(
        "repair",
        "solve",
        "repair choices that exceed a limit",
        {f"{PRIMAL}.local_search.Polish.repair": lambda polish: not len(polish.room) or polish.room.min() >= 0},
        ("solver/primal/local_search.py:Polish.repair",),
        (f"{PRIMAL}.local_search.cheapest_relief",),
    ),
    Mechanism(
        "polish",
        "solve",
        "improve plans by single changes",
        {f"{PRIMAL}.local_search.Polish.improve": nothing},
        ("solver/primal/local_search.py:Polish.improve",),
    ),
    Mechanism(
        "neighbourhoods",
        "solve",
        "large neighbourhood search: free parts of the best plan",
        {f"{SEARCH}.search.ComponentSearch._search_neighbourhoods": nothing},
        (
            "solver/primal/neighbourhood.py",
            "solver/search/search.py:ComponentSearch._search_neighbourhoods",
            "solver/search/search.py:ComponentSearch._search_neighbourhood",
        ),
    ),
    Mechanism(
        "portions",
        "solve",
        "give HiGHS the pairs of states of least slack, more each time",
        {f"{SEARCH}.search.ComponentSearch._grow": nothing},
        ("solver/search/search.py:ComponentSearch._grow", "solver/bounds/pruning.py:portion"),
    ),
    Mechanism(
        "HiGHS",
        "solve",
        "solve what is left as an integer program",
        {f"{SEARCH}.search.MIP_ENTRIES": 0, f"{SEARCH}.search.ComponentSearch._grow": nothing},
        ("solver/primal/highs.py",),
        (f"{SEARCH}.search.solve_mip",),
    ),
    Mechanism(
        "near limits",
        "solve",
        "if no plan fits, start from the choices that exceed the limits least",
        {f"{SOLVER}.limits.conflicts.Limits.near": lambda limits, budget: ([], False)},
        ("solver/solve.py:_near_limits", "solver/limits/conflicts.py:Limits.near"),
    ),
    Mechanism(
        "written whole",
        "solve",
        "if no plan fits, write a small model out as tables",
        {f"{SEARCH}.case_split._first_plan": nothing},
        ("solver/search/case_split.py:_first_plan",),
    ),
    Mechanism(
        "joint nodes",
        "solve",
        "one node for the joint choice of a value's readers",
        {f"{BOUNDS}.relax.MAX_JOINT": -1},
        ("solver/bounds/relax.py:_joint", "solver/bounds/relax.py:_paid"),
        (f"{BOUNDS}.relax._joint",),
    ),
    Mechanism(
        "normalising",
        "solve",
        "move certain cost to the constant",
        {f"{REDUCTIONS}.normalise.Normalise.apply": unchanged},
        ("solver/reductions/normalise.py",),
    ),
    Mechanism(
        "dominated times",
        "solve",
        "drop rows that others imply",
        {f"{REDUCTIONS}.memory.DominatedTimes.apply": unchanged},
        ("solver/reductions/memory.py:DominatedTimes", "solver/reductions/memory.py:_drop_implied"),
        (f"{REDUCTIONS}.memory._drop_implied",),
    ),
    Mechanism(
        "folding",
        "solve",
        "fold nodes with one state",
        {f"{REDUCTIONS}.fixed.FoldFixed.apply": unchanged},
        ("solver/reductions/fixed.py",),
    ),
    Mechanism(
        "determined nodes",
        "solve",
        "merge nodes that a neighbour determines",
        {f"{REDUCTIONS}.merging.MergeDetermined.apply": unchanged},
        ("solver/reductions/merging.py",),
    ),
    Mechanism(
        "small degree",
        "solve",
        "eliminate nodes of at most two neighbours",
        {f"{REDUCTIONS}.degree.EliminateSmallDegree.apply": unchanged},
        ("solver/reductions/degree.py",),
    ),
    Mechanism(
        "dominance",
        "solve",
        "remove dominated states",
        {f"{REDUCTIONS}.dominance.Dominance.apply": unchanged},
        ("solver/reductions/dominance.py",),
    ),
    Mechanism(
        "corrections",
        "solve",
        "add to the lower estimate of memory what plans hold beyond it",
        {f"{SOLVER}.limited.ROUNDS": 0},
        ("solver/limited.py:Counts.corrected", "solver/limited.py:Counts.with_more"),
        (f"{SOLVER}.limited.Counts.with_more",),
    ),
    Mechanism(
        "larger count",
        "solve",
        "also solve the problem with the upper estimate of memory",
        {f"{SOLVER}.limited.NEAR": np.inf},
        used=(f"{SOLVER}.limited.LimitedSession._fitting",),
    ),
)

QUESTIONS: tuple[Mechanism, ...] = (
    Mechanism(
        "regions",
        "ask",
        "answer from a region around the changed value",
        {f"{SOLVER}.session.Session._solve_region": nothing},
        ("solver/search/subproblem.py", "solver/session.py:Session._solve_region"),
    ),
    Mechanism(
        "going on",
        "ask",
        "continue from the messages of the first solve",
        {f"{SOLVER}.session.Session._continue": lambda session, root, allowed, known, *_: known},
        ("solver/session.py:Session._continue", "solver/search/core_problem.py:search_remaining"),
    ),
    Mechanism(
        "going on within limits",
        "ask",
        "under limits, continue from the multipliers too",
        {f"{SOLVER}.session.Session._continue_limited": nothing},
        ("solver/session.py:Session._continue_limited", "solver/session.py:_changed"),
    ),
    Mechanism(
        "what is left",
        "ask",
        "search the states that a better plan may have as a separate model",
        {f"{SOLVER}.session.search_remaining": no},
        ("solver/search/core_problem.py:search_remaining",),
    ),
)

AFTER = "fxshard.passes.after_lowering"


def _unless(name: str) -> dict[str, Any]:
    """The passes after lowering, with the named one replaced by a pass that changes nothing."""
    return {f"{AFTER}.optimise.OPTIMISATIONS": {**OPTIMISATIONS, name: lambda program: program}}


PASSES: tuple[Mechanism, ...] = (
    Mechanism(
        "schedule",
        "lower",
        "start collectives early, wait for them late",
        _unless("schedule"),
        ("passes/after_lowering/schedule.py",),
        (f"{AFTER}.optimise.optimised",),
    ),
    Mechanism(
        "chunk",
        "lower",
        "split a product and its collective into pieces",
        _unless("chunk"),
        tuple(f"passes/after_lowering/{name}.py" for name in ("chunk", "cut_candidates", "cut_pieces", "follow_cut")),
        (f"{AFTER}.optimise.optimised",),
    ),
    Mechanism(
        "bucket",
        "lower",
        "merge small collectives",
        _unless("bucket"),
        ("passes/after_lowering/bucket.py",),
        (f"{AFTER}.optimise.optimised",),
    ),
    Mechanism(
        "pieces behind",
        "lower",
        "split the readers of a collective too, not only its producers",
        {f"{AFTER}.chunk.readers": lambda *given: {}},
        ("passes/after_lowering/cut_candidates.py:readers",),
    ),
    Mechanism(
        "pieces before",
        "lower",
        "split the producers of a collective too, not only its readers",
        {f"{AFTER}.chunk.producers": lambda *given: {}},
        ("passes/after_lowering/cut_candidates.py:producers",),
    ),
)

MECHANISMS: tuple[Mechanism, ...] = (*SOLVERS, *QUESTIONS, *PASSES)


@cache
def _lines(code: str) -> int:
    path, _, names = code.partition(":")
    text = (ROOT / path).read_text()
    if not names:
        return len(text.splitlines())
    body: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for name in names.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = next((one for one in body if isinstance(one, kinds) and one.name == name), None)
        if not isinstance(found, kinds):
            raise LookupError(f"{path} has no {names}")
        body = found.body
    assert found is not None and found.end_lineno is not None
    return found.end_lineno - found.lineno + 1
