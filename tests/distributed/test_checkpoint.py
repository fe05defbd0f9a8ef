"""A run saved on one mesh continues on another mesh or on one device, bit for bit: parameters, optimizer state, later steps."""

from __future__ import annotations

import functools
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard.errors import RunError
from fxshard.layout.layouts import Layout
from fxshard.runtime.checkpoint import api, load_checkpoint, save_checkpoint
from fxshard.runtime.module.parameters import shard_parameters, shard_tensor
from tests.distributed.scenarios import run_scenarios

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

MESHES = {
    "two": ([0, 1], {"e.weight": "S(1)", "up.weight": "S(0)"}),
    "three": ([0, 1, 2], {"e.weight": "S(0)", "up.weight": "S(0)", "up.bias": "S(0)"}),
    "four": ([0, 1, 2, 3], {"e.weight": "S(0)", "up.weight": "S(1)", "up.bias": "S(0)"}),  # 5 rows on 4 ranks: the last shard is empty
    "square": ([[0, 1], [2, 3]], {"e.weight": "S(0)S(1)", "up.weight": "S(0)S(0)", "up.bias": "RS(0)"}),
}
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.02}], lr=0.1, momentum=0.9),
}
EXTRA = {"step": 2, "order": (3, [1.5]), "seen": torch.arange(4)}
SAVED = ("two", "three", "four", "square", "one")
Run = tuple[nn.Module, Any]


class Tied(nn.Module):
    """Uneven sizes, a tied parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.up, self.head = nn.Embedding(5, 6), nn.Linear(6, 7), nn.Linear(6, 5, bias=False)
        self.head.weight = self.e.weight
        self.register_buffer("shift", torch.rand(6))


@functools.cache
def mesh_of(name: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(MESHES[name][0]))


def made(mesh: str, optimizer: str, seed: int) -> Run | None:
    """The model and its optimizer on a mesh, or on one device; None on ranks outside of the mesh."""
    torch.manual_seed(seed)
    model: nn.Module = Tied()
    if mesh != "one":
        device_mesh, layouts = mesh_of(mesh), MESHES[mesh][1]
        if device_mesh.get_coordinate() is None:
            return None
        shard_parameters(model, {n: Layout.parse(text) for n, text in layouts.items()}, device_mesh, torch.device("cpu"))
    return model, OPTIMIZERS[optimizer](list(model.parameters()))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Optimizer steps with fixed gradients, so that every mesh computes the same bits."""
    for step in steps:
        for parameter in model.parameters():
            whole = torch.sin(torch.arange(parameter.numel()).reshape(parameter.shape) * 0.7 + step)
            laid = isinstance(parameter, DTensor)
            parameter.grad = shard_tensor(whole, Layout(parameter.placements), parameter.device_mesh, parameter.device) if laid else whole
        optimizer.step()


