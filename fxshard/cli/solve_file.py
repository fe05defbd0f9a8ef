"""``fxshard solve FILE``: solves a placement problem in the format of the ASPLOS 2025 contest (IOPDDL) and prints the solution."""

from __future__ import annotations

import json
import math
import time
import zlib
from pathlib import Path

from fxshard.errors import ConstraintError, FileError, OptionError
from fxshard.files import atomic_file, check_writable, read_start, write_json
from fxshard.solver import InfeasibleError, NoPlanError, PlacementProblem, Solution, solve, warm_up

WORK_LIMIT = 3e10
"""Table entries that a solve without a time limit may touch: a minute or two at most."""

REMEDY = "give a file like those of github.com/google/iopddl, as JSON or gzipped JSON"


def solve_file(path: str, time_limit: float | None = None, output: str | None = None, as_json: bool = False) -> str:
    """Solves the problem in a file and returns the report to print, or the solution as JSON. ``output``: a file to write the latter to."""
    if time_limit is not None and not (math.isfinite(time_limit) and time_limit > 0):
        raise OptionError(f"cannot read --time-limit {time_limit}", remedy="give a number of seconds that is greater than 0")
    if output:
        check_writable(output)
    problem = read(path)
    if time_limit is not None:
        warm_up()
    started = time.perf_counter()
    try:
        solution = solve(problem, time_limit, WORK_LIMIT if time_limit is None else None)
    except InfeasibleError as error:
        remedy = "raise usage_limit" if error.least_usage is not None else "allow more of what is forbidden (a cost of 10^15 or more)"
        raise ConstraintError(str(error), where=path, remedy=remedy) from error
    except NoPlanError as error:
        raise ConstraintError(str(error), where=path, remedy="give a larger --time-limit SECONDS") from error
    seconds = time.perf_counter() - started
    if output:
        with atomic_file(output) as file:
            file.write_text(_json(solution))
    if as_json:
        return _json(solution).rstrip()
    return report(problem, solution, seconds) + (f"\nwrote    {output}" if output else "")


def read(path: str | Path) -> PlacementProblem:
    """The problem in a file; raises FileError if it cannot be read or is not a problem."""
    read_start(path, 1)
    try:
        return PlacementProblem.read(path)
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"the gzipped file is damaged or cut short: {error}", where=str(path), remedy=REMEDY) from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"the file is not JSON: {error}", where=str(path), remedy=REMEDY) from error
    except KeyError as error:
        raise FileError(f"the file is not a placement problem: it has no field {error}", where=str(path), remedy=REMEDY) from error
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise FileError(f"the file is not a placement problem: {error}", where=str(path), remedy=REMEDY) from error


def report(problem: PlacementProblem, solution: Solution, seconds: float) -> str:
    """Cost, bound, gap, outcome, memory, seconds and choices, one per line."""
    end = "proven optimal" if solution.proven else "cut by a limit" if solution.cut else "not proven"
    limit = "no limit" if problem.usage_limit is None else f"of {problem.usage_limit:.15g}"
    lines = [
        f"cost     {solution.objective:.15g}",
        f"bound    {solution.lower_bound:.15g}",
        f"gap      {100 * solution.gap:.4g} %, {end}",
        f"memory   {problem.peak(solution.choices):.15g} at its peak, {limit}",
        f"seconds  {seconds:.2f}",
        f"choices  {list(solution.choices)}",
    ]
    return "\n".join(lines)


def _json(solution: Solution) -> str:
    fields = {
        "choices": list(solution.choices),
        "cost": solution.objective,
        "lower_bound": solution.lower_bound,
        "gap": solution.gap if math.isfinite(solution.gap) else None,
        "proven": solution.proven,
        "cut": solution.cut,
    }
    return write_json(fields)
