"""Diffusion models of diffusers: UNets and transformers that predict the noise of an image at a time step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bench.families.family import Case, Family

BLOCKS = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}


class Noise(nn.Module):
    """The mean squared error of the predicted noise."""

    def __init__(self, model: nn.Module, channels: int) -> None:
        super().__init__()
        self.model = model
        self.channels = channels

    def forward(self, noise: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.mse_loss(self.model(*args, **kwargs, return_dict=False)[0][:, : self.channels], noise)


def _case(model: nn.Module, size: int, channels: int, **kwargs: Any) -> Case:
    image = torch.randn(4, channels, size, size)
    return Noise(model, channels), (torch.randn_like(image), image), {"timestep": torch.randint(1000, (4,)), **kwargs}


def unet(dropout: bool) -> Case:
    from diffusers import UNet2DModel

    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    model = UNet2DModel(**BLOCKS, down_block_types=down, up_block_types=up, attention_head_dim=4, dropout=0.1 * dropout)
    return _case(model, 16, 3)


def conditioned_unet(dropout: bool) -> Case:
    """The UNet of Stable Diffusion, with cross-attention to text."""
    from diffusers import UNet2DConditionModel

    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    model = UNet2DConditionModel(
        **BLOCKS, down_block_types=down, up_block_types=up, cross_attention_dim=12, attention_head_dim=4, dropout=0.1 * dropout
    )
    return _case(model, 16, 4, encoder_hidden_states=torch.randn(4, 5, 12))


def dit(dropout: bool) -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=4,
        in_channels=4,
        num_layers=2,
        norm_num_groups=4,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
        dropout=0.1 * dropout,
    )
    if not dropout:
        for block in model.transformer_blocks:  # classes are dropped at random too, for classifier-free guidance
            block.norm1.emb.class_embedder.dropout_prob = 0.0
    return _case(model, 8, 4, class_labels=torch.randint(1000, (4,)))


def pixart(dropout: bool) -> Case:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=4,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=16,
        caption_channels=12,
        dropout=0.1 * dropout,
    )
    return _case(model, 8, 4, encoder_hidden_states=torch.randn(4, 5, 12), added_cond_kwargs={"resolution": None, "aspect_ratio": None})


def sd3(_: bool) -> Case:
    """The transformer of Stable Diffusion 3: image and text attend to each other."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=4,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        out_channels=4,
        pos_embed_max_size=8,
    )
    return _case(model, 8, 4, encoder_hidden_states=torch.randn(4, 5, 12), pooled_projections=torch.randn(4, 12))


def autoencoder(_: bool) -> Case:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )
    image = torch.randn(2, 3, 16, 16)
    return Noise(model, 3), (image, image), {}


_BUILDERS = {"unet": unet, "conditioned unet": conditioned_unet, "dit": dit, "pixart": pixart, "sd3": sd3, "autoencoder": autoencoder}
FAMILIES = tuple(Family(name, "diffusion", build) for name, build in _BUILDERS.items())
