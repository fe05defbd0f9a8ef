"""``fxshard run PROGRAM.pt2``: runs an exported program on the ranks that torchrun started, or simulated in this process."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fxshard.cli.console.commands import add_command
from fxshard.errors import FileError, OptionError, closest, count_text

if TYPE_CHECKING:
    import torch

    from fxshard.mesh.mesh import Mesh
    from fxshard.runtime.exported import ExportedProgram

COMPILERS = "default: inductor; aot_inductor runs the machine code in the file, if fxshard export --aot-inductor wrote it"
CHOICES = ("inside", "per-rank", "none")


def add_run(commands: Any) -> None:
    about = (
        "Runs a program that fxshard export wrote, on whole tensors from a safetensors file, named like the program's inputs: args[0], "
        "kwargs['mask'], or mask. Start it with torchrun, one process per rank of the mesh, or with --simulate."
    )
    ranks = "torchrun --nproc-per-node 4 -m fxshard run model.pt2 --inputs in.safetensors -o out.safetensors"
    example = f"fxshard run model.pt2 --inputs in.safetensors --simulate\n  {ranks}"
    help = "run an exported program under torchrun, or simulated in one process"
    run = add_command(commands, "run", help, example, about, json="shapes, dtypes and single values")
    run.add_argument("program", metavar="PROGRAM.pt2", help="a file that fxshard export wrote")
    run.add_argument("--inputs", required=True, metavar="IN.safetensors", help="the inputs, whole tensors by name")
    run.add_argument("--weights", metavar="W.safetensors", help="whole weights by the model's names, for a program without weights")
    run.add_argument("-o", "--output", metavar="OUT.safetensors", help="write the outputs here, whole tensors by name")
    run.add_argument("--mesh", metavar="AXES", help="run on this mesh, for example dp=2,tp=4 (default: the program's)")
    run.add_argument("--simulate", action="store_true", help="run all ranks in this process")
    run.add_argument("--compiler", choices=("inductor", "eager", "aot_inductor"), default="inductor", help=COMPILERS)
    run.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    run.set_defaults(command=run_program)


def add_weights(export: argparse.ArgumentParser) -> None:
    said = "where the weights go: inside the file, into one safetensors file per rank beside it, or nowhere (default: inside)"
    export.add_argument("--weights", choices=CHOICES, default=CHOICES[0], help=said)
    export.add_argument("--replan", action="store_true", help="keep the planning graph in the file: it then runs on any mesh")

    said = "compile the program too, for DEVICE or where the command runs: for fxshard run --compiler aot_inductor, and for C++"
    export.add_argument("--aot-inductor", nargs="?", const=True, default=False, choices=("cpu", "cuda"), metavar="DEVICE", help=said)


def run_program(options: argparse.Namespace) -> None:
    from fxshard.files import check_writable, read_start

    for path in (options.program, options.inputs, *([options.weights] if options.weights else ())):
        read_start(path, 1)
    if options.output:
        check_writable(options.output)
    if not options.simulate and "WORLD_SIZE" not in os.environ:
        remedy = "start it with torchrun --nproc-per-node N -m fxshard run ..., N ranks as the mesh has, or give --simulate"
        raise OptionError("fxshard run needs the ranks of the program's mesh", remedy=remedy)
    import fxshard
    from fxshard.mesh.mesh import parse_mesh

    program = fxshard.load(options.program)
    mesh = parse_mesh(options.mesh, program.mesh.hardware) if options.mesh else program.mesh
    args, kwargs = call_of(program, read_tensors(options.inputs), options.inputs)
    weights = read_tensors(options.weights) if options.weights else None
    run = simulated if options.simulate else on_ranks
    named = run(program, mesh, args, kwargs, weights, options)
    if named is None:
        return
    if options.output:
        write_tensors(named, options.output)
    if options.json:
        print(json.dumps({name: _described(value) for name, value in named.items()}, indent=1))
        return
    for name, value in named.items():
        print(f"{name}: {list(value.shape)} {value.dtype}" + (f", {value.item()}" if value.numel() == 1 else ""))
    if options.output:
        print(f"wrote {options.output}")


def _described(value: torch.Tensor) -> dict[str, Any]:
    said = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    return said | ({"value": value.item()} if value.numel() == 1 else {})


def simulated(
    program: ExportedProgram, mesh: Mesh, args: Any, kwargs: Any, weights: Any, options: argparse.Namespace
) -> dict[str, torch.Tensor]:
    import fxshard

    if (mesh.shape, mesh.axis_names) != (program.mesh.shape, program.mesh.axis_names):
        program = program.replan(mesh)
    return named_outputs(fxshard.simulate(program, args, kwargs=kwargs, weights=weights).outputs)


def on_ranks(
    program: ExportedProgram, mesh: Mesh, args: Any, kwargs: Any, weights: Any, options: argparse.Namespace
) -> dict[str, torch.Tensor] | None:
    """The outputs on the first rank, None on the others."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

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
        bound = program.for_mesh(device_mesh, hardware=mesh.hardware).bind(device_mesh, weights, compiler=options.compiler)
        named = named_outputs(bound(*args, **kwargs))
        whole = {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu() for name, v in named.items()}
        return whole if dist.get_rank() == 0 else None
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
