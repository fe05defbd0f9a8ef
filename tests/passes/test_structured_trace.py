"""TORCH_LOGS and TORCH_TRACE, set as a user sets them: torch is imported first, knows the name, and writes what tlparse lists."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.fresh import ROOT

CHILD = """
import logging
logging.basicConfig(format="ROOT %(message)s")
{first}
import sys, torch, fxshard
assert "torch._dynamo" not in sys.modules, "TORCH_LOGS lists fxshard's modules, and must not load them"
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
args = (torch.ones(4, 8),)
plan = fxshard.plan(model, args, fxshard.Mesh({{"tp": 2}}), train=False, pins={{"0.weight": "S(1)"}}, output_layouts="R", cache=False)
program = fxshard.lower(model, args, plan)
print(plan)
print(plan.to_json())
print(program.first.graph)
print([[c.kind, c.axis] for c in program.collectives])
"""


def run(first: str, folder: Path, **environment: str) -> tuple[str, str]:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", CHILD.format(first=first)], env=settings, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run in which torch is imported first, with everything switched on: its folder, stdout and stderr."""
    folder = tmp_path_factory.mktemp("trace")
    return folder, *run("import torch", folder, TORCH_LOGS="+fxshard", TORCH_TRACE=str(folder))


def records(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """(metadata, payload) of each record, read as tlparse reads them: JSON after the log's prefix, and the indented lines below it."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    (path,) = folder.glob("dedicated_log_torch_trace_*.log")
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            found[-1][1].append(line[1:])
        else:
            found.append((json.loads(line[line.index("{") :]), []))
    return [(said, "\n".join(lines)) for said, lines in found]


def test_the_debug_log_is_printed_once(traced: tuple[Path, str, str]) -> None:
    _, out, err = traced
    assert "choose: objective" in err and "ROOT" not in err
    screen = out[: out.index("\n{")].strip().splitlines()
    said = [line.partition("] ")[2] for line in err.splitlines()]
    assert err.count("the plan:") == 1 and all(line.strip() in "\n".join(said) for line in screen)


def test_fxshard_first_and_info_only(tmp_path: Path) -> None:
    _, err = run("import fxshard; fxshard.errors", tmp_path, TORCH_LOGS="fxshard")
    assert "choose: objective" not in err and not list(tmp_path.glob("*.log"))


def test_the_structured_trace_holds_plan_graphs_and_collectives(traced: tuple[Path, str, str]) -> None:
    folder, out, _ = traced
    found = {said["artifact"]["name"]: (said["artifact"]["encoding"], payload) for said, payload in records(folder) if "artifact" in said}
    assert {name: encoding for name, (encoding, _) in found.items() if name.startswith("fxshard")} == {
        "fxshard_plan": "string",
        "fxshard_plan_json": "json",
        "fxshard_local_graphs": "string",
        "fxshard_collectives": "json",
    }
    assert found["fxshard_plan"][1] in out and found["fxshard_plan_json"][1].strip() in out
    assert found["fxshard_local_graphs"][1].partition("\n")[2].strip() in out
    issued = [[c["kind"], c["axis"]] for c in json.loads(found["fxshard_collectives"][1])]
    assert issued and str(issued) == out.splitlines()[-1]


def test_tlparse_lists_them(traced: tuple[Path, str, str], tmp_path: Path) -> None:
    tlparse = os.environ.get("TLPARSE") or shutil.which("tlparse")
    if tlparse is None:
        pytest.skip("tlparse is not installed: pip install tlparse, or set TLPARSE to its path")
    (log,) = traced[0].glob("dedicated_log_torch_trace_*.log")
    subprocess.run([tlparse, str(log), "-o", str(tmp_path / "page"), "--no-browser"], check=True, capture_output=True, timeout=120)
    listed = (tmp_path / "page" / "index.html").read_text()
    for name in ("fxshard_plan", "fxshard_plan_json", "fxshard_local_graphs", "fxshard_collectives"):
        assert name in listed, name
