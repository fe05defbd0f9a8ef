"""``fxshard run PROGRAM.pt2``: runs an exported program on the ranks that torchrun started, or simulated in this process."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxshard.cli.console.commands import add_command
from fxshard.errors import FileError, OptionError, closest, count_text

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

    from fxshard.mesh.mesh import Mesh
    from fxshard.runtime.exported import ExportedProgram
    from fxshard.runtime.measure.profile import StepProfile

COMPILERS = "default: inductor; aot_inductor runs the machine code in the file, if fxshard export --aot-inductor wrote it"
CHOICES = ("inside", "per-rank", "none")


def add_run(commands: Any) -> None:
    about = (
        "Runs a program that fxshard export wrote, on whole tensors from a safetensors file, named like the program's inputs: args[0] for "
        "positional arguments, kwargs['mask'] or mask for keywords. Start it with torchrun, one process per rank of the mesh, or with "
        "--simulate."
    )
    ranks = "torchrun --nproc-per-node 4 -m fxshard run model.pt2 --inputs in.safetensors -o out.safetensors"
    example = f"fxshard run model.pt2 --inputs in.safetensors --simulate\n  {ranks}"
    help = "run an exported program under torchrun, or simulated in one process"
    run = add_command(commands, "run", help, example, about, json="shapes, dtypes and single values")
    run.add_argument("program", metavar="PROGRAM.pt2", help="a file that fxshard export wrote")
    run.add_argument("--inputs", required=True, metavar="IN.safetensors", help="the inputs, whole tensors by name")
    run.add_argument("--weights", metavar="W.safetensors", help="whole weights by the model's names, for a program without weights")
    updated = "write the whole weights here as the step has changed them, the optimizer's state too, for --weights of the next step"
    run.add_argument("--updated-weights", metavar="W.safetensors", help=updated)
    run.add_argument("-o", "--output", metavar="OUT.safetensors", help="write the outputs here, whole tensors by name")
    run.add_argument("--mesh", metavar="AXES", help="run on this mesh, for example dp=2,tp=4 (default: the program's)")
    run.add_argument("--simulate", action="store_true", help="run all ranks in this process")
    run.add_argument("--compiler", choices=("inductor", "eager", "aot_inductor"), default="inductor", help=COMPILERS)
    profile = "measure a step of the first rank, and write it beside the predicted one, as a trace for Perfetto (ui.perfetto.dev)"
    run.add_argument("--profile", metavar="TRACE.json", help=profile)
    seed_help = "of the program's random numbers, on all ranks and simulated; each step of a training needs its own (default: 0)"
    run.add_argument("--seed", type=_seed, default=0, metavar="N", help=seed_help)
    run.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    run.set_defaults(command=run_program)


def _seed(text: str) -> int:
    """As ``torch.manual_seed`` takes it."""
    if not text.isdecimal() or len(text) > 19 or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 0 to 2^63 - 1")
    return int(text)


def add_weights(export: argparse.ArgumentParser) -> None:
    said = "where the weights go: inside the file, into one safetensors file per rank beside it, or nowhere (default: inside)"
    export.add_argument("--weights", choices=CHOICES, default=CHOICES[0], help=said)
    export.add_argument("--train", action="store_true", help="write a training program: its weights get gradients")
    step = "make each call of it a whole step of sgd, adam or adamw, for example adamw:lr=1e-3,betas=(0.9,0.95)"
    export.add_argument("--optimizer", metavar="NAME[:OPTION=VALUE,...]", help=f"with --train: {step}")
    export.add_argument("--replan", action="store_true", help="keep the planning graph in the file: it then runs on any mesh")

    said = "compile the program too, for DEVICE or where the command runs: for fxshard run --compiler aot_inductor, and for C++"
    export.add_argument("--aot-inductor", nargs="?", const=True, default=False, choices=("cpu", "cuda"), metavar="DEVICE", help=said)


def run_program(options: argparse.Namespace) -> None:
    from fxshard.files import check_writable, read_start

    for path in (options.program, options.inputs, *([options.weights] if options.weights else ())):
        read_start(path, 1)
    for path in _outputs(options):
        check_writable(path)
    if options.simulate and options.profile:
        remedy = "start it with torchrun instead, one process per rank of the mesh"
        raise OptionError("--simulate runs all ranks in one process, whose times are not a rank's", where="--profile", remedy=remedy)
    if not options.simulate and "WORLD_SIZE" not in os.environ:
        remedy = f"start it with torchrun --nproc-per-node {_ranks(options)} -m fxshard run ..., or give --simulate"
        raise OptionError("fxshard run needs a process for each rank of the mesh", remedy=remedy)
    import torch

    import fxshard
    from fxshard.mesh.mesh import parse_mesh

    torch.manual_seed(options.seed)
    program = fxshard.load(options.program)
    if options.profile and options.compiler == "aot_inductor" and program.collectives:
        what = "AOTInductor's code waits for collectives without an event for the profiler, so their waits cannot be measured"
        raise OptionError(what, where="--profile", remedy="give --compiler inductor or eager")
    mesh = parse_mesh(options.mesh, program.mesh.hardware) if options.mesh else program.mesh
    args, kwargs = call_of(program, read_tensors(options.inputs), options.inputs)
    weights = read_tensors(options.weights) if options.weights else None
    if options.updated_weights and not changes(program):
        remedy = "export with --train --optimizer adamw:lr=1e-3, or leave --updated-weights out"
        raise OptionError("the program changes none of its weights", where="--updated-weights", remedy=remedy)
    run = simulated if options.simulate else on_ranks
    found = run(program, mesh, args, kwargs, weights, options)
    if found is None:
        return
    named, updated, profile = found
    written = {path: tensors for path, tensors in ((options.output, named), (options.updated_weights, updated)) if path}
    for path, tensors in written.items():
        write_tensors(tensors, path)
    if profile is not None:
        profile.save(options.profile)
    if options.json:
        print(json.dumps({name: _described(value) for name, value in named.items()}, indent=1))
        return
    for name, value in named.items():
        print(f"{name}: {list(value.shape)} {value.dtype}" + (f", {value.item()}" if value.numel() == 1 else ""))
    if profile is not None:
        print(f"\n{profile}\n\nwrote {options.profile}; open it at ui.perfetto.dev or chrome://tracing")
    for path in written:
        print(f"wrote {path}")


def _ranks(options: argparse.Namespace) -> int:
    """The number of ranks that are needed, found without torch if the file is not damaged."""
    from fxshard.cli.inspect_file import stored
    from fxshard.mesh.mesh import parse_mesh
    from fxshard.views.stored import DAMAGE

    file = stored(options.program)
    try:
        return parse_mesh(options.mesh).size if options.mesh else math.prod(file.view.axes.values())
    except DAMAGE:
        return int(file.plan.mesh.size)


def _outputs(options: argparse.Namespace) -> list[str]:
    """The files that the command is to write; raises OptionError if two options name one file."""
    given = {"--output": options.output, "--updated-weights": options.updated_weights, "--profile": options.profile}
    named: dict[Path, str] = {}
    for option, path in given.items():
        if path and (first := named.setdefault(Path(path).resolve(), option)) != option:
            remedy = "give each a file of its own"
            raise OptionError(f"{first} and {option} name the same file, {path}", where=option, remedy=remedy)
    return [path for path in given.values() if path]


def changes(program: ExportedProgram) -> bool:
    """Whether a call changes parameters or buffers."""
    return any(end.kind == "mutation" for end in program.outputs)


def _described(value: torch.Tensor) -> dict[str, Any]:
    said = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    return said | ({"value": value.item()} if value.numel() == 1 else {})


def simulated(
    program: ExportedProgram, mesh: Mesh, args: Any, kwargs: Any, weights: Any, options: argparse.Namespace
) -> tuple[Tensors, Tensors, None]:
    """(outputs, updated weights if they are to be written, no profile)."""
    import fxshard
    from fxshard.archive.weights import select_weights

    if (mesh.shape, mesh.axis_names) != (program.mesh.shape, program.mesh.axis_names):
        program = program.replan(mesh)
    result = fxshard.simulate(program, args, kwargs=kwargs, weights=weights)
    held = select_weights(program, weights or program.whole_weights) | result.mutations if options.updated_weights else {}
    return named_outputs(result.outputs), held, None


def on_ranks(
    program: ExportedProgram, mesh: Mesh, args: Any, kwargs: Any, weights: Any, options: argparse.Namespace
) -> tuple[Tensors, Tensors, StepProfile | None] | None:
    """(outputs, updated weights if they are to be written, the profile of one more step if asked for) on the first rank, else None."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    from fxshard.runtime.measure.profile import profile_step
    from fxshard.runtime.simulate.values import sizes_of_call

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    started = int(os.environ["WORLD_SIZE"])
    if started != mesh.size:
        remedy = f"start it with torchrun --nproc-per-node {mesh.size}, or give --mesh"
        raise OptionError(f"the program is for mesh {mesh}, {count_text(mesh.size, 'rank')}; {started} run", remedy=remedy)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        device_mesh = init_device_mesh(device, mesh.shape, mesh_dim_names=mesh.axis_names)
        placed = program.for_mesh(device_mesh, hardware=mesh.hardware)
        bound = placed.bind(device_mesh, weights, compiler=options.compiler)
        named, first = named_outputs(bound(*args, **kwargs)), dist.get_rank() == 0

        def whole(tensors: Tensors) -> Tensors:
            """On the first rank; a weight is put together on all of them, one after another."""
            found = ((name, v.full_tensor() if isinstance(v, DTensor) else v) for name, v in tensors.items())
            return {name: value.detach().to("cpu", copy=True) for name, value in found if first}

        outputs, updated = whole(named), whole(bound.state_dict() if options.updated_weights else {})
        if not options.profile:
            return (outputs, updated, None) if first else None
        profile = profile_step(lambda: bound(*args, **kwargs), placed, sizes=sizes_of_call(placed, args, kwargs))
        return (outputs, updated, profile) if first else None
    finally:
        dist.destroy_process_group()


