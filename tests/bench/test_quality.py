"""The evaluator of ``bench.quality`` shares no code with fxshard's prices, agrees with them, and finds no known plan better than auto."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from bench.quality import __main__ as quality
from bench.quality import evaluate, kernels, prices
from bench.quality.measure import AUTO, KNOWN, MESHES
from fxshard.cost import collectives
from fxshard.cost.kernels import SUSTAINED, shape_factor
from fxshard.mesh.mesh import Mesh


@pytest.mark.parametrize("module", [evaluate, kernels, prices])
def test_the_evaluator_imports_nothing_of_fxshard(module: object) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())  # type: ignore[attr-defined]
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names and not any(name.startswith("fxshard") for name in names)


@pytest.mark.parametrize("preset", list(prices.DEVICES))
@pytest.mark.parametrize("shape", list(MESHES))
def test_two_implementations_of_the_collectives_agree(shape: str, preset: str) -> None:
    mesh, on = Mesh(MESHES[shape], preset), prices.DEVICES[preset]
    for axis, ranks in enumerate(mesh.shape):
        group = prices.group_of(mesh.shape, axis)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            for size in (2**14, 2**20, 3 * 2**22, 2**28):
                sent = round(size * (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks)
                expected = collectives.collective_time(kind, axis, sent, mesh)
                assert prices.collective_time(on, kind, group, size) == pytest.approx(expected, rel=0.03), (kind, axis, size)


def test_two_implementations_of_products_agree() -> None:
    on, hardware = prices.DEVICES["h100"], Mesh({"tp": 8}, "h100").hardware
    reached = hardware.reached
    assert reached is not None
    for shape in ((1, 4096, 4096, 4096), (1, 64, 8192, 512), (16, 128, 128, 65536), (1, 8, 8, 1024)):
        flops = 2 * shape[0] * shape[1] * shape[2] * shape[3]
        expected = flops * shape_factor(*shape, reached.processors) / reached.best[2] / SUSTAINED / hardware.flops[2] * 1e6
        assert prices.product_time(on, 2, *shape) == pytest.approx(expected, rel=1e-9)


def test_no_known_plan_is_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    asked = ["--models", "mlp", "--meshes", "8", "8x8", "--presets", "h100", "--out", str(out)]
    assert quality.main(asked) == 0
    printed, rows = capsys.readouterr().out, out.read_text()
    found = [json.loads(line) for line in rows.splitlines()]
    assert [(row["mesh"], row["plan"]) for row in found] == [(mesh, plan) for mesh in ("8", "8x8") for plan in (AUTO, *KNOWN)]
    made = [row for row in found if not row["failed"]]
    assert len(made) == len(found) - 2 and all(row["total"] == pytest.approx(row["objective"], rel=0.15) for row in made)
    assert quality.main(asked) == 0 and out.read_text() == rows and capsys.readouterr().out == printed
