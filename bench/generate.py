"""``python -m bench.generate``: the time of 64 tokens of greedy ``generate()`` with a two-layer Hugging Face Llama, sharded over two gloo
ranks and relative to eager execution on one device. Compiling is not counted. Both run in turns, in one run, with one thread per rank.

``--width`` of the model (default 256), ``--by-heads`` shards the cache by heads, ``--rounds``.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard

RANKS, TOKENS, LAYERS = 2, 64, 2
BY_HEADS = {"*.keys": "S(1)", "*.values": "S(1)"}


def llama(width: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 8, "num_key_value_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=1024, max_position_embeddings=256, **ends)).eval()


def rank(index: int, folder: str, width: int, by_heads: bool, rounds: int) -> None:
    torch.set_num_threads(1)
    logging.getLogger("fxshard").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=index, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    plain, prompt = llama(width), torch.arange(1, 33).view(2, 16)
    layouts = {"output_layouts": BY_HEADS} if by_heads else {}
    start = time.perf_counter()
    sharded: Any = fxshard.parallelize(copy.deepcopy(plain), (prompt,), mesh, train=False, **layouts)

    def tokens(model: Any) -> Callable[[], torch.Tensor]:
        static = {"cache_implementation": "static", "disable_compile": True}
        return lambda: model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, **static)

    same = torch.equal(tokens(sharded)(), tokens(plain)())
    compiling = time.perf_counter() - start
    times: dict[str, list[float]] = {"eager": [], "sharded": []}
    for _ in range(rounds):
        dist.barrier()
        if index == 0:
            times["eager"].append(_seconds(tokens(plain)))
        dist.barrier()
        times["sharded"].append(_seconds(tokens(sharded)))
    if index == 0:
        eager, ours = (statistics.median(times[name]) for name in ("eager", "sharded"))
        programs = len(sharded.forward.programs)
        print(f"{TOKENS} tokens, width {width}: {ours:.3f} s on {RANKS} ranks, {eager:.3f} s eager on one device: {ours / eager:.2f} times")
        print(f"the same tokens: {same}; {programs} programs, made in {compiling:.0f} s; in a decoding step")
        for one in sharded.forward.programs[-1].collectives:
            print(f"  {one.kind} of {one.bytes:,} bytes over {one.axis}")
    dist.destroy_process_group()


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--by-heads", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (str(Path(folder)), given.width, given.by_heads, given.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
