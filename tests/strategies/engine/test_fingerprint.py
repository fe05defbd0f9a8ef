"""Fingerprints of rules that are functions: equal in every process, different for different code."""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

import fxshard
import tests.custom_operators  # noqa: F401  # defines tests::gate
from fxshard.layout.layouts import Layout
from fxshard.runtime.ranks.compared_fields import rule_fields
from fxshard.strategies.engine.fingerprint import fingerprint
from fxshard.strategies.engine.notation import pointwise_rule
from fxshard.strategies.engine.user_rules import describe_rule

RULES = """
import functools
import logging
import torch
from torch.nn.functional import relu
from dataclasses import dataclass
from torch.distributed.tensor import Partial, Shard
from fxshard.strategies.engine.fingerprint import fingerprint
from fxshard.strategies.engine.notation import pointwise_rule

NAMES = {"max", "min", "sum", "avg", "product"}
logger = logging.getLogger()

def scaled(factor, kept=frozenset(("max", "min", "sum"))):
    def rule(call, op="max"):
        inner = [f for f in (lambda x: x * factor, abs) if f]
        return op in {"max", "min", "sum", "avg", "product"} and rule(call) and [f(call) for f in inner], kept
    return rule

class Rule:
    def __init__(self, factor):
        self.factor, self.lock = factor, object()
    def __call__(self, call):
        return self.factor
    def other(self, call):
        return -self.factor

LIMIT, SAME = 3, 3

@dataclass(frozen=True)
class Options:
    factor: float
    layout: object

def helper(call):
    return LIMIT * SAME * len(str(call)) + (other(call) if call else 0)

def other(call):
    return helper(None)

def by_helpers(call):
    return [helper(c) for c in call.args]

def over(value):
    return lambda call: value

GIVEN = [scaled(2.0), scaled, Rule(3), Rule(3).other, functools.partial(scaled, kept={1, 2, "a"}), pointwise_rule((0, 1), ops=("max",))]
GIVEN += [by_helpers, over(Options(1.0, [Shard(1), Partial("max")])), over(frozenset((helper, by_helpers)))]
DIMS, WHERE, OPTIONS, NAMED = (0, {"a", "b"}), Shard(0), Options(1.0, Partial()), {"b": helper, "a": object()}
PART, KEPT, MADE = functools.partial(helper, k=1), functools.lru_cache(helper), Rule(3)
NAMED["self"] = NAMED

def by_values(call):
    return DIMS, WHERE, OPTIONS, NAMED, PART, KEPT, MADE, torch.ops.aten.mm, functools, Options, by_values, logger, relu

GIVEN.append(by_values)
for function in GIVEN:
    print(fingerprint(function))
"""


def test_processes_agree(tmp_path: Path) -> None:
    """Another process has other addresses and another order of sets, and reads the rules from another file."""
    here, other = tmp_path / "here.py", tmp_path / "other.py"
    here.write_text(RULES)
    other.write_text("\n\n" + RULES)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(here), run_name="__main__")
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    there = subprocess.run([sys.executable, str(other)], env=environment, check=True, capture_output=True, text=True).stdout
    assert said.getvalue() == there
    assert len(set(there.split())) == 10


def _made(body: str) -> Callable[..., Any]:
    """A function called ``rule`` that returns ``body``."""
    space: dict[str, Any] = {"__name__": "own"}
    exec(f"def rule(call):\n    return {body}", space)  # makes functions with one name and different code
    made: Callable[..., Any] = space["rule"]
    return made


def test_functions_of_one_name_have_different_fingerprints() -> None:
    bodies = [
        "call.args[0]",
        "call.args[1]",
        "call.op",
        "[call, 0]",
        "[call, 0.0]",
        "[call, False]",
        "(lambda x: x)(call)",
        "(lambda y: 1)(call)",
    ]
    said = [describe_rule(_made(body)) for body in bodies]
    assert len(set(said)) == len(bodies)
    assert all(s.startswith("own.rule (code ") for s in said)
    assert said == [describe_rule(_made(body)) for body in bodies]


@pytest.mark.usefixtures("own_rules")
def test_ranks_compare_rule_and_local_form() -> None:
    """Functions of one name, of which the rule or the local form differs."""
    given = [(_made("call.op"), _made("call")), (_made("call.args"), _made("call")), (_made("call.op"), _made("[call]"))]
    said = []
    for rule, local in given:
        fxshard.register_rule("tests::gate", rule, local=local, override=True)
        said.append(rule_fields()["rule: tests.gate.default"])
    assert len(set(said)) == 3


@dataclass
class Options:
    wanted: Any


@dataclass(frozen=True)
class Scale:
    """A dataclass with a cached property, which is not part of its fingerprint."""

    factor: int

    def __call__(self, call: Any) -> int:
        return self.factor

    @functools.cached_property
    def twice(self) -> int:
        return 2 * self.factor


