"""What all commands have in common: a description, an example, exit codes and ``--json``."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import Any, NoReturn

from fxshard.errors import OptionError, closest

WIDTH = 100


class CommandParser(argparse.ArgumentParser):
    """A parser that knows its ``options``, which completion scripts list."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.options: list[argparse.Action] = []
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Prints what is wrong and what to do, as other errors of the user do, and exits with 2."""
        self.exit(2, f"{OptionError(message, where=self.prog, remedy=f'{self.prog} --help lists what it takes, with an example')}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but a command refuses unknown words itself, since only it knows its options. Exits with 2."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            option = next((one.partition("=")[0] for one in rest if one.startswith("--") and one != "--"), None)
            options = any(one.startswith("--") for one in (sys.argv[1:] if args is None else args))
            split = "; a value is one word, such as dp=8,tp=8 or 10GB" if options else ""
            hint = split if option is None else closest(option, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return found, rest

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*args, **kwargs)
        self.options.append(action)
        return action


def add_command(commands: Any, name: str, help: str, example: str, description: str = "", json: str = "") -> CommandParser:
    """A command with an example under its help. ``commands``: the subparsers; ``json``: what ``--json`` prints, if the option is there."""
    parser: CommandParser = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description or f"{help[0].upper()}{help[1:]}.", WIDTH),
        epilog=f"example:\n  {example}\n\nexit codes: 0 done, 1 a fault of fxshard or a check that failed, 2 an error of the user's",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if json:
        parser.add_argument("--json", action="store_true", help=f"print {json} as JSON")
    return parser
