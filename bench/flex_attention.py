"""One training step of attention with masks of one's own: the node beside single operators, in seconds and in memory.

    python -m bench.flex_attention

Each case runs in a process of its own, on one core; memory is what the step adds to the largest size of the process.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat.flex_attention import graph_of_mod
from fxshard.ops.flex.functions import IDENTITY, function_text
from fxshard.text_table import fitted

TOKENS, HEADS, HEAD_DIM = 4096, 4, 64
DOCUMENTS = torch.arange(TOKENS) // 512
MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 256),
    "documents": lambda b, h, q, k, documents: (documents[q] == documents[k]) & (q >= k),
}


def node(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tensors = [DOCUMENTS] if name == "documents" else []
    text = function_text(graph_of_mod(MASKS[name], [*(torch.zeros((), dtype=torch.int64) for _ in range(4)), *tensors]))
    out: Tensor = torch.ops.fxshard.flex_attention(q, k, v, [], tensors, None, None, None, IDENTITY, text, HEAD_DIM**-0.5)[0]
    return out


def single(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(TOKENS)
    kept = MASKS[name](0, 0, place[:, None], place, *([DOCUMENTS] if name == "documents" else []))
    return (q @ k.mT * HEAD_DIM**-0.5).masked_fill(~kept, -torch.inf).softmax(-1) @ v


def measure(form: str, name: str) -> str:
    """Seconds and megabytes of a forward and backward, as text."""
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, HEADS, TOKENS, HEAD_DIM, requires_grad=True) for _ in range(3))
    before, begin = _peak(), time.perf_counter()
    {"node": node, "single operators": single}[form](name, q, k, v).sum().backward()
    return f"{time.perf_counter() - begin:.1f} s, {(_peak() - before) // 1024} MB"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    if len(sys.argv) > 1:
        print(measure(*sys.argv[1:]))
        return
    forms = ["single operators", "node"]
    rows = [[name, *(_in_a_process(form, name) for form in forms)] for name in MASKS]
    print(fitted(rows, ["mask", *forms]))


def _in_a_process(form: str, name: str) -> str:
    run = subprocess.run([sys.executable, "-m", "bench.flex_attention", form, name], check=True, capture_output=True, text=True)
    return run.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
