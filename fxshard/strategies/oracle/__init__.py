"""The oracle: checks a rule against the operator itself, run on the shards of simulated ranks.

>>> from fxshard.strategies.oracle import check_op, samples_of
>>> verdict = check_op("aten.mm.default", samples_of("aten.mm.default"))
>>> verdict.wrong, verdict.missing
((), ())
"""

from fxshard.strategies.oracle.finder import FoundRule, find_rule, largest_kind
from fxshard.strategies.oracle.recorded import direct_samples, record, samples_of
from fxshard.strategies.oracle.report import report, report_rule
from fxshard.strategies.oracle.samples import Sample, given_samples, operator, qualified, spread_out
from fxshard.strategies.oracle.verdict import BUDGET, IDEMPOTENT, RANKS, Finding, Judged, Option, Verdict, check_op, judge

__all__ = [
    "BUDGET",
    "IDEMPOTENT",
    "RANKS",
    "Finding",
    "FoundRule",
    "Judged",
    "Option",
    "Sample",
    "Verdict",
    "check_op",
    "direct_samples",
    "find_rule",
    "given_samples",
    "judge",
    "largest_kind",
    "operator",
    "qualified",
    "record",
    "report",
    "report_rule",
    "samples_of",
    "spread_out",
]
