"""Tables of nccl-tests: those written from a known link are recovered, and published ones are read as printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fxshard.cli import main as cli
from fxshard.cost import collective_time
from fxshard.errors import OptionError
from fxshard.mesh.hardware import HARDWARE, Link
from fxshard.mesh.hardware_file import load
from fxshard.mesh.mesh import Mesh
from fxshard.runtime.measure.from_files import calibrated
from fxshard.runtime.measure.nccl_tests import read_table

PUBLISHED = """\
[1,0]<stdout>:# nThread 1 nGpus 1 minBytes 536870912 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20
#  Rank  0 Group  0 Pid     16 on worker-0 device  0 [0x19] NVIDIA H100 80GB HBM3
#  Rank  7 Group  0 Pid     23 on worker-0 device  7 [0xda] NVIDIA H100 80GB HBM3
#  Rank  8 Group  0 Pid     16 on worker-1 device  0 [0x19] NVIDIA H100 80GB HBM3
#  Rank 15 Group  0 Pid     23 on worker-1 device  7 [0xda] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
   536870912     134217728     float     sum      -1   5202.3  103.20  193.50      0   5377.7   99.83  187.19      0
[1,0]<stdout>:  1073741824     268435456     float     sum      -1    10314  104.11  195.20      0    10339  103.85  194.73      0
# Avg bus bandwidth    : 194.675
"""
"""Rows of two nodes of 8 H100 as a README about nccl-tests on Kubernetes shows them; ranks in between left out."""


def written(folder: Path, program: str, ranks: int, per_node: int, time: Callable[[int], float]) -> str:
    """A table as ``program`` prints it, of sizes from 1 KiB to 1 GiB."""
    lines = [f"# Collective test starting: {program}_perf"]
    lines += [f"#  Rank {r:2d} Group  0 Pid  9 on host-{r // per_node} device {r % per_node:2d} [0x19] NVIDIA" for r in range(ranks)]
    for size in (2**k for k in range(10, 31)):
        column = f"{time(size):.5g} 0.01 0.01 0"
        lines.append(f"{size:12d} {size // 4:12d} float sum -1 {column} {column}")
    path = folder / f"{program}_{ranks}.txt"
    path.write_text("\n".join(lines))
    return str(path)


def test_links_of_a_known_model_are_recovered(tmp_path: Path) -> None:
    """Rings of alpha and beta, in one node of 8 and across two: hops, launches and bytes by Thakur et al. (2005)."""
    inside, between, launch = Link(2e9, 50.0), Link(0.1e9, 400.0), 3.0

    def ring(hops: int, latency: float, rate: float) -> Callable[[int], float]:
        return lambda size: launch + latency + hops / 8 * size / rate * 1e6

    files = [
        written(tmp_path, "all_gather", 8, 8, ring(7, 7 * inside.latency, inside.bandwidth)),
        written(tmp_path, "reduce_scatter", 8, 8, ring(7, 7 * inside.latency, inside.bandwidth)),
        written(tmp_path, "alltoall", 8, 1, ring(7, 7 * between.latency, between.bandwidth)),
    ]
    out = tmp_path / "cluster.json"
    assert cli.main(["calibrate", "--nccl-tests", *files[:2], "--hardware", "cpu", "-o", str(out)]) == 0
    found = load(out)
    assert found.inside.bandwidth == pytest.approx(inside.bandwidth, rel=0.01)
    assert found.inside.latency == pytest.approx(inside.latency, rel=0.01)
    said = json.loads(out.read_text())
    assert files[0] in said["made"]["collectives"] and all(abs(row["worst"]) < 0.01 for row in said["errors"] if row["of"] == "links")
    assert cli.main(["calibrate", "--nccl-tests", files[2], "--hardware", "cpu", "-o", str(out)]) == 0
    there = load(out)
    assert there.node_size == 1 and there.between is not None
    assert there.between.bandwidth == pytest.approx(between.bandwidth, rel=0.02)
    sent = 7 * 2**20  # 8 MiB on 8 ranks
    assert collective_time("all_to_all", 0, sent, Mesh({"x": 8}, there)) == pytest.approx(launch + 2800 + sent / 0.1e9 * 1e6, rel=0.02)


def test_a_published_table_is_read_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text(PUBLISHED)
    table = read_table(path)
    assert (table.kind, table.ranks, table.per_node) == ("all_reduce", 16, 8)
    assert table.rows == {536870912: 5377.7, 1073741824: 10339.0}, "in place, as programs reduce"
    assert cli.main(["calibrate", "--nccl-tests", str(path), "--hardware", "h100", "--json"]) == 0
    hardware = json.loads(capsys.readouterr().out)
    (curve,) = hardware["collectives"]
    assert (curve["kind"], curve["size"], curve["stride"]) == ("all_reduce", 16, 1)
    assert curve["points"][-1] == [round(1073741824 * 30 / 16), 10339.0]


def test_refused(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text("#  Rank 0 ...\nnothing here\n")
    with pytest.raises(OptionError, match="0 rows"):
        read_table(path)
    path.write_text("\n".join(line for line in PUBLISHED.splitlines() if "Rank" not in line))
    with pytest.raises(OptionError, match="lists no ranks"):
        read_table(path)
    assert read_table(path, 2, 8).ranks == 16
    other = tmp_path / "log.txt"
    other.write_text(PUBLISHED)
    with pytest.raises(OptionError, match="does not say which program"):
        read_table(other)
    path.write_text(PUBLISHED)
    assert read_table(path, 2, 8).ranks == 16
    with pytest.raises(OptionError, match="lists 16 ranks on 2 nodes, not 16 on 4"):
        read_table(path, 4, 4)
    path.write_text(PUBLISHED + PUBLISHED.replace("5377.7", "6377.7"))
    with pytest.raises(OptionError, match="more than one table"):
        read_table(path)
    path.write_text(f"# starting: all_reduce_perf\n{PUBLISHED}# starting: alltoall_perf\n")
    with pytest.raises(OptionError, match="all_reduce_perf and alltoall_perf"):
        read_table(path)


def test_a_link_that_nothing_crossed_is_the_presets(tmp_path: Path) -> None:
    """A table of one node leaves the link between nodes, and one of a rank a node the link inside."""
    preset = HARDWARE["h100"]
    ring = written(tmp_path, "all_gather", 8, 8, lambda size: 20 + 7 / 8 * size / 100e9 * 1e6)
    inside = calibrated([ring], [], "h100").hardware
    assert inside.between == preset.between and inside.inside.bandwidth < preset.inside.bandwidth / 2
    assert Mesh({"x": 16}, inside).link(0) == preset.between
    between = calibrated([written(tmp_path, "all_gather", 4, 1, lambda size: 50 + 3 / 4 * size / 1e9 * 1e6)], [], "h100").hardware
    assert between.inside == preset.inside and between.between is not None and preset.between is not None
    assert between.between.bandwidth < preset.between.bandwidth / 10
