"""Private names of torch (2.13) and Triton: the kernels, calls and collectives in a wrapper that Inductor wrote, and their machine code.

What would replace it: a report of compiled kernels from Inductor.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', r?'''(.*?)'''", re.DOTALL)
CALL = re.compile(r"(?<![\w.])(extern_kernels\.\w+|torch\.ops\.\w+\.\w+(?:\.\w+)?)\(")
LAUNCH = re.compile(r"(?<![\w.])(\w+)\.run\(")
KINDS = {"poi": "pointwise", "red": "reduction", "per": "persistent reduction", "tem": "template", "for": "foreach", "split": "scan"}
"""The second word of the name that Inductor gives a kernel, after ``triton``, -> its kind."""
USERS = "user's"
USED = re.compile(r"Used (\d+) registers")
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class MachineCode:
    """A kernel in one configuration: registers a thread, bytes spilled a thread (stores and loads), bytes of shared memory a block, bytes
    of machine code (the cubin)."""

    name: str
    config: str
    registers: int
    spilled: int
    shared_memory: int
    code: int

    @property
    def kind(self) -> str:
        first, second, *_ = [*self.name.split("_"), ""]
        return KINDS.get(second, USERS) if first == "triton" else USERS


def kernel_sources(wrapper: str) -> dict[str, str]:
    """The Triton source of each kernel in a wrapper, by name."""
    return {name: body.replace("\\'\\'\\'", "'''") for name, body in KERNEL.findall(wrapper)}


def calls_in_order(wrapper: str) -> list[tuple[str, str]]:
    """(name, line of code) of each launch and each call of a library or collective, in the order of execution."""
    found = []
    for line in _body(wrapper):
        text = line.split("#", 1)[0]
        for pattern in (CALL, LAUNCH):
            found += [(match.group(1), text.strip()) for match in pattern.finditer(text)]
    return found


def _body(wrapper: str) -> Iterator[str]:
    """The lines of the function that runs a graph, and of those that run its subgraphs."""
    inside, depth = False, 0
    for line in wrapper.splitlines():
        indent = len(line) - len(line.lstrip())
        if re.match(r"\s*def (call|partition_\d+|\w*subgraph\w*|\w*repeat\w*)\(", line):
            inside, depth = True, indent
        elif inside and line.strip() and indent <= depth:
            inside = False
        elif inside:
            yield line


def machine_code(name: str, source: str, every_config: bool = False) -> list[MachineCode]:
    """Compiles a kernel to machine code, in the first of the configurations that Inductor would try on the GPU, or in all of them.

    Raises what Triton and its assembler raise.
    """
    tuner = _tuner(name, source)
    return [_compiled(name, tuner, config) for config in tuner.configs[: None if every_config else 1]]


def _tuner(name: str, source: str) -> Any:
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(source)
    try:
        spec = importlib.util.spec_from_file_location(name, file.name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        kernel.fn.src  # noqa: B018  (Triton reads the file when it is asked, so before it is deleted)
        return kernel
    finally:
        Path(file.name).unlink()


def _compiled(name: str, tuner: Any, config: Any) -> MachineCode:
    binary = tuner._precompile_config(config).kernel
    registers, spilled = _resources(binary.asm["ptx"], binary.metadata.target.arch)
    words = ", ".join(f"{key} {value}" for key, value in config.kwargs.items())
    return MachineCode(name, f"{words}, warps {config.num_warps}", registers, spilled, binary.metadata.shared, len(binary.asm["cubin"]))


def _resources(ptx: str, arch: int) -> tuple[int, int]:
    """Registers a thread, and bytes that it spills, as NVIDIA's assembler says."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability  # type: ignore[import-not-found]  # no requirement

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", str(source), "-o", str(source) + ".o"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used, spilled = USED.search(said), SPILLED.search(said)
    return int(used.group(1)) if used else 0, sum(map(int, spilled.groups())) if spilled else 0
