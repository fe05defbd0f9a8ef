"""The cache of plans on disk: an equal request gets the same plan without solving, another one is planned, bad files are replaced."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard import disk_cache
from fxshard.errors import OptionError
from fxshard.mesh.mesh import HARDWARE
from fxshard.passes.planning import choose
from fxshard.plans.sharding_plan import ShardingPlan
from tests.plans.small_plans import by_hand

MESH = fxshard.Mesh({"dp": 2, "tp": 2}, hardware="h100")


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each solve."""
    counted: list[int] = []
    real = choose.decide
    monkeypatch.setattr(choose, "decide", lambda *args: counted.append(1) or real(*args))
    return counted


def read(file: Path) -> ShardingPlan | None:
    return disk_cache.read(file, "the plan", ShardingPlan.from_json)


def make(model: nn.Module | None = None, mesh: fxshard.Mesh = MESH, rows: int = 8, **options: Any) -> ShardingPlan:
    model = model or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return fxshard.plan(model, (torch.ones(rows, 4),), mesh, **options)


def test_a_restart_does_not_plan_again(cache_folder: Path, solves: list[int]) -> None:
    first = make()
    (file,) = cache_folder.glob("plan-*")
    assert first.origin is not None and first.origin.cached is None and len(solves) == 1
    again = make()
    assert again.to_json() == first.to_json() and again.lines == first.lines and len(solves) == 1
    assert again.origin is not None and again.origin.cached == file
    assert read(file) == first
    explained = again.explain("0.weight", "S(0)R")  # this solves the problem
    assert explained.choices[0].total == first.explain("0.weight", "S(0)R").choices[0].total


FAST = dataclasses.replace(HARDWARE["h100"], launch=1.0)
OTHERS: list[dict[str, Any]] = [
    {"model": nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 4))},
    {"rows": 16},
    {"train": False},
    {"mesh": fxshard.Mesh({"dp": 4, "tp": 2}, hardware="h100")},
    {"mesh": fxshard.Mesh({"a": 2, "tp": 2}, hardware="h100")},
    {"mesh": fxshard.Mesh({"dp": 2, "tp": 2}, hardware="a100")},
    {"mesh": fxshard.Mesh({"dp": 2, "tp": 2}, hardware=FAST)},
    {"mesh": fxshard.Mesh({"dp": 2, "tp": 2}, hardware=dataclasses.replace(HARDWARE["h100"], overlap=0.5))},
    {"pins": {"0.weight": "RS(0)"}},
    {"pins": {"0.weight": "RS(1)"}},
    {"input_layouts": "S(0)R"},
    {"output_layouts": "RR"},
    {"memory_limit": 10**9},
    {"objective": "communication"},
    {"time_limit": 100.0},
]


def test_everything_that_determines_a_plan_is_in_the_key(cache_folder: Path, solves: list[int]) -> None:
    make()
    for number, other in enumerate(OTHERS):
        make(**other)
        assert len(solves) == number + 2, other
        assert len(list(cache_folder.glob("plan-*"))) == number + 2
    for other in ({}, OTHERS[5], OTHERS[8]):
        make(**other)
    assert len(solves) == len(OTHERS) + 1


def test_how_a_pin_is_written_does_not_matter(cache_folder: Path, solves: list[int]) -> None:
    make(pins={"0.weight": "RS(0)"})
    make(pins={"0.w*": {"dp": fxshard.Layout.parse("R")[0], "tp": fxshard.Layout.parse("S(0)")[0]}})
    assert len(solves) == 1


def test_rules_code_and_versions_are_in_the_key(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {disk_cache.file_for("plan", graph="g")}
    for owner, name, value in (
        (disk_cache, "all_user_rules", lambda: {"mylib.op": "a -> a"}),
        (disk_cache, "code_digest", lambda: "other"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            names.add(disk_cache.file_for("plan", graph="g"))
    monkeypatch.setattr(torch, "__version__", "9.9")
    names.add(disk_cache.file_for("plan", graph="g"))
    assert len(names) == 4 and all(name is not None and name.parent == cache_folder for name in names)
    assert disk_cache.file_for("plan", graph=lambda: None) is None, "a value without a stable text has no cache file"


def sealed(data: dict[str, Any]) -> str:
    text = json.dumps(data)
    return hashlib.sha256(text.encode()).hexdigest() + "\n" + text


@pytest.mark.parametrize("damage", ["cut", "foreign", "newer", "illegal", "changed", "unsealed"])
def test_a_bad_file_is_reported_and_replaced(cache_folder: Path, solves: list[int], caplog: pytest.LogCaptureFixture, damage: str) -> None:
    plan = make()
    (file,) = cache_folder.glob("plan-*")
    data = json.loads(by_hand(plan))
    if damage == "illegal":
        next(n for n in data["nodes"] if n["name"] == "relu")["outputs"] = ["PP"]
    texts = {"cut": file.read_text()[:300], "foreign": "{}", "newer": sealed({**data, "version": 99}), "illegal": sealed(data)}
    texts |= {"changed": file.read_text().replace('"memory_limit": null', '"memory_limit": 7'), "unsealed": plan.to_json()}
    file.write_text(texts[damage])
    with caplog.at_level(logging.WARNING, "fxshard"):
        assert make() == plan
    assert len(solves) == 2 and "is not used and is made again" in caplog.text and str(file) in caplog.text
    assert read(file) == plan and make() == plan and len(solves) == 2


def test_the_cache_can_be_switched_off(cache_folder: Path, solves: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    make(cache=False)
    monkeypatch.setenv("FXSHARD_CACHE", "0")
    make()
    assert len(solves) == 2 and not cache_folder.exists()
    monkeypatch.setenv("FXSHARD_CACHE", "perhaps")
    with pytest.raises(OptionError, match="FXSHARD_CACHE='perhaps'"):
        make()


def test_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXSHARD_CACHE", "1")
    monkeypatch.delenv("FXSHARD_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.folder() == tmp_path / "fxshard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_cache.folder() == tmp_path / ".cache" / "fxshard"


def test_a_dump_runs_all_stages(cache_folder: Path, solves: list[int], tmp_path: Path) -> None:
    make()
    make(dump=tmp_path / "dump")
    assert len(solves) == 2 and (tmp_path / "dump" / "04_choose.txt").exists()


def test_a_plan_cut_short_by_time_is_not_cached(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = choose.decide

    def cut(*args: Any) -> ShardingPlan:
        plan = real(*args)
        return dataclasses.replace(plan, certificate=dataclasses.replace(plan.certificate, cut=True))

    monkeypatch.setattr(choose, "decide", cut)
    make(time_limit=50.0)
    assert not list(cache_folder.glob("plan-*"))
    make()  # cut short by counted work, which is the same on every run
    assert len(list(cache_folder.glob("plan-*"))) == 1


def test_a_folder_that_cannot_be_written_is_reported(cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_folder.write_text("a file stands here")
    with caplog.at_level(logging.WARNING, "fxshard"):
        make()
    assert "not kept for the next start" in caplog.text and "FXSHARD_CACHE_DIR" in caplog.text


def test_the_plans_used_longest_ago_are_deleted(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MAX_FILES", 2)
    plan = make(cache=False)
    for number in range(3):
        disk_cache.write(cache_folder / f"plan-{number}.json", "the plan", plan.to_json)
        os.utime(cache_folder / f"plan-{number}.json", (number, number))
        if number == 1:
            assert read(cache_folder / "plan-0.json") == plan  # read, so it stays
    assert sorted(f.name for f in cache_folder.iterdir()) == ["plan-0.json", "plan-2.json"]
