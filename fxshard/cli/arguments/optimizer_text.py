"""``--optimizer adamw:lr=1e-3,betas=(0.9,0.95)``: an optimiser of torch.optim with its options."""

from __future__ import annotations

import ast
from functools import partial
from typing import Any

from fxshard.errors import OptionError, closest

NAMES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
"""By the words of the command line, the classes of torch.optim whose steps a program can hold."""
EXAMPLE = "write it like --optimizer adamw:lr=1e-3,betas=(0.9,0.95)"


def parse_optimizer(text: str | None, train: bool) -> Any:
    """A function of parameters that makes the optimiser; None for no text. Raises OptionError for other text, or without ``train``.

    Whether the optimiser has such options is checked when it is made.
    """
    if text is None:
        return None
    if not train:
        raise OptionError("--optimizer is for a training program", remedy="add --train, or leave it out")
    name, _, given = text.partition(":")
    if name not in NAMES:
        what = f"a program cannot hold the step of the optimizer {name!r}{closest(name, NAMES)}"
        raise OptionError(what, where="--optimizer", remedy=f"use {', '.join(NAMES)}")
    try:
        call: Any = ast.parse(f"f({given})", mode="eval").body
        options = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise OptionError(f"cannot read the options {given!r:.80}", where="--optimizer", remedy=EXAMPLE) from error
    if not isinstance(call.func, ast.Name) or call.args or None in options:
        raise OptionError(f"the options {given!r:.80} have no names", where="--optimizer", remedy=EXAMPLE)
    if len(options) < len(call.keywords):
        raise OptionError(f"the options {given!r:.80} give a name twice", where="--optimizer", remedy="give each option once")
    import torch

    return partial(getattr(torch.optim, NAMES[name]), **options)
