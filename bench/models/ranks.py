"""Models on two gloo ranks: a training step by ``fxshard.parallelize`` and one through ``torch.compile(backend="fxshard")``, ``generate()``
where the model has it, each beside one device in float64."""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

Record = dict[str, Any]
NAMES = ("llama", "gpt2", "phi3", "bert", "t5", "vit", "resnet", "mixtral", "mamba", "peft lora llama")
SECONDS = 600.0
"""Until the processes of a model are stopped."""


def check(name: str) -> Record:
    """``parallelize``, ``backend``, ``generate`` -> "", the error, or None if the model has no ``generate``; ``seconds`` for all of it."""
    began = time.perf_counter()
    context = mp.get_context("spawn")
    with TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(name, rank, folder), daemon=True) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, began + SECONDS - time.perf_counter()))
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        found = {way: _said(Path(folder), way) for way in WAYS}
    return {"key": name, **found, "seconds": time.perf_counter() - began}


def _rank(name: str, rank: int, folder: str) -> None:
    from bench.models.run import prepare

    prepare()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS))
    for way, compare in WAYS.items():
        torch._dynamo.reset()
        try:
            said = compare(name)
        except BaseException:
            said = traceback.format_exc()
        Path(folder, f"{way}.{rank}").write_text("none" if said is None else said)
        dist.barrier()
    dist.destroy_process_group()


def _said(folder: Path, way: str) -> str | None:
    for rank in range(2):
        path = folder / f"{way}.{rank}"
        if not path.exists():
            return f"rank {rank} did not finish"
        said = path.read_text()
        if said:
            return None if said == "none" else f"rank {rank}: {said.strip().splitlines()[-1]}"
    return ""


def _parallelized(name: str) -> str:
    import fxshard
    from bench.models.catalogue import make
    from bench.models.check import SLOW

    model, args, kwargs = make(name)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    options = {"hardware": SLOW, "compiler": "eager", "timeout": 120.0}
    sharded = fxshard.parallelize(copy.deepcopy(model), args, mesh, example_kwargs=kwargs, **options)
    return _compare(sharded, model, args, kwargs)


def _compiled(name: str) -> str:
    from bench.models.catalogue import make
    from bench.models.check import SLOW

    model, args, kwargs = make(name)
    options = {"hardware": SLOW, "compiler": "eager", "timeout": 120.0}
    return _compare(torch.compile(copy.deepcopy(model), backend="fxshard", options=options), model, args, kwargs)


def _generated(name: str) -> str | None:
    """The tokens of one device, from a prompt of five."""
    import fxshard
    from bench.models.catalogue import make
    from bench.models.check import SLOW, plain_copy

    model, _, kwargs = make(name)
    decoder = next((m for m in model.modules() if callable(getattr(m, "generate", None)) and _can_generate(m)), None)
    if decoder is None:
        return None
    decoder = decoder.eval()
    prompt = kwargs["input_ids"][:, :5]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    options = {"hardware": SLOW, "compiler": "eager", "timeout": 120.0, "train": False}
    given = (
        {"input_ids": prompt, "decoder_input_ids": prompt}
        if getattr(decoder.config, "is_encoder_decoder", False)
        else {"input_ids": prompt}
    )
    sharded: Any = fxshard.parallelize(copy.deepcopy(decoder), (), mesh, example_kwargs=given, **options)
    steps = {"max_new_tokens": 6, "do_sample": False}
    want, there = plain_copy(decoder).generate(prompt, **steps), sharded.generate(prompt, **steps)
    return "" if torch.equal(want, there) else f"generate: {there.tolist()} instead of {want.tolist()}"


def _can_generate(module: nn.Module) -> bool:
    return bool(getattr(module, "can_generate", lambda: False)())


def _compare(sharded: Any, model: nn.Module, args: Any, kwargs: Any) -> str:
    """The largest difference of outputs and gradients, if it exceeds 1e-9 of their norm."""
    from bench.models.check import plain_copy

    there, want = _step(sharded, args, kwargs), _step(plain_copy(model), args, kwargs)
    missing = set(want) ^ set(there)
    if missing:
        return f"on one side only: {', '.join(sorted(missing))}"
    noise = 1e-6 * float(torch.stack([value.norm() for value in want.values()]).norm())
    for name, value in want.items():
        error = float((there[name] - value).norm())
        if not error <= 1e-9 * max(float(value.norm()), noise):
            return f"{name} is off by {error:.3g}, its norm is {float(value.norm()):.3g}"
    return ""


def _step(model: Any, args: Any, kwargs: Any) -> dict[str, Tensor]:
    outputs = [x for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
    sum(x.sum() for x in outputs if x.requires_grad).backward()
    found = {f"output {i}": _whole(x) for i, x in enumerate(outputs)}
    names = ((n.removeprefix("_orig_mod."), p) for n, p in model.named_parameters())
    return found | {f"gradient of {n}": _whole(p.grad) for n, p in names if p.grad is not None}


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


WAYS: dict[str, Callable[[str], str | None]] = {"parallelize": _parallelized, "backend": _compiled, "generate": _generated}
