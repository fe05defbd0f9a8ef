"""The mechanisms of the solver, and those of questions to a plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.ablations.mechanism import Mechanism, no, nothing, unchanged

SOLVER, BOUNDS, SEARCH = "fxshard.solver", "fxshard.solver.bounds", "fxshard.solver.search"
PRIMAL, REDUCTIONS = "fxshard.solver.primal", "fxshard.solver.reductions"


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
        "merged links",
        "solve",
        "message passing with one table for all links between two nodes",
        {f"{BOUNDS}.merged_links.Merging.worthwhile": no},
        ("solver/bounds/merged_links.py",),
    ),
    Mechanism(
        "tied start under limits",
        "solve",
        "planes and messages of the tied model where there are limits",
        {f"{SEARCH}.case_split.start_from_tied": nothing},
        ("solver/search/tied_limits.py",),
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
        {f"{BOUNDS}.write_out.MAX_JOINT": -1},
        ("solver/bounds/write_out.py:_joint", "solver/bounds/write_out.py:_paid"),
        (f"{BOUNDS}.write_out._joint",),
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
