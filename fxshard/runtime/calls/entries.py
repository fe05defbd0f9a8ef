"""Modules inside a model that Hugging Face's ``generate()`` calls by themselves: they need sharded forwards of their own.

An encoder-decoder runs its encoder once and then the whole model for each token; a wrapper (peft) hands ``generate()`` to the model in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from fxshard.runtime.calls.settings import Settings


def entries(model: nn.Module) -> list[nn.Module]:
    """These modules, without ``model`` itself, in the order in which it holds them."""
    inside = [module for module in model.modules() if _generates(module)]
    encoders = [found for module in inside if (found := _encoder(module)) is not None]
    wanted = {id(module) for module in (*inside, *encoders)}
    return [module for module in model.modules() if id(module) in wanted and module is not model]


def _generates(module: nn.Module) -> bool:
    """Asked of the class: wrappers pass on what they lack to the model in them."""
    return hasattr(type(module), "generate") and bool(getattr(type(module), "can_generate", lambda: False)())


def _encoder(module: nn.Module) -> nn.Module | None:
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False) or not hasattr(type(module), "get_encoder"):
        return None
    found = module.get_encoder()
    return found if isinstance(found, nn.Module) and found is not module else None


def entry_settings(settings: Settings) -> Settings:
    """The settings of the whole model's programs, without what is said of its arguments in their order or by name: an entry has others."""
    inputs, outputs = (given if isinstance(given, Mapping) else None for given in (settings.input_layouts, settings.output_layouts))
    return replace(settings, input_layouts=inputs, output_layouts=outputs, dynamic_shapes=None, example_sizes=None)
