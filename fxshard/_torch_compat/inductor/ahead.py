"""Private names of torch (2.13): graphs compiled to shared libraries by AOTInductor, and their loader.

What would replace it: a public function that compiles an aten graph with collectives, rather than an ``ExportedProgram``, and a public
loader of one model.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxshard._torch_compat.inductor import pack
from fxshard._torch_compat.inductor.compiled_runner import load_runner
from fxshard._torch_compat.inductor.inductor import any_size

if TYPE_CHECKING:
    from torch import fx

OPTIONS = {"aot_inductor.package": True, "aot_inductor.embed_kernel_binary": True}
"""Embedded: the code of CUDA kernels is in the library, not in files beside it."""
NO_CALLS = b'{"nodes": []}'
"""What AOTInductor would write for a graph without such calls, for which it writes nothing."""


def compile_ahead(module: fx.GraphModule) -> tuple[bytes, bytes, dict[str, str]]:
    """(shared library, calls of operators as JSON, metadata) of an aten graph on fake tensors, whose placeholders have their values.

    The groups that its collectives name must be registered (``group_names``). Changes ``module``.
    """
    from torch._guards import detect_fake_mode
    from torch._inductor import aot_compile

    pack.register()
    pack.pack_in_place(module.graph)
    module.recompile()
    inputs = tuple(n.meta["val"] for n in module.graph.nodes if n.op == "placeholder")
    mode = detect_fake_mode(inputs)
    with any_size(None if mode is None else mode.shape_env), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about calls of its own
        files = [Path(str(one)) for one in aot_compile(module, inputs, options=OPTIONS)]
    ends = (".wrapper.so", ".wrapper.json", ".wrapper_metadata.json")
    library, calls, said = (next((one.read_bytes() for one in files if one.name.endswith(end)), NO_CALLS) for end in ends)
    return library, calls, json.loads(said)


@contextlib.contextmanager
def group_names(sizes: Mapping[str, int]) -> Iterator[None]:
    """Within it, torch knows groups of these names and sizes, of which it asks only the size; without a process group."""
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _unregister_process_group

    make: Any = ProcessGroup
    groups = {name: make(0, size) for name, size in sizes.items()}  # the registry does not keep them alive
    registered: list[str] = []
    try:
        for name, group in groups.items():
            _register_process_group(name, group)
            registered.append(name)
        yield
    finally:
        for name in registered:
            _unregister_process_group(name)


def load_model(
    files: Mapping[str, bytes], name: str, runner: bytes, device_index: int = -1
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """A function of a list of tensors, which it empties, from the entries of a compiled package; ``name``: the model to load. ``runner``:
    from ``build_runner``.

    Runs the libraries' own code. Raises RuntimeError or OSError if they cannot be loaded.
    """
    operators = load_runner(runner)
    with tempfile.TemporaryDirectory(prefix="fxshard.") as folder:
        for entry, data in files.items():
            path = Path(folder) / entry
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        model = operators.load(folder, name, device_index)

    run_model = operators.run.default

    def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        results: Sequence[torch.Tensor] = run_model(inputs, model)
        inputs.clear()
        return results

    return run
