"""Sharding rules: a rule per operator in factor notation, the engine that expands rules to strategies, and local forms.

>>> from fxshard.strategies import register, rule
>>> register("mylib.matmul.default", rule("b m k, b k n -> b m n"))
"""

from fxshard.graph.call import Call, Operand, TensorMeta, call_of
from fxshard.strategies.engine.engine import AxisOption, OpStrategy, cache_clear, cache_info, created_reductions, op_strategy, outputs_from
from fxshard.strategies.engine.factors import Factors, Linear, Rule, factors
from fxshard.strategies.engine.local import LocalContext, LocalForm
from fxshard.strategies.engine.notation import einop_rule, pointwise_rule, rule
from fxshard.strategies.engine.registered_sharding import sharding_function
from fxshard.strategies.engine.registry import (
    Registered,
    has_rule,
    local_form,
    lookup,
    own_collectives,
    register,
    registered_ops,
    registered_user_rules,
)
from fxshard.strategies.linear import attention, embedding, expert_rows, experts, flex_attention, linalg, matmul, scaled  # noqa: F401  (each registers its operators)
from fxshard.strategies.norms import loss, normalization, row_norm, softmax, weight_norm  # noqa: F401  (each registers its operators)
from fxshard.strategies.space import convolution, planes, pooling  # noqa: F401  (each registers its operators)
from fxshard.strategies.tensors import (  # noqa: F401  (each registers its operators)
    copies,
    creation,
    dims,
    indexing,
    joining,
    local_region,
    pointwise,
    random,
    reductions,
    replicated_only,
    slicing,
    views,
)

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
    "outputs_from",
    "own_collectives",
    "pointwise_rule",
    "register",
    "registered_ops",
    "rule",
    "registered_user_rules",
    "sharding_function",
]
