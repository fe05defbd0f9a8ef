"""What all commands have in common: a description, an example, and ``--json``."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

WIDTH = 100


def add_command(commands: Any, name: str, help: str, example: str, description: str = "", json: str = "") -> argparse.ArgumentParser:
    """A command with an example under its help. ``json``: what ``--json`` prints; the option is there if it is given."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description or f"{help[0].upper()}{help[1:]}.", WIDTH),
        epilog=f"example:\n  {example}\n\nexit codes: 0 done, 1 a fault or a check that failed, 2 an error of the user's",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if json:
        parser.add_argument("--json", action="store_true", help=f"print {json} as JSON")
    return parser
