"""flex_attention in a captured graph as the plain operators of its math form, which have rules and a backward."""

from __future__ import annotations

from torch import fx

from fxshard._torch_compat.flex_attention import flex_attention_in_plain_operators, is_flex_attention


def expand_flex_attention(captured: fx.GraphModule) -> None:
    """Replaces each ``flex_attention`` of a Dynamo graph by softmax(mask(score_mod(scale q k^T))) v, with all scores in memory.

    Only the function of a block mask is used: its lists of blocks let a kernel skip work, but do not change the result.
    """
    calls = [n for n in captured.graph.nodes if is_flex_attention(n.target)]
    if not calls:
        return
    for node in calls:
        query, key, value, score_mod, mask, *rest = node.args
        node.args = (query, key, value, score_mod, (mask[-1],), *rest)
        node.target = flex_attention_in_plain_operators()
    for node in reversed(list(captured.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            captured.graph.erase_node(node)
    captured.delete_all_unused_submodules()
    used = {n.target for n in captured.graph.nodes if n.op == "get_attr"}
    for name, _ in list(captured.named_buffers(recurse=False, remove_duplicate=False)):
        if name not in used:
            delattr(captured, name)
    captured.recompile()
