"""Solved plans on disk, so that a restart does not plan again.

One file a plan, named by the graph, the mesh with its hardware's numbers, the constraints and what else was asked (``disk_cache``). Files
are plans like those that ``plan.save`` writes, with a digest of what is in them: data, checked when they are read.
"""

from __future__ import annotations

import logging
from pathlib import Path

from fxshard.disk_cache import FOLDER, SWITCH, forget, touch
from fxshard.errors import FxshardError
from fxshard.files import make_folder
from fxshard.plans.plan_data import FORMAT_VERSION
from fxshard.plans.plan_json import save
from fxshard.plans.sharding_plan import ShardingPlan

log = logging.getLogger("fxshard")

KIND = f"plan-v{FORMAT_VERSION}"
"""Of the file, for ``disk_cache.file_for``."""


def read(path: Path) -> ShardingPlan | None:
    """The plan in a file of the cache; None where there is none, or a damaged one, which is said."""
    if not path.exists():
        return None
    try:
        plan = ShardingPlan.load(path, sealed=True)
    except FxshardError as error:
        distrust(path, error)
        return None
    touch(path)
    return plan


def distrust(path: Path, error: FxshardError) -> None:
    """Says that a file is not used."""
    log.warning("the plan in the cache, %s, is not used and is made again: %s", path, error.what)


def write(path: Path, plan: ShardingPlan) -> None:
    """Keeps a plan; where that cannot be, it is said and planning goes on."""
    try:
        make_folder(path.parent)
        save(plan, path, sealed=True)
    except FxshardError as error:
        log.warning("the plan is not kept for the next start: %s (%s); set %s to another folder, or %s=0", error.what, path, FOLDER, SWITCH)
        return
    forget(path.parent, "plan-v*.json")
