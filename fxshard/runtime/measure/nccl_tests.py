"""Reads what nccl-tests prints: the tables of all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf and sendrecv_perf.

The size of a row is that of the whole buffer (src/common.cu and PERFORMANCE.md of nccl-tests). Programs reduce in place and run other
collectives out of place; the row's columns of that kind count. Rows of a log may begin with what mpirun puts before them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fxshard.cost.collectives import sent_fraction
from fxshard.cost.fit import CollectiveTime
from fxshard.errors import OptionError
from fxshard.files import read_bytes

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "shift",
}
"""The program of nccl-tests without its ``_perf`` -> the collective as plans name it."""
NUMBER = r"[0-9][0-9.]*(?:e[+-]?[0-9]+)?"
ROW = re.compile(rf"(?:^|[\s>])(\d+)\s+\d+\s+[a-z]\w*\s+(?:\w+\s+-?\d+\s+)?((?:{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+\S+\s*){{1,2}})$")
"""Size, count, dtype, reduction and root where they are printed, then once or twice time (us), both bandwidths and errors."""
RANK = re.compile(r"#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s")
HEADER = re.compile(r"#\s+size\s+count\b")
"""The first line above the rows; each run prints it once."""
PROGRAM = re.compile(rf"\b({'|'.join(KINDS)})_perf")


@dataclass(frozen=True)
class Table:
    """One file: microseconds by bytes of the buffer, for a collective on ``ranks`` ranks of which a node has ``per_node``."""

    source: str
    kind: str
    ranks: int
    per_node: int
    rows: Mapping[int, float]

    def times(self) -> list[CollectiveTime]:
        """Every other row, and the last, to fit to; the others to check."""
        fraction, last = sent_fraction(self.kind, self.ranks), len(self.rows) - 1
        return [
            CollectiveTime(self.kind, 0, round(size * fraction), time, k % 2 == 0 or k == last, (self.ranks, 1))
            for k, (size, time) in enumerate(sorted(self.rows.items()))
        ]


def read_table(path: str | Path, nodes: int | None = None, per_node: int | None = None) -> Table:
    """The table in a file. ``nodes``, ``per_node``: the ranks' nodes and the ranks of each, where the header does not list them.

    Raises OptionError for a file without a table or with several, or whose collective or ranks it does not say.
    """
    lines = read_bytes(path).decode("utf-8", "replace").splitlines()
    kind = _kind(lines, Path(path).name)
    if sum(HEADER.search(line) is not None for line in lines) > 1:
        raise OptionError(f"{path} has more than one table", where="--nccl-tests", remedy="give what each run printed as a file of its own")
    rows: dict[int, float] = {}
    for line in lines:
        if found := ROW.search(line.rstrip()):
            figures = found[2].split()
            time = float(figures[4] if kind == "all_reduce" and len(figures) == 8 else figures[0])
            if int(found[1]) > 0 and time > 0:
                rows[int(found[1])] = time
    if len(rows) < 2:
        what = f"{path} has {len(rows)} rows of a table of nccl-tests"
        raise OptionError(what, where="--nccl-tests", remedy="give what for example all_reduce_perf -b 1K -e 1G -f 2 printed")
    return Table(str(path), kind, *_ranks(lines, str(path), nodes, per_node), rows)


def _kind(lines: Sequence[str], name: str) -> str:
    """The collective, from the lines that name the program, else from the file's name."""
    programs = sorted({found[1] for text in lines for found in PROGRAM.finditer(text)})
    if len(programs) > 1:
        what = f"{name} names the programs {' and '.join(f'{one}_perf' for one in programs)}"
        raise OptionError(what, where="--nccl-tests", remedy="give what each run printed as a file of its own")
    if programs:
        return KINDS[programs[0]]
    named = [kind for kind in KINDS if kind in name]
    if len(named) != 1:
        remedy = f"put its collective into the file's name: one of {', '.join(KINDS)}"
        raise OptionError(f"{name} does not say which program of nccl-tests printed it", where="--nccl-tests", remedy=remedy)
    return KINDS[named[0]]


def _ranks(lines: Sequence[str], path: str, nodes: int | None, per_node: int | None) -> tuple[int, int]:
    """(ranks, ranks of a node)."""
    hosts = {int(found[1]): found[2] for line in lines if (found := RANK.search(line))}
    listed = (max(hosts) + 1, len(set(hosts.values()))) if hosts else None
    if nodes and per_node:
        if listed not in (None, (nodes * per_node, nodes)):
            what = f"{path} lists {listed[0]} ranks on {listed[1]} nodes, not {nodes * per_node} on {nodes}"
            raise OptionError(what, where="--nodes", remedy="leave out --nodes and --gpus-per-node: the header counts")
        return nodes * per_node, per_node
    if listed is None:
        raise OptionError(f"{path} lists no ranks", where="--nccl-tests", remedy="say where they ran: --nodes 2 --gpus-per-node 8")
    ranks, held = listed
    if ranks < 2 or ranks % held:
        what = f"{path} lists {ranks} ranks on {held} nodes, from which no group with as many ranks on each node follows"
        raise OptionError(what, where="--nccl-tests", remedy="say where they ran: --nodes 2 --gpus-per-node 8")
    return ranks, ranks // held
