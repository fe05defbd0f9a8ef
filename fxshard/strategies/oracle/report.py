"""What the oracle says, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from fxshard.strategies.oracle.finder import FoundRule
from fxshard.strategies.oracle.verdict import Finding, Judged, Verdict

SHOWN = 20


def report(verdict: Verdict) -> str:
    """Counts, then what is wrong and what is missing, each option once with the first sample that shows it; then what was not looked at."""
    skipped = [j for j in verdict.judged if j.skipped]
    partly = [j for j in verdict.judged if j.partly]
    rows = [
        ("samples judged", len(verdict.judged) - len(skipped)),
        ("... of these for what is wrong only", len(partly)),
        ("... again with other plain numbers", sum(j.variants for j in verdict.judged)),
        ("combinations tried", sum(j.searched for j in verdict.judged)),
        ("not tried", verdict.unsearched),
        ("valid and offered", verdict.valid),
        ("valid and missing", len(verdict.missing)),
        ("offered and wrong", len(verdict.wrong)),
    ]
    parts = [f"{verdict.op}: {_word(verdict)}", tabulate(rows, tablefmt="plain")]
    parts += _list("wrong", verdict.wrong) + _list("missing", verdict.missing)
    parts += _samples("not judged", ((j, j.skipped) for j in skipped))
    parts += _samples("judged for what is wrong only, nothing is said on what is missing", ((j, j.partly) for j in partly))
    why = "positions of the result that are not finite, where a sum has no parts"
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
        return "right; what is missing was not searched"
    if not verdict.valid and not verdict.missing:
        return "right; no sample tells what else would be"
    return "right, but not complete" if verdict.missing else "right and complete"


def _list(what: str, findings: Iterable[Finding]) -> list[str]:
    firsts: dict[str, Finding] = {}
    for finding in findings:
        firsts.setdefault(str(finding.option), finding)
    return _shown(what, list(map(str, firsts.values())))


def report_rule(rule: FoundRule) -> str:
    """The line that registers it, and what it cannot say."""
    left = [f"  {option}" for option in rule.left_out]
    more = ["", "valid too, but not in a rule of text:", *left] if left else []
    return "\n".join([f"{rule.op} has no rule; this one holds for the samples:", "", f"  {rule}", *more])
