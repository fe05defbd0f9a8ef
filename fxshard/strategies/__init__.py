"""What each operator allows: rules in factor notation, the engine that makes strategies of them, and local forms.

>>> from fxshard.strategies import register, rule
>>> register("mylib.matmul.default", rule("b m k, b k n -> b m n"))
"""

from fxshard.call import Call, Operand, TensorMeta, call_of
from fxshard.strategies import (  # noqa: F401  (each registers its operators)
    attention,
    convolution,
    copies,
    creation,
    dims,
    embedding,
    experts,
    indexing,
    joining,
    linalg,
    local_region,
    loss,
    matmul,
    normalization,
    planes,
    pointwise,
    pooling,
    random,
    reductions,
    row_norm,
    scaled,
    slicing,
    softmax,
    views,
    weight_norm,
    whole,
)
from fxshard.strategies.engine import AxisOption, OpStrategy, axis_options, cache_clear, cache_info, created_reductions, op_strategy
from fxshard.strategies.factors import Factors, Linear, Rule, factors
from fxshard.strategies.local import LocalContext, LocalForm
from fxshard.strategies.notation import einop_rule, pointwise_rule, rule
from fxshard.strategies.registry import Registered, has_rule, local_form, lookup, register, registered_ops, rules_of_the_user
from fxshard.strategies.torch_functions import sharding_function

__all__ = [
    "AxisOption",
    "Call",
    "Factors",
    "Linear",
    "LocalContext",
    "LocalForm",
    "OpStrategy",
    "Operand",
    "Registered",
    "Rule",
    "TensorMeta",
    "axis_options",
    "cache_clear",
    "cache_info",
    "call_of",
    "created_reductions",
    "einop_rule",
    "factors",
    "has_rule",
    "local_form",
    "lookup",
    "op_strategy",
    "pointwise_rule",
    "register",
    "registered_ops",
    "rule",
    "rules_of_the_user",
    "sharding_function",
]
