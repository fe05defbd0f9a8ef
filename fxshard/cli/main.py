"""The ``fxshard`` command: plan, compare, diff, export, run, compile, inspect, solve, check-op, calibrate, demo, completion.

``_parser`` declares the commands; each calls a function here or in a file of its own.
click and typer would take more lines and start later than argparse: decision 0043.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fxshard import __version__
from fxshard.cli.arguments.optimizer_text import parse_optimizer
from fxshard.cli.arguments.words import WORDS, parse_precision, parse_words
from fxshard.cli.calibrate import add_calibrate
from fxshard.cli.check_op import add_check_op
from fxshard.cli.compare import DEFAULT, PLANS, compare_plans, read_plans
from fxshard.cli.compile import add_compile
from fxshard.cli.completion import add_completion
from fxshard.cli.console.commands import CommandParser, add_command
from fxshard.cli.console.exit_codes import ended
from fxshard.cli.html_report import add_html, check_html, write_plan_report
from fxshard.cli.inspect_file import add_inspect
from fxshard.cli.pipeline import add_pipeline, check_no_pipeline, pipeline_text
from fxshard.cli.run import add_run, add_weights
from fxshard.errors import OptionError
from fxshard.mesh.hardware import HARDWARE
from fxshard.progress import progress

if TYPE_CHECKING:
    from fxshard.mesh.mesh import Mesh
    from fxshard.plans.explanation import Explanation
    from fxshard.plans.sharding_plan import ShardingPlan

FACTORY_HELP = "a Python file and a function in it that returns (model, args) or (model, args, kwargs)"
CONSTRAINT_OPTIONS = (
    (
        "--pin",
        "NAME=LAYOUT",
        "fix the layout of a parameter, buffer, input, submodule's result or node, or of a glob (* leaves an axis free)",
    ),
    ("--equal", "NAME=NAME", "everything that these names or globs match has the same layout"),
    ("--forbid", "NAME=LAYOUT[@AXIS]", "nothing that the name or glob matches has this layout, or this placement on an axis"),
    ("--at-most", "AXIS=BYTES", "all collectives on an axis together send at most this much per rank and step, for example dp=1GB"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0 (check-op: 1 for a wrong rule), 2 after a FxshardError, 1 after another error. Prints errors on stderr."""
    options = _parser().parse_args(arguments)
    return ended(lambda: _run(options))


def _run(options: argparse.Namespace) -> int | None:
    with progress(f"fxshard {options.command_name}"):
        return options.command(options)


