"""``python -m bench.families [name ...]``: model families and the operators that are only replicated, by fxshard and by DTensor."""

from __future__ import annotations

import logging
import sys
import warnings

from tabulate import tabulate
from tqdm import tqdm

from bench.families import FAMILIES, summary
from bench.families.rows import Row, row


def main(names: list[str]) -> int:
    """Prints the table; 1 if a family has no joint graph, or an operator no rule."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    chosen = [f for f in FAMILIES if not names or f.name in names]
    rows = [row(family) for family in tqdm(chosen, disable=None)]
    print(tabulate([_line(r) for r in rows], headers=HEADERS))
    print()
    print(summary(rows))
    return int(any(r.reason or r.fallbacks for r in rows))


HEADERS = ("family", "kind", "nodes", "operators", "no rule", "rule: whole only", "DTensor: none")


def _line(r: Row) -> tuple[object, ...]:
    if r.reason:
        return r.family, r.kind, r.reason.splitlines()[0]
    return r.family, r.kind, r.nodes, len(r.operators), _names(r.fallbacks), _names(tuple(r.whole)), len(r.dtensor)


def _names(operators: tuple[str, ...]) -> str:
    return ", ".join(op.removeprefix("aten.").removesuffix(".default") for op in operators) or "0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
