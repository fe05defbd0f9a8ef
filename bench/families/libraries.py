"""Models of torchvision, timm and peft, which the tests do not install: ``make models`` does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bench.families.family import LABELS, Case, Family, Loss, config_of, tokens
from bench.families.images import pictures
from bench.families.text import GROUPED, TINY

_UNDEFINED = []


def import_torchvision() -> None:
    """Imports torchvision though its compiled operators do not fit this build of torch, as the wheel of PyPI beside a CPU build.

    torchvision then fails to describe two operators that do not exist. No classifier calls them, so they are defined, without a kernel.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    _UNDEFINED.append(library)
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401


class Classes(torch.nn.Module):
    """A classifier of images, logits (b, c), with its loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model(images), target)


def of_torchvision(name: str, dropout: bool, probability: str = "", **changes: Any) -> Case:
    """``probability``: what the model calls its probability of dropout; "" if it has none."""
    import torchvision

    options = {probability: 0.1 * dropout} if probability else {}
    model = torchvision.models.get_model(name, num_classes=LABELS, **options, **changes)
    return Classes(model), (pictures(), torch.randint(LABELS, (4,))), {}


def vision_transformer(dropout: bool) -> Case:
    """torchvision's ViT-B/16, narrow and of two layers."""
    import torchvision

    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 16, "mlp_dim": 32}
    model = torchvision.models.VisionTransformer(num_classes=LABELS, dropout=0.1 * dropout, **sizes)
    return Classes(model), (pictures(), torch.randint(LABELS, (4,))), {}


def of_timm(name: str, dropout: bool, **changes: Any) -> Case:
    import timm

    model = timm.create_model(name, num_classes=LABELS, drop_rate=0.1 * dropout, **changes)
    return Classes(model), (pictures(), torch.randint(LABELS, (4,))), {}


def with_lora(model_type: str, dropout: bool, **changes: Any) -> Case:
    """A decoder with low-rank adapters; its own weights are frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(model_type, dropout, use_cache=False, **{**TINY, **changes}))
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1 * dropout, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)  # peft starts from zeros, with which A has no gradient
    ids = tokens()
    return Loss(adapted, shift=True), (), {"input_ids": ids, "target": ids}


TORCHVISION: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "mobilenet_v3_small": {"probability": "dropout"},
    "densenet121": {"probability": "drop_rate"},
}
TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "convnext_atto": {},
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "window_size": 4,
        "embed_dim": 8,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "drop_path_rate": 0.0,
    },
    "mixer_s16_224": {"img_size": 32},
    "efficientnet_b0": {},
}
LORA: dict[str, dict[str, Any]] = {"llama": GROUPED, "gpt2": {}}

FAMILIES = (
    Family("torchvision vit_b_16", "vision", vision_transformer),
    *(Family(f"torchvision {name}", "vision", partial(of_torchvision, name, **changes)) for name, changes in TORCHVISION.items()),
    *(Family(f"timm {name}", "vision", partial(of_timm, name, **changes)) for name, changes in TIMM.items()),
    *(Family(f"peft lora {name}", "adapters", partial(with_lora, name, **changes)) for name, changes in LORA.items()),
)