def _parser() -> argparse.ArgumentParser:
    about = "Plans how a PyTorch model is sharded over a device mesh, and shows why."
    parser = CommandParser("fxshard", description=about, epilog="example:  fxshard plan model.py:training --mesh dp=2,tp=4")
    parser.add_argument("--version", action="version", version=f"fxshard {__version__}, torch {version('torch')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command_name")

    example = "fxshard plan model.py:training --mesh dp=2,tp=4 --hardware h100 -o plan.json"
    plan = add_command(commands, "plan", "decide how a model is sharded, and print what was decided", example, json="the plan")
    _add_model(plan)
    _add_training(plan)
    host = "what may be on the host to keep --memory-limit: optimizer (its state), parameters (with it), or both, with a comma"
    plan.add_argument("--offload", default="", metavar="KINDS", help=host)
    dtypes = "compute in this dtype and reduce gradients in it or in a second one, for example bfloat16,float32"
    plan.add_argument("--mixed-precision", metavar="DTYPE[,DTYPE]", help=dtypes)
    plan.add_argument("--gathers", choices=("fp8",), help="with --mixed-precision: price gathers of weights in fp8, which cannot run yet")
    plan.add_argument("-o", "--output", metavar="PLAN.json", help="write the plan here")
    explain_help = "say what all other layouts of a parameter, input or node would cost, or only the given one; may be repeated"
    plan.add_argument("--explain", action="append", default=[], metavar="NAME[=LAYOUT]", help=explain_help)
    memory_help = "show what a device holds at the peak and over time, for training too"
    plan.add_argument("--memory", action="store_true", help=memory_help)
    at_help = "say what the plan, and the best plan, cost at other sizes of its dynamic dims (batch=4,seq=8192); may be repeated"
    plan.add_argument("--at", action="append", default=[], metavar="NAME=SIZE", help=at_help)
    add_html(plan, alternatives=True)
    regret_help = "say what the plan loses if prices are wrong by up to this part (default: 0.3; stated: the preset's), with 50 draws"
    plan.add_argument("--regret", type=_part, nargs="?", const=0.3, metavar="ERROR", help=regret_help)
    add_pipeline(plan)
    plan.set_defaults(command=_plan)

    compare = add_command(
        commands,
        "compare",
        "compare known plans of a model with the one that the solver finds, and say why it is better",
        "fxshard compare model.py:training --mesh dp=2,tp=4 --hardware h100 --plans auto,fsdp,megatron",
        json="the figures and sentences",
    )
    _add_model(compare)
    known = "; ".join(f"{name}: {said}" for name, said in PLANS.items())
    compare.add_argument("--plans", default=DEFAULT, metavar="NAMES", help=f"which, the first against the others (default: all). {known}")
    _add_training(compare)
    compare.set_defaults(command=_compare)

    about = "compare two plans: layouts, redistributions, collectives, objective, memory"
    diff = add_command(commands, "diff", about, "fxshard diff before.json after.json", json="the differences")
    diff.add_argument("before", metavar="A.json", help="a plan")
    diff.add_argument("after", metavar="B.json", help="another")
    diff.set_defaults(command=_diff)

    about = "write a sharded program for inference or training, one file for all ranks"
    step = "fxshard export model.py:training --mesh dp=4 --train --optimizer adamw:lr=1e-3 -o step.pt2"
    example = f"fxshard export model.py:serving --mesh tp=4 -o model.pt2\n  {step}"
    export = add_command(commands, "export", about, example, json="the program")
    _add_model(export)
    export.add_argument("--plan", metavar="PLAN.json", help="use this plan (default: make one)")
    even_help = "with --dynamic: serve only sizes that the mesh divides evenly, with one graph for all ranks"
    export.add_argument("--even", action="store_true", help=even_help)
    export.add_argument("-o", "--output", metavar="PROGRAM.pt2", required=True, help="write the program here")
    add_weights(export)
    export.set_defaults(command=_export)
    add_run(commands)

    add_compile(commands, _add_model, lambda options: (_mesh(options), _plan_options(options)))

    add_inspect(commands)

    solve_help = "solve a placement problem given as numbers (IOPDDL): print choices, cost, a proven lower bound and the gap"
    solve = add_command(commands, "solve", solve_help, "fxshard solve problem.json.gz --time-limit 60", json="choices, cost and bound")
    solve.add_argument("file", help="a problem of the ASPLOS 2025 contest, JSON or gzipped JSON")
    solve.add_argument("--time-limit", type=float, metavar="SECONDS", help="default: a limit on work, the same choices on every machine")
    solve.add_argument("-o", "--output", metavar="SOLUTION.json", help="write choices, cost and bound here")
    solve.set_defaults(command=_solve)

    add_check_op(commands)
    add_calibrate(commands)

    demo_help = "train a small Llama on two ranks of this machine and compare with one device"
    about = (
        "Trains a small Llama on the sources of Python's standard library: on two gloo ranks of this machine, compiled by Inductor, with "
        "one device beside them, then on a simulated 2x2 mesh. Prints the plan's layouts, the losses and the collectives; needs no GPU."
    )
    demo = add_command(commands, "demo", demo_help, "fxshard demo", about, json="the losses and their differences")
    demo.set_defaults(command=_demo)
    add_completion(commands)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FILE.py:FACTORY", help=FACTORY_HELP)
    parser.add_argument("--mesh", required=True, metavar="AXES", help="axes and their sizes, for example dp=2,tp=4")
    hardware_help = f"{', '.join(HARDWARE)} (default: cpu), or a file that fxshard calibrate wrote"
    parser.add_argument("--hardware", default="cpu", metavar="NAME|FILE", help=hardware_help)
    parser.add_argument("--objective", choices=("time", "communication"), default="time", help="what to minimise (default: time)")
    words_help = f"what each axis is for: {', '.join(WORDS[:-1])} or {WORDS[-1]}, for example dp=fsdp,tp=auto (docs/parallel-styles.md)"
    parser.add_argument("--parallel", metavar="AXIS=WORD", help=words_help)
    parser.add_argument("--memory-limit", metavar="BYTES", help="bytes per device, for example 80GB or 64GiB")
    for option, metavar, said in CONSTRAINT_OPTIONS:
        parser.add_argument(option, action="append", default=[], metavar=metavar, help=f"{said}; may be repeated")
    for end, name in (("input", "args[0]"), ("output", "outputs[0]")):
        end_help = f"fix the layout of an {end} ({name}=S(0)R), or without a name of all; may be repeated"
        parser.add_argument(f"--{end}-layout", action="append", default=[], metavar="[NAME=]LAYOUT", help=end_help)
    dynamic_help = "dims whose sizes may change, of one input (args[0]:0=batch<=64,1=seq) or several, separated by ';'; may be repeated"
    parser.add_argument("--dynamic", action="append", default=[], metavar="INPUT:DIM=NAME[<=MAX]", help=dynamic_help)
    several_help = "minimise the mean cost at these sizes: batch=8,seq=2048; batch=64,seq=1, or a weighted mean: batch=8*3; batch=64*1"
    parser.add_argument("--example-sizes", metavar="NAME=SIZE[*WEIGHT]", help=several_help)
    parser.add_argument("--dump", metavar="DIR", help="write one readable file per stage here")
    cache_help = "plan anew, and do not keep the plan (default: plans are kept in FXSHARD_CACHE_DIR, or ~/.cache/fxshard)"
    parser.add_argument("--no-cache", action="store_true", help=cache_help)


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--infer", action="store_true", help="plan the forward pass only (default: forward and backward)")
    kept = "the optimizer whose state is counted as memory: none (the default), sgd, sgd_momentum, adam, adamw, ... (a wrong one lists all)"
    parser.add_argument("--optimizer", default="none", metavar="NAME", help=kept)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="for the solver (default: a limit on its work instead)")


