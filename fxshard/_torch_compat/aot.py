"""Private names of AOTAutograd (torch 2.13): the joint graph of forward and backward, and what its inputs and outputs are.

What would replace them: ``torch.export`` of a training step, with the descriptors of its graph's inputs and outputs.
"""

from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

TOKEN_INPUTS = (ForwardTokenAOTInput, BackwardTokenAOTInput)
TOKEN_OUTPUTS = (ForwardTokenAOTOutput, BackwardTokenAOTOutput)
"""Inputs and outputs of a traced graph that only order operators with side effects."""

__all__ = [
    "TOKEN_INPUTS",
    "TOKEN_OUTPUTS",
    "BufferAOTInput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "aot_export_joint_with_descriptors",
]
