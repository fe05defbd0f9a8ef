"""The models of the sweep: the families of the benches, and those of further libraries."""

from __future__ import annotations

import torch

from bench import families
from bench.families import libraries
from bench.families.family import Case, Family

CATALOGUE: tuple[Family, ...] = (*families.FAMILIES, *libraries.FAMILIES)
BY_NAME = {family.name: family for family in CATALOGUE}


def make(name: str, seed: int = 0) -> Case:
    """The model ``name`` in float64 without dropout, its weights and inputs drawn from ``seed``."""
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        return BY_NAME[name].build(False)
    finally:
        torch.set_default_dtype(before)
