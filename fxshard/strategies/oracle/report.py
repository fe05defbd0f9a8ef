"""The oracle's verdicts and found rules as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tabulate import tabulate
from torch.distributed.tensor import Partial, Replicate, Shard

from fxshard._torch_compat.operators import schema_of
from fxshard.strategies.oracle.finder import FoundRule
from fxshard.strategies.oracle.samples import operator
from fxshard.strategies.oracle.verdict import Finding, Judged, Option, Verdict

SHOWN = 20
UNTRIED = """not tried: a sample's combinations beyond --budget. Offered ones come first, then those with one operand changed, then one
factor at a time (dims of one size sharded together); the rest may contain some that shard dims of different sizes together"""
BEYOND = """pending in a maximum, minimum or product, or passed on to some of the results only. Discovery never proposes these;
a rule that is a function from a Call to Factors can express them"""


def report(verdict: Verdict) -> str:
    """Counts, then wrong and missing options, each with the first sample that shows it, then what was not judged or compared."""
    skipped = [j for j in verdict.judged if j.skipped]
    partly = [j for j in verdict.judged if j.partly]
    rows = [
        ("samples judged", len(verdict.judged) - len(skipped)),
        ("... for wrong combinations only", len(partly)),
        ("... again with other numbers", sum(j.variants for j in verdict.judged)),
        ("offered and run", verdict.offered),
        ("combinations tried", sum(j.searched for j in verdict.judged)),
        ("not tried", verdict.unsearched),
        ("valid and offered", verdict.valid),
        ("valid and missing", len(verdict.missing)),
        ("offered and wrong", len(verdict.wrong)),
    ]
    subject = f"{verdict.op} (by the function given to register_sharding)" if verdict.listed else verdict.op
    parts = [f"{subject}: {_word(verdict)}", tabulate(rows, tablefmt="plain")]
    if verdict.unsearched:
        parts.append(UNTRIED)
    parts += _list("wrong", verdict.wrong) + _list("missing", verdict.missing) + _beyond_sums(verdict.missing)
    parts += _samples("not judged", ((j, j.skipped) for j in skipped))
    parts += _samples("judged for wrong combinations only, not for missing ones", ((j, j.partly) for j in partly))
    why = "positions of the result that are not finite; parts of a sum cannot be compared there"
    parts += _samples("not compared", ((j, f"{j.masked} {why}") for j in verdict.judged if j.masked))
    if verdict.note:
        parts.append(f"the rule says: {verdict.note}")
    return "\n\n".join(parts)


def _samples(what: str, found: Iterable[tuple[Judged, str]]) -> list[str]:
    return _shown(what, [f"({judged.sample}): {why}" for judged, why in found])


def _shown(what: str, lines: Sequence[str]) -> list[str]:
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return ["\n".join([f"{what}:", *(f"  {line}" for line in lines[:SHOWN]), *more])] if lines else []


def _word(verdict: Verdict) -> str:
    if verdict.fallback:
        return "no rule, it is replicated"
    if verdict.wrong:
        return "WRONG"
    if all(j.skipped for j in verdict.judged):
        return "no sample could be judged"
    if not any(j.searched and not j.partly for j in verdict.judged):
        run = "" if verdict.offered else "nothing but replicated is offered for these samples, which is "
        return f"{run}right; missing combinations were not searched for"
    if not verdict.valid and not verdict.missing:
        return "right; only the replicated combination is valid for these samples"
    if verdict.missing:
        return "right, but not complete"
    return f"right; {verdict.unsearched} combinations were not tried (--budget)" if verdict.unsearched else "right and complete"


def _list(what: str, findings: Iterable[Finding]) -> list[str]:
    firsts: dict[str, Finding] = {}
    for finding in findings:
        firsts.setdefault(str(finding.option), finding)
    return _shown(what, list(map(str, firsts.values())))


def _beyond_sums(missing: Iterable[Finding]) -> list[str]:
    """Says how many missing options discovery never proposes."""
    passed = {str(f.option) for f in missing if _passes(f.option)}
    return [f"{len(passed)} of the missing combinations: {BEYOND}"] if passed else []


def _passes(option: Option) -> bool:
    """Whether the option only passes reductions through, and they are not sums or averages, or do not reach all outputs."""
    pending = {p for p in option.inputs if isinstance(p, Partial)}
    whole = any(Replicate() in found for found in option.outputs)
    cut = any(isinstance(p, Shard) for p in option.inputs)
    return not cut and bool(pending) and (whole or not pending <= {Partial("sum"), Partial("avg")})


def report_rule(rule: FoundRule) -> str:
    """The line that registers the rule, valid options that it cannot express, and the limits of the search."""
    if rule.says_nothing:
        return "\n".join(
            [f"{rule.op} has no rule, and the samples show none that is worth registering: its tensors must stay whole", *_cut(rule)]
        )
    left = [f"  {option}" for option in rule.left_out]
    more = ["", "valid too, but a rule in text form cannot express them:", *left] if left else []
    return "\n".join([f"{rule.op} has no rule; this one holds for the samples:", "", f"  {rule}", *more, *_one_call(rule), *_cut(rule)])


def _cut(rule: FoundRule) -> list[str]:
    """A warning that the budget was too small to try all combinations, if it was."""
    what = f"the search was cut: {rule.untried} combinations were not tried, so more may be valid; try a larger --budget"
    return ["", what] if rule.untried else []


def _one_call(rule: FoundRule) -> list[str]:
    """A warning that the pattern fits calls with as many tensors as the samples, if lists or optional arguments allow others."""
    schema = schema_of(operator(rule.op))
    varying = (
        [a.name for a in schema.arguments if re.search(r"List\[|Optional\[", str(a.type)) and "Tensor" in str(a.type)] if schema else []
    )
    what = f"for calls with as many tensors as the samples: {', '.join(varying)} may hold more or fewer; for those write at= or a function"
    return ["", f"{what} (docs/adding-an-operator.md)"] if varying else []