def tensors(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of all parameters, buffers and optimizer states, as whole tensors."""
    found = dict(model.state_dict())
    found.update({f"{i}.{key}": t for i, one in optimizer.state_dict()["state"].items() for key, t in one.items()})
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in found.items()}


def check(run: Run, optimizer: str, steps: int) -> None:
    """Checks that ``run`` has the state of one device after ``steps`` steps."""
    alone = made("one", optimizer, 0)
    assert alone is not None
    train(*alone, range(steps))
    want, have = tensors(*alone), tensors(*run)
    assert want.keys() == have.keys()
    wrong = [n for n in want if not torch.equal(want[n], have[n])]
    assert not wrong, wrong


def saved(folder: Path, mesh: str) -> None:
    for optimizer, suffix in (("adam", ""), ("momentum", ".safetensors")):
        run = made(mesh, optimizer, 0)
        if run is not None:
            train(*run, range(2))
            torch.manual_seed(7)
            save_checkpoint(folder / f"{mesh}{suffix}", *run, extra=EXTRA, timeout=30)


def continues(folder: Path, saved_on: str, loaded_on: str) -> None:
    """Adam is saved as a folder, SGD with momentum and two parameter groups as one safetensors file."""
    for optimizer, suffix in (("adam", ""), ("momentum", ".safetensors")):
        run = made(loaded_on, optimizer, 1)
        if run is not None:
            torch.manual_seed(1)
            extra = load_checkpoint(folder / f"{saved_on}{suffix}", *run, timeout=30)
            assert {**extra, "seen": extra["seen"].tolist()} == {**EXTRA, "seen": [0, 1, 2, 3]}
            assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(7)))
            check(run, optimizer, 2)
            assert run[1].param_groups[-1]["lr"] == (0.02 if optimizer == "momentum" else 0.1)
            train(*run, range(2, 4))
            check(run, optimizer, 4)


def on_ranks(folder: Path) -> None:
    """Every pair of meshes."""
    for mesh in MESHES:
        saved(folder, mesh)
        dist.barrier()
    for saved_on in SAVED:
        for loaded_on in MESHES:
            continues(folder, saved_on, loaded_on)


def errors_name_the_differing_rank(folder: Path) -> None:
    model, optimizer = made("four", "adam", 0) or (None, None)
    with pytest.raises(RunError, match=r"the ranks differ in extra: ranks 0, 2-3: .*rank 1"):
        save_checkpoint(folder / "h", model, optimizer, extra={"position": int(dist.get_rank() == 1)}, timeout=20)
    assert not (folder / "h").exists()
    (folder / "empty").mkdir(exist_ok=True)
    path = folder / ("four" if dist.get_rank() else "empty")
    said = "holds no finished checkpoint" if dist.get_rank() == 0 else "rank 0 could not load the checkpoint .* no finished"
    with pytest.raises(Exception, match=said):
        api._agree(
            api._group(dict(model.named_parameters()))[0], "load the checkpoint x", lambda: api.open_checkpoint(path).identity, str, 20
        )


def killed_while_saving(folder: Path) -> None:
    model, optimizer = made("four", "adam", 0) or (None, None)
    train(model, optimizer, range(2))
    save_checkpoint(folder / "k", model, optimizer, timeout=20)
    train(model, optimizer, range(2, 4))
    if dist.get_rank() == 2:
        api.write_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RunError, match=r"rank 2 did not come to finish the checkpoint in .*k within 3 s"):
        save_checkpoint(folder / "k", model, optimizer, timeout=3)
    if dist.get_rank() == 3:  # on behalf of the killed rank, for which rank 0 waits at the end
        dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), None, False).add("done", 1)


def torch_distributed_checkpoint(folder: Path) -> None:
    """``torch.distributed.checkpoint`` alone saves on four ranks and loads on the square; then each side reads files of the other."""
    warnings.filterwarnings("ignore")
    model, optimizer = made("four", "adam", 0) or (None, None)
    train(model, optimizer, range(2))
    plain, optim = get_state_dict(model, optimizer)
    dcp.save({"model": plain, "optim": optim}, checkpoint_id=folder / "torch")
    save_checkpoint(folder / "dcp", model, optimizer, extra=EXTRA, format="dcp", timeout=30)
    for name in ("torch", "dcp"):
        model, optimizer = other = made("square", "adam", 1) or (None, None)
        plain, optim = get_state_dict(*other)
        dcp.load({"model": plain, "optim": optim}, checkpoint_id=folder / name)
        set_state_dict(model, optimizer, model_state_dict=plain, optim_state_dict=optim)
        check(other, "adam", 2)
        other = made("three", "adam", 1)
        if other is not None:
            load_checkpoint(folder / name, *other, timeout=30)
            check(other, "adam", 2)
    dist.barrier()
    with pytest.raises(Exception, match="the path exists already"):
        save_checkpoint(folder / "dcp", model, optimizer, format="dcp", timeout=30)


SCENARIOS = (on_ranks, torch_distributed_checkpoint, errors_name_the_differing_rank, killed_while_saving)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    saved(folder, "one")
    return folder, run_scenarios({s.__name__: functools.partial(s, folder) for s in SCENARIOS}, 4, folder, seconds=120)


@pytest.mark.parametrize("name", [s.__name__ for s in SCENARIOS[:-1]])
def test_on_four_ranks(name: str, found: tuple[Path, dict[str, str]]) -> None:
    assert not found[1][name], found[1][name]


@pytest.mark.parametrize("name", ["torch", "dcp"])
def test_torchs_folder_on_one_device(name: str, found: tuple[Path, dict[str, str]]) -> None:
    run = made("one", "adam", 1)
    assert run is not None
    extra = load_checkpoint(found[0] / name, *run)
    check(run, "adam", 2)
    assert extra is None or (extra["step"], extra["order"], extra["seen"].tolist()) == (2, (3, [1.5]), [0, 1, 2, 3])
    plain, optim = get_state_dict(*(again := made("one", "adam", 2) or run))
    dcp.load({"model": plain, "optim": optim}, checkpoint_id=found[0] / name, no_dist=True)
    set_state_dict(*again, model_state_dict=plain, optim_state_dict=optim)
    check(again, "adam", 2)


@pytest.mark.parametrize("mesh", SAVED)
def test_on_one_device(mesh: str, found: tuple[Path, dict[str, str]]) -> None:
    continues(found[0], mesh, "one")


def test_a_killed_rank_leaves_the_previous_checkpoint(found: tuple[Path, dict[str, str]]) -> None:
    assert found[1]["killed_while_saving"].splitlines()[0] == "rank 2 did not finish; it was ended by SIGKILL"
    assert (found[0] / "killed_while_saving.3").read_text() == ""
    run = made("one", "adam", 1)
    assert run is not None
    load_checkpoint(found[0] / "k", *run)
    check(run, "adam", 2)
    save_checkpoint(found[0] / "k", *run)
    assert len(list((found[0] / "k").iterdir())) == 2  # an index and one folder: the next save removes what the killed rank left


def test_one_file_is_read_by_safetensors_alone(found: tuple[Path, dict[str, str]]) -> None:
    held = safetensors.torch.load_file(found[0] / "square.safetensors")
    run = made("one", "momentum", 1)
    assert run is not None
    model, optimizer = run
    model.load_state_dict({n: held[n] for n in model.state_dict()})
    for name in ("e.weight", "up.weight", "up.bias"):
        optimizer.state[model.get_parameter(name)]["momentum_buffer"] = held[f"optimizer/{name}/momentum_buffer"]
    check(run, "momentum", 2)
