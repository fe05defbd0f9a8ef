"""All mechanisms, by the stage that they belong to."""

from __future__ import annotations

from bench.ablations.mechanism import Mechanism
from bench.ablations.planning_mechanisms import PASSES, PIPELINES, PLANNING
from bench.ablations.solver_mechanisms import QUESTIONS, SOLVERS
from bench.ablations.step_mechanisms import STEPS

MECHANISMS: tuple[Mechanism, ...] = (*SOLVERS, *QUESTIONS, *PLANNING, *PASSES, *PIPELINES, *STEPS)