def _part(text: str) -> float | str:
    """An error of prices, above 0 and below 10, or that the preset's own are asked for."""
    if text == "stated":
        return text
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 10:
            return float(text)
    raise argparse.ArgumentTypeError(f"cannot read {text!r}: write a part, like 0.3 for 30 %, or put --regret last")


def _print_at(plan: ShardingPlan, sizes: dict[str, int]) -> Callable[[], None]:
    """A function that prints what the plan costs at these sizes."""
    return lambda: print(f"\n{plan.at(**sizes)}")


def _plan(options: argparse.Namespace) -> int:
    _check_output(options)
    check_html(options)
    mesh, plan_options = _mesh(options), _plan_options(options)
    if options.pipeline is not None:
        print(pipeline_text(options, mesh, plan_options))
        return 0
    check_no_pipeline(options)
    from fxshard.cli.arguments.dynamic_text import check_named, parse_sizes

    sizes, elsewhere = _sizes(options), [parse_sizes(text) for text in options.at]
    check_named(elsewhere, sizes["dynamic_shapes"])
    model, args, kwargs = _load_model(options.model)
    from fxshard import api, inspect
    from fxshard.passes.planning.sizes_of_plan import check_asked

    check_asked(elsewhere, model, args, kwargs, sizes["dynamic_shapes"])
    limits = {"train": not options.infer, "time_limit": options.time_limit, "optimizer": options.optimizer, **sizes}
    limits["offload"] = tuple(filter(None, options.offload.split(",")))
    if limits["offload"] and options.memory_limit is None:
        raise OptionError("--offload has no effect without a memory limit, which it helps to keep", remedy="add --memory-limit, like 40GB")
    limits["mixed_precision"] = parse_precision(options.mixed_precision, options.gathers)
    with progress("planning"):
        plan = api.plan(model, args, mesh, example_kwargs=kwargs, **limits, **plan_options)
    if options.output:
        plan.save(options.output)
    if options.json:
        answers = _answers(plan, options)
        print(json.dumps(_plan_as_json(plan, answers, elsewhere, options.regret), indent=1))
        write_plan_report(options, plan, answers)
        return 0
    print(inspect.summary(plan))
    if plan.origin is not None and plan.origin.cached is not None:
        print(f"\nplanned before: from the cache, {plan.origin.cached} (--no-cache plans anew)")
    if options.output:
        print(f"\nwrote {options.output}")
    if options.memory:
        print(f"\n{inspect.memory_table(plan.memory_profile())}")
    codes = [ended(_print_at(plan, there)) for there in elsewhere]
    answers = _answers(plan, options)
    for answer in answers:
        print(f"\n{answer}")
    if write_plan_report(options, plan, answers):
        print(f"\nwrote {options.html}")
    if options.regret is not None:
        print(f"\n{plan.regret(options.regret)}")
    return max(codes, default=0)


