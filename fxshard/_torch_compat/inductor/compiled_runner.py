"""Private names of torch (2.13): an operator that runs compiled models without Python's lock.

torch's own binding of the loader holds the lock while a model runs. A thread of gloo that frees a tensor which Python has seen waits for
the lock, and the model for that thread: ranks would wait for ever, and heartbeats stop. The dispatcher lets go of the lock around
operators.

What would replace it: a binding of ``AOTIModelPackageLoader`` that lets go of the lock.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

SOURCE = """
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/library.h>
#include <deque>

static std::deque<torch::inductor::AOTIModelPackageLoader> models;

int64_t load(const std::string& package, const std::string& name, int64_t device) {
  models.emplace_back(package, name, false, 1, static_cast<c10::DeviceIndex>(device));
  return models.size() - 1;
}

std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, int64_t model) { return models.at(model).run(inputs); }

TORCH_LIBRARY(fxshard_compiled, library) {
  library.def("load(str package, str name, int device) -> int", load);
  library.def("run(Tensor[] inputs, int model) -> Tensor[]", run);
}
"""


@functools.cache
def build_runner() -> bytes:
    """The shared library with the operator; takes ten to twenty seconds, once per process. Raises RuntimeError if it cannot be built."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils.cpp_extension import include_paths

    torch_libraries = str(Path(torch.__file__).parent / "lib")
    with tempfile.TemporaryDirectory(prefix="fxshard.") as folder:
        source, library = Path(folder, "runner.cpp"), Path(folder, "runner.so")
        source.write_text(SOURCE)
        flags = ["-shared", "-fPIC", "-O1", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        inputs = [*(f"-I{path}" for path in include_paths()), str(source), f"-L{torch_libraries}", "-ltorch_cpu", "-lc10"]
        ran = subprocess.run([*get_cpp_compiler().split(), *flags, *inputs, "-o", str(library)], capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(ran.stderr)
        return library.read_bytes()


def load_runner(library: bytes) -> Any:
    """The namespace of operators ``load`` and ``run``; loads ``library`` unless this process has one. Raises OSError if it cannot."""
    found: Any = torch.ops.fxshard_compiled
    if not hasattr(found, "run"):
        with tempfile.TemporaryDirectory(prefix="fxshard.") as folder:
            path = Path(folder, "runner.so")
            path.write_bytes(library)
            torch.ops.load_library(path)
    return found
