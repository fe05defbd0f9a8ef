"""``fxshard calibrate``: a hardware file, measured here or read from files of earlier measurements."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from fxshard.cli.console.commands import add_command
from fxshard.errors import OptionError
from fxshard.files import check_writable
from fxshard.mesh.hardware import HARDWARE

ABOUT = (
    "Measures products, copies and collectives, fits a hardware description to half of the measurements, and says how far its "
    "predictions are from the other half. Under torchrun the running ranks measure; otherwise this command starts a process for each "
    "rank of the mesh."
)
FILES = "--nccl-tests", "--trace"
MEASURING = "--mesh", "--device", "--quick"
"""Options that say how to measure, so that they mean nothing with ``FILES``."""
READING = "--hardware", "--nodes", "--gpus-per-node"
"""Options that say what ``FILES`` do not, so that they mean nothing without."""


def add_calibrate(commands: Any) -> None:
    """Adds the command to ``commands``, the subparsers of ``fxshard``."""
    help, example = "measure this machine or cluster, and write a hardware file", "fxshard calibrate --mesh dp=2,tp=2 -o cluster.json"
    calibrate = add_command(commands, "calibrate", help, example, ABOUT, json="the hardware")
    mesh_help = "axes whose collectives are measured, for example dp=2,tp=2 (default: one device, no collectives; under torchrun, one axis)"
    calibrate.add_argument("--mesh", metavar="AXES", help=mesh_help)
    calibrate.add_argument("-o", "--output", metavar="HARDWARE.json", help="write the hardware here, for --hardware and fxshard.Mesh")
    calibrate.add_argument("--device", choices=("cpu", "cuda"), help="what to measure (default: cuda where there is one)")
    calibrate.add_argument("--quick", action="store_true", help="fewer sizes and rounds: seconds, and larger errors")
    tests_help = "measure nothing: read what all_reduce_perf and the others of nccl-tests printed"
    calibrate.add_argument("--nccl-tests", nargs="+", default=[], metavar="FILE", help=tests_help)
    nodes_help = "nodes of the runs of nccl-tests, with --gpus-per-node (default: as their headers list them)"
    calibrate.add_argument("--nodes", type=int, metavar="N", help=nodes_help)
    held_help = "ranks of a node: with --nodes those of the runs of nccl-tests, alone those of the ranks in traces"
    calibrate.add_argument("--gpus-per-node", type=int, metavar="N", help=held_help)
    trace_help = "measure nothing: read Chrome traces of torch.profiler with record_shapes=True (.json, .json.gz)"
    calibrate.add_argument("--trace", nargs="+", default=[], metavar="FILE", help=trace_help)
    base_help = "with --nccl-tests and --trace: the preset, or file, for what they do not say"
    calibrate.add_argument("--hardware", metavar="NAME|FILE", help=base_help)
    calibrate.set_defaults(command=_calibrate)


def _calibrate(options: argparse.Namespace) -> None:
    if _given(options, FILES):
        _calibrate_from_files(options)
        return
    if useless := _given(options, READING):
        what = f"{' and '.join(useless)} would have no effect: without files, this machine is measured"
        remedy = f"leave out {' and '.join(useless)}, or give files with {' or '.join(FILES)}"
        raise OptionError(what, where="fxshard calibrate", remedy=remedy)
    from fxshard.mesh.mesh import parse_mesh

    if options.mesh is not None:
        parse_mesh(options.mesh)
    from fxshard.runtime.measure.calibrate import main as run_calibrate

    run_calibrate(options.mesh, options.output, options.device, options.quick, options.json)


def _calibrate_from_files(options: argparse.Namespace) -> None:
    if useless := _given(options, MEASURING):
        what = f"{' and '.join(useless)} would have no effect: files are read, and nothing is measured"
        remedy = f"leave out {' and '.join(useless)}, or leave out {' and '.join(_given(options, FILES))} to measure here"
        raise OptionError(what, where="fxshard calibrate", remedy=remedy)
    if options.hardware is None:
        remedy = f"name the device that was measured, --hardware h100; presets are {', '.join(HARDWARE)}"
        raise OptionError("the files do not say what the hardware is otherwise", where="--hardware", remedy=remedy)
    _check_ranks(options.nodes, options.gpus_per_node, bool(options.nccl_tests))
    if options.output:
        check_writable(options.output)
    from fxshard.runtime.measure.calibrate import show
    from fxshard.runtime.measure.from_files import calibrated

    found = calibrated(options.nccl_tests, options.trace, options.hardware, options.nodes, options.gpus_per_node)
    show(found, options.output, options.json)


def _check_ranks(nodes: int | None, held: int | None, tables: bool) -> None:
    """``held``: ranks of a node; ``tables``: whether there are tables of nccl-tests, whose ranks they say."""
    for option, value in (("--nodes", nodes), ("--gpus-per-node", held)):
        if value is not None and value < 1:
            raise OptionError(f"{option} is {value}", where="fxshard calibrate", remedy="give a positive whole number")
    if nodes is not None and not tables:
        what = "--nodes would have no effect: traces list the ranks of each group"
        raise OptionError(what, where="fxshard calibrate", remedy="leave it out; --gpus-per-node says which ranks share a node")
    if tables and (nodes is None) != (held is None):
        what = f"{'--gpus-per-node' if nodes is None else '--nodes'} alone does not say where the runs of nccl-tests were"
        raise OptionError(what, where="fxshard calibrate", remedy="give both, like --nodes 2 --gpus-per-node 8, or neither")
    if tables and nodes is not None and held is not None and nodes * held < 2:
        raise OptionError("a collective has at least two ranks", where="--nodes 1 --gpus-per-node 1", remedy="say where the runs were")


def _given(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of the options that the user gave."""
    return [name for name in names if getattr(options, name.removeprefix("--").replace("-", "_")) not in (None, False, [])]