def _answers(plan: ShardingPlan, options: argparse.Namespace) -> list[Explanation]:
    return [plan.explain(*_parse_question(text)) for text in options.explain]


def _plan_as_json(
    plan: ShardingPlan, answers: Sequence[Explanation], elsewhere: Sequence[dict[str, int]], error: float | str | None
) -> dict[str, Any]:
    """The plan and the answers to what was asked: ``elsewhere``: for ``--at``; ``error``: for ``--regret``."""
    from fxshard.cli.console.plain import plain
    from fxshard.inspect import to_json

    asked: dict[str, Any] = {"explain": [plain(answer) for answer in answers]}
    asked["at"] = [plain(plan.at(**there)) for there in elsewhere]
    if error is not None:
        found = plan.regret(error)
        asked["regret"] = {**plain(found), "error": found.error, "median": found.median, "most": found.most, "proven": found.proven}
    return {**to_json(plan), **{name: answer for name, answer in asked.items() if answer}}


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    """The dynamic dims, and the sizes for which the plan is optimised."""
    from fxshard.cli.arguments.dynamic_text import parse_dynamic, parse_example_sizes

    return {"dynamic_shapes": parse_dynamic(options.dynamic), "example_sizes": parse_example_sizes(options.example_sizes)}


def _parse_question(text: str) -> tuple[str, str | None]:
    """Reads ``NAME`` or ``NAME=LAYOUT``."""
    name, equals, layout = text.rpartition("=")
    return (name, layout) if equals else (text, None)


def _compare(options: argparse.Namespace) -> None:
    read_plans(options.plans)
    mesh, plan_options = _mesh(options), _plan_options(options)
    if options.parallel is not None:
        remedy = "leave it out; --plans says which to compare"
        raise OptionError("--parallel would have no effect: each plan has its own words", remedy=remedy)
    sizes = _sizes(options)
    compare_plans(options, mesh, plan_options, _load_model(options.model), sizes)


def _diff(options: argparse.Namespace) -> None:
    from fxshard.files import read_start

    for path in (options.before, options.after):
        read_start(path, 1)
    from fxshard import api
    from fxshard.plans.sharding_plan import ShardingPlan

    with progress("comparing"):
        found = api.diff(ShardingPlan.load(options.before), ShardingPlan.load(options.after))
    if options.json:
        from fxshard.cli.console.plain import plain

        print(json.dumps(plain(found), indent=1))
    else:
        print(found)


def _export(options: argparse.Namespace) -> None:
    _check_output(options)
    mesh, plan_options = _mesh(options), _plan_options(options)
    plan = _read_plan(options) if options.plan else None
    sizes = {**_sizes(options), "even": options.even, "replan": options.replan, "aot_inductor": options.aot_inductor}
    sizes |= {"train": options.train, "optimizer": parse_optimizer(options.optimizer, options.train)}
    model, args, kwargs = _load_model(options.model)
    from fxshard import api, inspect

    with progress("exporting"):
        program = api.export(model, args, mesh, plan=plan, example_kwargs=kwargs, **sizes, **plan_options)
        program.save(options.output, options.weights)
    if options.json:
        print(json.dumps(inspect.to_json(program), indent=1))
    else:
        print(f"{inspect.summary(program)}\n\nwrote {options.output}")


def _solve(options: argparse.Namespace) -> None:
    from fxshard.cli.solve_file import solve_file

    with progress("solving"):
        text = solve_file(options.file, options.time_limit, options.output, options.json)
    print(text)


def _demo(options: argparse.Namespace) -> None:
    from fxshard.runtime.demo import main as run_demo

    run_demo(options.json)


