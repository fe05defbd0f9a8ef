"""The page: self-contained, reproducible, small; written atomically by save_report and by the commands."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from pathlib import Path

import pytest
import torch

import fxshard
from fxshard.cli import main as cli
from fxshard.cli.console.exit_codes import USER_ERROR
from fxshard.errors import OptionError, PlanError
from fxshard.inspect.report import Parts, report_data, report_html
from fxshard.plans.sharding_plan import ShardingPlan
from tests.inspect.report.example_reports import large_page, llama_page, small_plan

LARGEST = 2_000_000


def data_in(page: str) -> dict:
    packed = re.search(r'<script id="data" type="text/plain">([A-Za-z0-9+/=]+)</script>', page)
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def test_nothing_is_loaded() -> None:
    page = report_html(small_plan())
    assert not re.search(r"<(?:link|img|iframe|object|embed)\b|<script[^>]*\bsrc\b|@import|sourceMappingURL=", page)
    assert "url(" not in page[page.index("<style>") : page.index("</style>")]
    allowed = {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}  # a namespace, and a name in a comment
    assert set(re.findall(r"https?://[\w./-]+", page)) <= allowed
    assert "default-src 'none'" in page
    assert page.count("Permission is hereby granted, free of charge") == 3  # the licences of the libraries


def test_equal_plans_give_equal_pages() -> None:
    page = report_html(small_plan())
    assert page == report_html(small_plan())
    assert data_in(page) == json.loads(json.dumps(report_data(small_plan(), Parts())))


def test_a_title_is_text() -> None:
    page = report_html(small_plan(), Parts(title="</title><script>alert(1)</script>"))
    assert "<script>alert" not in page and data_in(page)["title"].startswith("</title>")
    page = report_html(small_plan(), Parts(title="@@DATA@@ and @@STYLE@@"))
    assert "<title>@@DATA@@ and @@STYLE@@ – fxshard</title>" in page and data_in(page)["title"] == "@@DATA@@ and @@STYLE@@"


def test_size() -> None:
    assert llama_page().stat().st_size < LARGEST / 2


@pytest.mark.slow
def test_size_of_32_layers() -> None:
    assert large_page().stat().st_size < LARGEST


def test_what_save_report_refuses(tmp_path: Path) -> None:
    plan = ShardingPlan.from_json(small_plan().to_json())
    with pytest.raises(PlanError, match="does not know the graph"):
        fxshard.save_report(plan, tmp_path / "report.html", alternatives=1)
    with pytest.raises(OptionError, match="cannot report on a str"):
        fxshard.save_report("plan.json", tmp_path / "report.html")
    assert not list(tmp_path.iterdir())
    fxshard.save_report(plan, tmp_path / "report.html")
    assert "timeline" in data_in((tmp_path / "report.html").read_text())["missing"]


MODEL = """
import torch
from torch import nn

def training():
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.ones(4, 16),)
"""


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    plan, page, again = (str(tmp_path / name) for name in ("plan.json", "a.html", "b.html"))
    planned = ["plan", f"{tmp_path}/model.py:training", "--mesh", "dp=2,tp=2", "-o", plan]
    assert cli.main([*planned, "--html", page, "--explain", "0.weight", "--alternatives", "1"]) == 0
    made = data_in(Path(page).read_text())
    assert made["title"] == "model.py:training" and len(made["answers"]) == 2 and made["timeline"] and made["profile"]
    assert cli.main(["inspect", plan, "--html", again]) == 0
    read = data_in(Path(again).read_text())
    assert read["title"] == "plan.json" and read["graph"] == made["graph"] and "--html" in read["missing"]["memory"]
    assert math.isclose(read["timeline"]["total"], made["objective"]) and "order of the plan" in read["missing"]["timeline"]
    assert capsys.readouterr().out.endswith(f"wrote {again}\n")
    assert cli.main([*planned, "--alternatives", "1"]) == USER_ERROR
    assert "add --html" in capsys.readouterr().err


def test_a_program_has_timeline_and_memory(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU()).eval()
    program = fxshard.export(model, (torch.ones(4, 16),), fxshard.Mesh({"dp": 2}))
    program.save(tmp_path / "program.pt2")
    assert cli.main(["inspect", str(tmp_path / "program.pt2"), "--html", str(tmp_path / "a.html")]) == 0
    found = data_in((tmp_path / "a.html").read_text())
    assert found["timeline"]["lanes"] == ["compute", "dp"] and found["profile"]["peak"] > 0 and found["graph"]["edges"]
