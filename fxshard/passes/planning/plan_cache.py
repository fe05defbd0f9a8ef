"""Solved plans on disk, so that a restart does not plan again.

Each plan is one file, named by a hash of the graph, the mesh with its hardware's numbers, the constraints and other options
(``disk_cache``). The format is that of ``plan.save`` with a digest of the content; files are plain data and checked on reading.
"""

from __future__ import annotations

import logging
from pathlib import Path

from fxshard.disk_cache import FOLDER, SWITCH, evict, mark_used
from fxshard.errors import FxshardError
from fxshard.files import make_folder
from fxshard.plans.plan_data import FORMAT_VERSION
from fxshard.plans.plan_json import save
from fxshard.plans.sharding_plan import ShardingPlan

log = logging.getLogger("fxshard")

KIND = f"plan-v{FORMAT_VERSION}"
"""The kind of file, for ``disk_cache.file_for``."""


def read(path: Path) -> ShardingPlan | None:
    """The plan in a cache file; None if there is none or it is damaged, which is logged."""
    if not path.exists():
        return None
    try:
        plan = ShardingPlan.load(path, sealed=True)
    except FxshardError as error:
        distrust(path, error)
        return None
    mark_used(path)
    return plan


def distrust(path: Path, error: FxshardError) -> None:
    """Logs that a cache file is not used."""
    log.warning("the plan in the cache, %s, is not used and is made again: %s", path, error.what)


def write(path: Path, plan: ShardingPlan) -> None:
    """Saves a plan; if that fails, logs it and planning goes on."""
    try:
        make_folder(path.parent)
        save(plan, path, sealed=True)
    except FxshardError as error:
        log.warning("the plan is not kept for the next start: %s (%s); set %s to another folder, or %s=0", error.what, path, FOLDER, SWITCH)
        return
    evict(path.parent, "plan-v*.json")
