"""A plan's file as a view, and the version of its format."""

from __future__ import annotations

from fxshard.files import SEAL, Field, parse_json
from fxshard.views.plan_view import PlanView

FORMAT, VERSION = "fxshard-plan", 7
BY_HAND = (
    f'make the plan again; one written by hand needs "format": "{FORMAT}", "version": {VERSION}, "partial": true, '
    '"mesh": {"axes": [["tp", 2]]} and "nodes": [{"name": ..., "outputs": [...]}]'
)
UNREADABLE = f"make the plan again, or read it with the fxshard that wrote it; this one reads version {VERSION}"
CHANGED = "the plan was changed after it was written: its sha256 is not that of its content"
EDITED = f'copy it again from its source; if you edited it, remove its line "{SEAL}", and it is read like a plan written by hand'

DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, ArithmeticError)
"""What views raise on fields that no plan has. ``plans/plan_json.py`` then says what is wrong, and where."""


def check_plan(root: Field, text: str | bytes) -> bool:
    """Raises FileError unless the file is a plan of this version, and what fxshard wrote if it says so by its hash. Returns whether it
    does; a plan written or edited by hand has no hash."""
    root.check_version(FORMAT, VERSION, "plan", BY_HAND, UNREADABLE)
    if SEAL not in root.value:
        return False
    root.check_seal(CHANGED, EDITED, text.encode() if isinstance(text, str) else text)
    return True


def read_view(text: bytes, where: str) -> PlanView | None:
    """The view of a plan's text; None for one without a hash, whose fields only the strict reader checks.

    Raises FileError for another format or version, and for a plan that was changed after it was written.
    """
    root = parse_json(text, where, BY_HAND)
    if not check_plan(root, text):
        return None
    return PlanView({name: value for name, value in root.value.items() if name != SEAL})
