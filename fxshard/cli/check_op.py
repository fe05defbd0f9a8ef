"""``fxshard check-op``: checks the rule of an operator against the operator itself, or finds one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fxshard.cli.console.commands import add_command
from fxshard.cli.console.exit_codes import ended
from fxshard.errors import OptionError, count_text
from fxshard.progress import progress, watched

SHOWN = 3
SAMPLES_HELP = "a Python file and a function in it that returns a list of argument tuples (or of pairs of a tuple and a dict)"


def add_check_op(commands: Any) -> None:
    """Adds the command to ``commands``, the subparsers of ``fxshard``."""
    about = "check the rule of an operator against the operator itself, or find one"
    check = add_command(commands, "check-op", about, "fxshard check-op aten.mm.default", json="the verdict, or the rule that was found")
    check.add_argument("op", metavar="OP", help="for example aten.mm.default, or mylib::op")
    check.add_argument("--sample", metavar="FILE.py:FUNCTION", help=SAMPLES_HELP)
    check.add_argument("--samples", type=int, default=8, metavar="N", help="how many of torch's own samples to use (default: 8)")
    check.add_argument("--budget", type=int, default=2000, metavar="N", help="placements to try for each sample (default: 2000)")
    check.add_argument("--seed", type=int, default=0, help="random seed of torch's samples (default: 0)")
    check.set_defaults(command=_check_op)


def _check_op(options: argparse.Namespace) -> int:
    """Checks the operator in a child process: a kernel may crash on shapes that it did not expect."""
    from fxshard.cli.console.child_process import in_child

    return in_child(lambda note: ended(lambda: _judge_op(options, note)), f"checking {options.op}")


def _judge_op(options: argparse.Namespace, note: Callable[[str], None]) -> int:
    """Returns 1 if the rule is wrong, else 0, also for an incomplete rule. ``note`` is called with what runs next."""
    from fxshard.strategies import has_rule, oracle, sharding_function

    samples = _samples(options)
    name = oracle.qualified(options.op)
    if not has_rule(name) and sharding_function(name) is None:
        kept = _of_one_kind(options, samples, note)
        with progress(f"looking for a rule of {name}, from {len(kept)} of {count_text(len(samples), 'sample')}"):
            rule = oracle.find_rule(name, kept, options.budget)
        print(_as_json(rule) if options.json else oracle.report_rule(rule) + _left_out(samples, kept))
        return 0
    verdict = oracle.check_op(name, _noted(watched(samples, f"checking {name}"), note), options.budget)
    print(_as_json(verdict) if options.json else oracle.report(verdict))
    return 1 if verdict.wrong else 0


def _as_json(found: Any) -> str:
    from fxshard.cli.console.plain import plain

    return json.dumps(plain(found), indent=1)


def _of_one_kind(options: argparse.Namespace, samples: list[Any], note: Callable[[str], None]) -> list[Any]:
    """The samples from which to find a rule: all of the user's, or of torch's own those of the largest kind (equal numbers of dims)."""
    from fxshard.strategies import oracle

    kept = samples if options.sample else oracle.largest_kind(samples)
    shown = ", ".join(f"({s})" for s in kept[:SHOWN]) + (" and others" if len(kept) > SHOWN else "")
    note(f"while looking for a rule, on shards of {shown}")
    return kept


def _left_out(samples: list[Any], kept: list[Any]) -> str:
    """What the report adds if a rule was looked for on some of the samples only."""
    others = len(samples) - len(kept)
    if not others:
        return ""
    return f"\n\nlooked for on {count_text(len(kept), 'sample')} like ({kept[0]}); {others} with other numbers of dims are left out"


def _noted(samples: Iterable[Any], note: Callable[[str], None]) -> Iterator[Any]:
    for sample in samples:
        note(f"on the sample ({sample}), or on shards of it")
        yield sample


def _samples(options: argparse.Namespace) -> list[Any]:
    from fxshard.cli.arguments.factory import run_function
    from fxshard.strategies import oracle

    for name, number in (("--samples", options.samples), ("--budget", options.budget)):
        if number < 1:
            raise OptionError(f"{name} is {number}", remedy="give a number that is greater than 0")
    given = run_function(options.sample, "samples") if options.sample else None
    op = oracle.qualified(options.op)
    oracle.operator(op)
    if options.sample:
        return oracle.given_samples(op, given, options.sample)
    return oracle.samples_of(op, options.samples, options.seed, watched)