def _over(value: Any) -> Callable[..., Any]:
    return lambda call: value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_over(1), _over(2)),
        (_over({"max": [1]}), _over({"max": [2]})),
        (_over(torch.float32), _over(torch.float64)),
        (_over(_over(1)), _over(_over(2))),
        (_over(torch.ops.aten.mm.default), _over(torch.ops.aten.bmm.default)),
        (_over(abs), _over(len)),
        (_over(Shard(0)), _over(Shard(1))),
        (_over([Partial()]), _over([Partial("max")])),
        (_over(Layout.parse("RP")), _over(Layout.parse("RS(0)"))),
        (_over(Options(Shard(0))), _over(Options(Shard(1)))),
        (_over(Scale(1)), _over(Scale(2))),
        (Scale(1), Scale(2)),
        (functools.partial(_over, 1), functools.partial(_over, 2)),
        (pointwise_rule((0,)), pointwise_rule((0,), ops=("max",))),
        (lambda call, k=1: k, lambda call, k=2: k),
        (lambda call, *, k=1: k, lambda call, *, k=2: k),
    ],
)
def test_values_that_a_function_closes_over_count(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)


def test_other_objects_count_by_type_only() -> None:
    assert fingerprint(_over(object())) == fingerprint(_over(object()))
    assert fingerprint(_over(torch.ones(3))) == fingerprint(_over(torch.zeros(3)))


def test_only_the_fields_of_a_dataclass_count() -> None:
    used = Scale(1)
    assert used.twice == 2 and fingerprint(used) == fingerprint(Scale(1))


MODULE = """
LIMIT = 3
UNUSED = {unused}
FACTOR = {factor}

def rule(call):
    return [helper(c) for c in call.args]

def helper(call):
    return inner(call) if call else rule(call)

def inner(call):
    return {inner}

def aside(call):
    return {aside}
"""


def _module(**given: Any) -> str:
    space: dict[str, Any] = {"__name__": "own", "__file__": str(given)}
    exec(MODULE.format(**{"unused": 1, "factor": 2, "inner": "FACTOR * LIMIT", "aside": 0, **given}), space)
    return fingerprint(space["rule"])


def test_globals_that_the_code_names_count() -> None:
    assert len({_module(), _module(factor=3), _module(factor=2.0), _module(inner="FACTOR + LIMIT"), _module(inner="FACTOR")}) == 5
    assert _module() == _module(unused=2) == _module(aside=1)


def test_functions_that_name_each_other_are_described_once() -> None:
    names = [f"f{i}" for i in range(60)]
    space: dict[str, Any] = {"__name__": "own"}
    exec("\n".join(f"def {name}(call):\n    return [{', '.join(names)}]" for name in names), space)
    assert fingerprint(space["f0"]) == fingerprint(space["f0"])


class Color(enum.Enum):
    RED, BLUE = 1, 2


class PlainRule:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, call: Any) -> int:
        return self.factor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 1), (0, 2)),
        (Shard(0), Shard(1)),
        (Scale(1), Scale(2)),
        (Options([1]), Options([2])),
        (functools.partial(_over, k=1), functools.partial(_over, k=2)),
        (functools.partial(_over(1)), functools.partial(_over(2))),
        (functools.lru_cache(_over(1)), functools.lru_cache(_over(2))),
        ({"max": 1}, {"max": 2}),
        (PlainRule(1), PlainRule(2)),
        (Color.RED, Color.BLUE),
        (None, 1),
        (torch.ops.aten.mm, torch.ops.aten.bmm),
        (PlainRule, Scale),
    ],
)
def test_every_value_that_code_names_counts(one: Any, other: Any) -> None:
    """As a global or closed over, and nested in other values."""
    said = [fingerprint(_naming(value)) for value in (one, other, [one], [other], _naming(one), _naming(other))]
    assert len(set(said)) == 6
    assert fingerprint(_over(one)) != fingerprint(_over(other))


def _naming(value: Any) -> Callable[..., Any]:
    """A function that reads ``value`` as a global."""
    space: dict[str, Any] = {"__name__": "own", "VALUE": value}
    exec("def rule(call):\n    return VALUE", space)
    made: Callable[..., Any] = space["rule"]
    return made


def test_globals_of_installed_packages_do_not_count() -> None:
    for name, file in (("torch.own", "own.py"), ("own", "lib/site-packages/own.py")):
        said = []
        for value in (1, 2):
            space: dict[str, Any] = {"__name__": name, "VALUE": value}
            exec(compile("def rule(call):\n    return VALUE", file, "exec"), space)
            said.append(fingerprint(space["rule"]))
        assert said[0] == said[1]
