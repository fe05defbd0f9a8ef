"""Models train on ranks as on one device: solver's, Megatron's and random plans; eager in float64, Inductor in float32."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import run_scenarios
from tests.distributed.training import Case, check, on_ranks, simulated

pytestmark = pytest.mark.distributed

LLAMA = {
    **dict.fromkeys(("layers.*.w[qkv].weight", "layers.*.attention.w[qkv].weight", "layers.*.w[13].weight"), None),
    "layers.*.attention.w[qkv].weight": {"tp": "S(0)"},
    "layers.*.attention.wo.weight": {"tp": "S(1)"},
    "layers.*.feed_forward.w[13].weight": {"tp": "S(0)"},
    "layers.*.feed_forward.w2.weight": {"tp": "S(1)"},
}
