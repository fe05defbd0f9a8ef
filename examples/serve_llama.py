"""Generates text with a Llama on several processes or GPUs, by Hugging Face's generate(), and compares the tokens with one device's.

torchrun --nproc-per-node 2 examples/serve_llama.py
torchrun --nproc-per-node 8 examples/serve_llama.py --device cuda --layers 32 --tokens 256
"""

from __future__ import annotations

import argparse
import copy
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import fxshard


class Bar(BaseStreamer):
    """A progress bar with one tick for each token; generate() first shows it the prompt."""

    def __init__(self, tokens: int) -> None:
        self.bar = tqdm(total=tokens, desc="tokens", disable=True if dist.get_rank() else None)  # None: on a terminal only
        self.put = lambda _: self.bar.update(self.bar.n < self.bar.total)

    def end(self) -> None:
        self.bar.close()


def llama(layers: int) -> LlamaForCausalLM:
    """A small Llama with random weights. For real ones, use LlamaForCausalLM.from_pretrained on every rank."""
    torch.manual_seed(0)  # the same weights on all ranks
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024}
    no_ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **no_ends, num_hidden_layers=layers)).eval()


def generate(model: LlamaForCausalLM, prompt: torch.Tensor, tokens: int, what: str, **options: object) -> torch.Tensor:
    """The generated tokens, [1, tokens]."""
    start = time.perf_counter()
    found = model.generate(prompt, max_new_tokens=tokens, do_sample=False, **options)[:, prompt.shape[1] :]
    if dist.get_rank() == 0:
        print(f"{what}: {tokens / (time.perf_counter() - start):.1f} tokens/s, {found[0, :8].tolist()} ...", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--compiler", default="inductor", help="inductor, or eager: starts at once, runs slower")
    options = parser.parse_args()

    mesh = init_device_mesh(options.device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    one_device = llama(options.layers).to(options.device)
    prompt = torch.randint(0, 1024, (1, 16), generator=torch.Generator().manual_seed(0)).to(options.device)
    model = fxshard.parallelize(
        copy.deepcopy(one_device),
        (prompt,),
        mesh,
        train=False,
        compiler=options.compiler,
        parallel={"tp": fxshard.TensorParallel()},  # no matrix is whole on a rank
        output_layouts={"*.keys": "S(1)", "*.values": "S(1)"},  # the cache is sharded by heads, and stays so
    )
    how = {"cache_implementation": "static", "disable_compile": True}  # disable_compile: the model is compiled already
    generate(model, prompt, options.tokens, f"{mesh.size()} ranks, first run compiles", **how, streamer=Bar(options.tokens))
    found = generate(model, prompt, options.tokens, f"{mesh.size()} ranks", **how)
    if dist.get_rank() == 0:
        want = generate(one_device, prompt, options.tokens, "one device")
        print("the tokens are one device's" if torch.equal(found, want) else "THE TOKENS DIFFER FROM ONE DEVICE'S")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
