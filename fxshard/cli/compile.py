"""``fxshard compile FILE.py:FACTORY --mesh dp=8,tp=8 --target sm_90``: a rank's program as machine code of an absent GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fxshard.cli.console.commands import add_command
from fxshard.errors import OptionError

if TYPE_CHECKING:
    from fxshard.mesh.mesh import Mesh

ABOUT = (
    "Plans the model, and compiles one rank's program for a GPU that this machine need not have: Inductor writes the code that it would "
    "write on the GPU, Triton compiles each kernel, nothing is launched. Prints kernels with registers, spills (bytes a thread), shared "
    "memory (bytes) and code (bytes), calls of libraries, and collectives in order. Exits with 1 if a kernel does not compile."
)
EXAMPLE = "fxshard compile examples/llama3_8b.py:training --mesh dp=8,tp=8 --hardware h100 --target sm_90"


def add_compile(commands: Any, add_model: Callable[[argparse.ArgumentParser], None], options_of: Callable[..., Any]) -> None:
    """Adds the command to ``commands``, the subparsers of ``fxshard``. ``options_of`` reads (mesh, options of a plan)."""
    compile_ = add_command(commands, "compile", "compile a rank's program for a GPU, without one", EXAMPLE, ABOUT, json="the report")
    add_model(compile_)
    compile_.add_argument("--target", required=True, metavar="sm_90", help="sm_80 (A100), sm_90 (H100, H200) or sm_100 (B200)")
    compile_.add_argument("--rank", metavar="I,J", help="the rank's index on each axis, for example 0,3 (default: the first rank)")
    compile_.add_argument("--infer", action="store_true", help="the forward pass only (default: forward and backward)")
    all_help = "compile every configuration that Inductor would tune between (default: the first)"
    compile_.add_argument("--every-config", action="store_true", help=all_help)
    compile_.set_defaults(command=lambda options: _compile(options, *options_of(options)))


def _compile(options: argparse.Namespace, mesh: Mesh, plan_options: Mapping[str, Any]) -> int:
    coordinate = _coordinate(options.rank)
    from fxshard import api
    from fxshard._torch_compat.inductor.without_gpu import check_target
    from fxshard.cli.arguments.factory import load_model
    from fxshard.progress import progress
    from fxshard.runtime.target.compile_for import compile_for

    check_target(options.target)
    model, args, kwargs = load_model(options.model)
    with progress("planning"):
        plan = api.plan(model, args, mesh, example_kwargs=kwargs, train=not options.infer, **plan_options)
        program = api.lower(model, args, plan, example_kwargs=kwargs)
    with progress("compiling"):
        report = compile_for(program, options.target, coordinate, options.every_config)
    print(json.dumps(report.to_json(), indent=1) if options.json else report)
    return int(bool(report.failures))


def _coordinate(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"cannot read --rank {text!r}", remedy="write the rank's index on each axis, like --rank 0,3") from None
