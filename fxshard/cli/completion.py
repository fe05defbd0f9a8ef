"""``fxshard completion SHELL``: a script that completes commands, options and their values, and file names elsewhere.

Written from the parser itself: shtab has no fish, and argcomplete starts Python at each press of the key (decision 0053).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from fxshard.cli.console.commands import CommandParser, add_command

SHELLS = ("bash", "zsh", "fish")
EXAMPLE = "source <(fxshard completion bash)    # in ~/.bashrc; fish: fxshard completion fish | source"


def add_completion(commands: Any) -> None:
    """Adds the command to ``commands``, the subparsers of ``fxshard``, which it lists."""
    help = "print a completion script for a shell"
    completion = add_command(commands, "completion", help, EXAMPLE, json="the commands and their options")
    completion.add_argument("shell", choices=SHELLS, help="which shell")

    def command(options: argparse.Namespace) -> None:
        print(json.dumps(words_of(commands.choices), indent=1) if options.json else script(commands.choices, options.shell))

    completion.set_defaults(command=command)


def words_of(commands: Mapping[str, CommandParser]) -> dict[str, dict[str, list[str]]]:
    """Command -> its options, by long name, with the values that each may take; positional choices are under ""."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, parser in commands.items():
        rows = {flag: [*map(str, one.choices or ())] for one in parser.options for flag in one.option_strings}
        rows |= {"": [str(word) for one in parser.options if not one.option_strings for word in one.choices or ()]}
        found[name] = rows
    return found


def script(commands: Mapping[str, CommandParser], shell: str) -> str:
    """The completion script."""
    words = words_of(commands)
    return _fish(commands) if shell == "fish" else _bash(words) if shell == "bash" else _zsh(words)


def _bash(words: dict[str, dict[str, list[str]]]) -> str:
    cases = [line for name, options in words.items() for line in _cases(name, options)]
    return "\n".join(
        [
            "_fxshard() {",
            '    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" words=""',
            '    if [ "$COMP_CWORD" -eq 1 ]; then',
            f'        COMPREPLY=($(compgen -W "{" ".join(words)} --help" -- "$current")); return',
            "    fi",
            '    case "$command $before" in',
            *(f"        {line}" for line in cases if not line.startswith("=")),
            "    esac",
            '    if [ -z "$words" ] && [[ "$current" == -* ]]; then',
            '        case "$command" in',
            *(f"            {line[1:]}" for line in cases if line.startswith("=")),
            "        esac",
            "    fi",
            '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
            '    [ -n "$words" ] || COMPREPLY=($(compgen -f -- "$current"))',
            "}",
            "complete -o filenames -F _fxshard fxshard",
        ]
    )


def _cases(name: str, options: dict[str, list[str]]) -> list[str]:
    """Lines of ``case``: the values after an option or the command, and, marked by ``=``, the command's options."""
    values = [f'"{name} {flag or name}") words="{" ".join(found)}" ;;' for flag, found in options.items() if found]
    return [*values, f'={name}) words="{" ".join(flag for flag in options if flag)}" ;;']


def _zsh(words: dict[str, dict[str, list[str]]]) -> str:
    """zsh runs bash's function."""
    return f"#compdef fxshard\nautoload -U +X bashcompinit && bashcompinit\n{_bash(words)}"


def _fish(commands: Mapping[str, CommandParser]) -> str:
    lines = []
    for name, parser in commands.items():
        lines.append(f"complete -c fxshard -n __fish_use_subcommand -f -a {name} -d {_quoted(str(parser.description).splitlines()[0])}")
        begin = f"complete -c fxshard -n '__fish_seen_subcommand_from {name}'"
        for one in parser.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in one.option_strings)
            takes = " -r" if one.option_strings and one.nargs != 0 else ""
            values = f" -x -a {_quoted(' '.join(map(str, one.choices)))}" if one.choices else takes
            if flags or values:
                lines.append(f"{begin} {flags}{values} -d {_quoted(str(one.help or ''))}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
