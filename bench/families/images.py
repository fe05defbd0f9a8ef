"""Vision models of Hugging Face: classification, segmentation, detection, features, images with text."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from bench.families.family import LABELS, TINY, Case, Family, Loss, config_of, tokens, warmed

SIZE = 32


def pictures(batch: int = 4) -> torch.Tensor:
    """Random images (batch, 3, SIZE, SIZE)."""
    return torch.randn(batch, 3, SIZE, SIZE)


def image_classes(model_type: str, dropout: bool, **changes: Any) -> Case:
    """One class for an image."""
    from transformers import AutoModelForImageClassification

    config = config_of(model_type, dropout, image_size=SIZE, num_labels=LABELS, **changes)
    model = AutoModelForImageClassification.from_config(config)
    return Loss(model), (), {"pixel_values": pictures(), "target": torch.randint(LABELS, (4,))}


class Segments(nn.Module):
    """A model that classifies each pixel, logits (b, c, h, w), with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.model(pixel_values).logits
        return nn.functional.cross_entropy(nn.functional.interpolate(logits, size=target.shape[1:], mode="bilinear"), target)


def segmented(model_type: str, dropout: bool, **changes: Any) -> Case:
    from transformers import AutoModelForSemanticSegmentation

    model = AutoModelForSemanticSegmentation.from_config(config_of(model_type, dropout, num_labels=LABELS, **changes))
    warmed(model, pixel_values=pictures(1))
    return Segments(model), (pictures(), torch.randint(LABELS, (4, SIZE, SIZE))), {}


class Both(nn.Module):
    """A model that compares each image with each text, logits (b, b), with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        logits = self.model(**inputs).logits_per_text
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)))


def contrasted(model_type: str, dropout: bool, **changes: Any) -> Case:
    from transformers import AutoModel

    text = {**TINY, "projection_dim": 8}
    vision = {**TINY, "image_size": SIZE, "patch_size": 8, "projection_dim": 8}
    config = config_of(model_type, dropout, text_config=text, vision_config=vision, projection_dim=8, **changes)
    ids = tokens()
    ids[:, -1] = 2
    return Both(AutoModel.from_config(config)), (), {"input_ids": ids, "pixel_values": pictures()}


class Boxes(nn.Module):
    """A model that detects objects, classes and boxes. Its loss does not match them to the true objects, because matching cannot be
    traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, pixel_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.model(pixel_values, pixel_mask=pixel_mask)
        return found.logits, found.pred_boxes


def detected(model_type: str, dropout: bool, **changes: Any) -> Case:
    from transformers import AutoModelForObjectDetection, ResNetConfig

    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    config = config_of(model_type, dropout, backbone_config=backbone, use_timm_backbone=False, num_labels=LABELS, **changes)
    return Boxes(AutoModelForObjectDetection.from_config(config)).eval(), (pictures(2), torch.ones(2, SIZE, SIZE, dtype=torch.int64)), {}


VIT = {name: TINY[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")} | {"patch_size": 8}
STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2}
SWIN = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
SEG = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2]}
SEG |= {"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8}
DETR = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
DETR |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 5}

CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": VIT,
    "dinov2": VIT | {"mlp_ratio": 2},
    "swin": SWIN,
    "swinv2": SWIN,
    "convnext": STAGES | {"patch_size": 4},
    "convnextv2": STAGES | {"patch_size": 4},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "beit": VIT,
    "poolformer": {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_encoder_blocks": 2,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
    },
    "pvt": {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "sequence_reduction_ratios": [2, 1],
        "num_attention_heads": [1, 2],
        "patch_sizes": [4, 2],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
    },
}

FAMILIES = (
    *(Family(name, "vision", partial(image_classes, name, **changes)) for name, changes in CLASSIFIERS.items()),
    Family("segformer", "vision", partial(segmented, "segformer", **SEG)),
    Family("detr", "vision", partial(detected, "detr", **DETR)),
    Family("clip", "vision", partial(contrasted, "clip")),
    Family("siglip", "vision", partial(contrasted, "siglip")),
)