def call_of(program: ExportedProgram, given: Mapping[str, torch.Tensor], file: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call: tensors from a file, by the program's names for them or their last keys, and the program's constants."""
    from fxshard._torch_compat import pytree
    from fxshard.shapes.arguments import path_name

    places = pytree.tree_unflatten(list(range(program.in_spec.num_leaves)), program.in_spec)
    paths = [path_name(path) for path, _ in pytree.tree_flatten_with_path(places)[0]]
    short = {_short(path): path for path in reversed(paths)}
    named = {short.get(name, name) if name not in paths else name: value for name, value in given.items()}
    inputs = [path for path in paths if path not in program.constants]
    for name in sorted(set(named) - set(inputs)):
        remedy = f"the inputs of the program are {', '.join(inputs)}"
        raise FileError(f"the program has no input {name!r}{closest(name, inputs)}", where=file, remedy=remedy)
    for path in inputs:
        if path not in named:
            raise FileError(f"there is no tensor {path!r} for the program", where=file, remedy="add it under this name")
    leaves = [program.constants[path] if path in program.constants else named[path] for path in paths]
    args, kwargs = pytree.tree_unflatten(leaves, program.in_spec)
    return tuple(args), dict(kwargs)


def _short(path: str) -> str:
    """``mask`` for ``kwargs['mask']``; other paths unchanged."""
    return path[8:-2] if path.startswith("kwargs['") and path.endswith("']") and "[" not in path[8:-2] else path


def named_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    """The tensors among a program's outputs by their paths: ``outputs['logits']``; a single one is ``outputs``."""
    import torch

    from fxshard._torch_compat import pytree

    paths = pytree.tree_flatten_with_path(outputs)[0]
    return {"outputs" + pytree.keystr(path): value for path, value in paths if isinstance(value, torch.Tensor)}


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name; raises FileError for any other file."""
    import safetensors
    import safetensors.torch

    try:
        return safetensors.torch.load_file(path)
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise FileError(f"the file cannot be read as safetensors: {error}", where=path, remedy="write it with safetensors") from error


def write_tensors(named: Mapping[str, torch.Tensor], path: str) -> None:
    import safetensors.torch

    from fxshard.files import atomic_file

    with atomic_file(path) as temporary:
        safetensors.torch.save_file({name: value.detach().clone().contiguous() for name, value in named.items()}, temporary)