def _check_output(options: argparse.Namespace) -> None:
    """Checks that the result can be written before computing it."""
    from fxshard.files import check_writable

    if options.output:
        check_writable(options.output)


def _plan_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a plan; unreadable ones are reported before torch and the rest of fxshard are imported."""
    from fxshard.byte_sizes import read_size

    if options.memory_limit is not None:
        read_size(options.memory_limit, "--memory-limit")
    return {
        "pins": _layouts(options.pin, "--pin", "layers.*.wq.weight=RS(0)"),
        "input_layouts": _end_layouts(options.input_layout, "--input-layout"),
        "output_layouts": _end_layouts(options.output_layout, "--output-layout"),
        "memory_limit": options.memory_limit,
        "constraints": _constraints(options),
        "objective": options.objective,
        "parallel": parse_words(options.parallel),
        "dump": options.dump,
        "cache": not options.no_cache,
    }


def _read_plan(options: argparse.Namespace) -> ShardingPlan:
    from fxshard.files import read_start

    given = {
        "--pin": options.pin,
        "--equal": options.equal,
        "--forbid": options.forbid,
        "--at-most": options.at_most,
        "--input-layout": options.input_layout,
        "--output-layout": options.output_layout,
        "--memory-limit": options.memory_limit,
        "--objective": options.objective != "time",
        "--example-sizes": options.example_sizes,
        "--parallel": options.parallel,
    }
    useless = " and ".join(name for name, value in given.items() if value)
    if useless:
        remedy = f"leave out {useless}, or leave out --plan and let a plan be made"
        raise OptionError(f"the plan of --plan is decided already, so {useless} would have no effect", remedy=remedy)
    read_start(options.plan, 1)
    from fxshard.plans.sharding_plan import ShardingPlan

    return ShardingPlan.load(options.plan)


def _load_model(text: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    from fxshard.cli.arguments.factory import load_model

    return load_model(text)


def _mesh(options: argparse.Namespace) -> Mesh:
    from fxshard.mesh.mesh import parse_mesh

    return parse_mesh(options.mesh, options.hardware)


def _layouts(texts: Sequence[str], option: str, example: str) -> dict[str, str] | None:
    """Reads ``NAME=LAYOUT`` items; the layout follows the last equals sign."""
    found: dict[str, str] = {}
    for text in texts:
        name, layout = _checked_parts(text, text.rpartition("=")[::2], option, example)
        if found.setdefault(name, layout) != layout:
            raise OptionError(f"{option} gives {name!r} {found[name]} and {layout}", remedy="give one layout for it")
    return found or None


def _end_layouts(texts: Sequence[str], option: str) -> dict[str, str] | str | None:
    """The same, or one layout for all."""
    return texts[0] if len(texts) == 1 and "=" not in texts[0] else _layouts(texts, option, "args[0]=S(0)R")


def _constraints(options: argparse.Namespace) -> list[Any]:
    from fxshard.byte_sizes import read_size

    equal = [_checked_parts(text, text.split("="), "--equal", "layers.*.wq.weight=layers.0.wq.weight") for text in options.equal]
    forbid = [_checked_parts(text, text.rpartition("=")[::2], "--forbid", "layers.*.wq.weight=S(1)@dp") for text in options.forbid]
    limits = [_checked_parts(text, text.rpartition("=")[::2], "--at-most", "dp=1GB") for text in options.at_most]
    sizes = [(axis, read_size(size, "--at-most")) for axis, size in limits]
    if not (equal or forbid or sizes):
        return []
    from fxshard.plans.constraints import Communication, Equal, Forbid

    forbidden = [(name, *layout.partition("@")[::2]) for name, layout in forbid]
    found: list[Any] = [Equal(*names) for names in equal]
    found += [Forbid(name, layout, axis=axis or None) for name, layout, axis in forbidden]
    return found + [Communication(axis, at_most=size) for axis, size in sizes]


def _checked_parts(text: str, parts: Sequence[str], option: str, example: str) -> Sequence[str]:
    if not all(parts) or len(parts) < 2:
        raise OptionError(f"cannot read {option} {text!r}", remedy=f"write it like {option} '{example}'")
    return parts


if __name__ == "__main__":
    sys.exit(main())
