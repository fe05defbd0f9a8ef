"""What the oracle says, as text."""

from __future__ import annotations

from collections.abc import Iterable

from tabulate import tabulate

from fxshard.strategies.oracle.finder import FoundRule
from fxshard.strategies.oracle.verdict import Finding, Verdict

SHOWN = 20


def report(verdict: Verdict) -> str:
    """Counts, then what is wrong and what is missing, each option once with the first sample that shows it."""
    skipped = [f"({j.sample}): {j.skipped}" for j in verdict.judged if j.skipped]
    rows = [
        ("samples judged", len(verdict.judged) - len(skipped)),
        ("combinations tried", sum(j.searched for j in verdict.judged)),
        ("not tried (beyond the budget)", verdict.unsearched),
        ("valid and offered", verdict.valid),
        ("valid and missing", len(verdict.missing)),
        ("offered and wrong", len(verdict.wrong)),
    ]
    parts = [f"{verdict.op}: {_word(verdict)}", tabulate(rows, tablefmt="plain")]
    parts += _list("wrong", verdict.wrong) + _list("missing", verdict.missing)
    if skipped:
        parts.append("not judged:\n" + "\n".join(f"  {s}" for s in skipped[:SHOWN]))
    if verdict.note:
        parts.append(f"the rule says: {verdict.note}")
    return "\n\n".join(parts)


def _word(verdict: Verdict) -> str:
    if verdict.fallback:
        return "no rule, it is replicated"
    if verdict.wrong:
        return "WRONG"
    if all(j.skipped for j in verdict.judged):
        return "no sample could be judged"
    if not verdict.valid and not verdict.missing:
        return "right; no sample tells what else would be"
    return "right, but not complete" if verdict.missing else "right and complete"


def _list(what: str, findings: Iterable[Finding]) -> list[str]:
    firsts: dict[str, Finding] = {}
    for finding in findings:
        firsts.setdefault(str(finding.option), finding)
    lines = [f"  {f}" for f in firsts.values()]
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return ["\n".join([f"{what}:", *lines[:SHOWN], *more])] if lines else []


def report_rule(rule: FoundRule) -> str:
    """The line that registers it, and what it cannot say."""
    left = [f"  {option}" for option in rule.left_out]
    more = ["", "valid too, but not in a rule of text:", *left] if left else []
    return "\n".join([f"{rule.op} has no rule; this one holds for the samples:", "", f"  {rule}", *more])
