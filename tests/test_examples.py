"""The example models: parameter counts and names, and results against Hugging Face's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fxshard.cli.arguments.factory import load_model

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "llama", raising=False)
    return importlib.import_module("llama")


@pytest.mark.parametrize("factory", ["training", "inference"])
def test_llama3_8b_has_eight_billion_parameters_and_none_in_memory(factory: str) -> None:
    model, args, _ = load_model(f"{EXAMPLES / 'llama3_8b.py'}:{factory}")
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert all(t.is_meta for t in (*model.parameters(), *args))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert "layers.3.attention.wq.weight" in dict(model.named_parameters())


def test_small_llama_equals_hugging_face(llama: ModuleType) -> None:
    """The same weights in transformers' Llama give the same logits and loss."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = llama.Llama.small().double()
    c = ours.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab,
            hidden_size=c.dim,
            intermediate_size=c.ffn,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            rms_norm_eps=c.eps,
            rope_theta=c.rope_base,
        )
    ).double()
    names = {"attention.w": "self_attn.", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj"}
    names |= {"feed_forward.w3": "mlp.up_proj", "ffn_norm": "post_attention_layernorm", "attention_norm": "input_layernorm"}

    def their_name(name: str) -> str:
        for old, new in names.items():
            if old in name:
                name = name.replace(old, new)
                name = name.replace(".weight", "_proj.weight") if new == "self_attn." else name
        name = name.replace("tok_embeddings", "embed_tokens")
        return name.replace("output.", "lm_head.") if name.startswith("output.") else f"model.{name}"

    theirs.load_state_dict({their_name(k): v for k, v in ours.state_dict().items()})
    tokens = torch.randint(0, c.vocab, (2, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = theirs(inputs).logits
    torch.testing.assert_close(ours(inputs), expected, rtol=1e-6, atol=1e-6)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(ours(inputs, targets), loss, rtol=1e-6, atol=1e-6)


def test_small_accepts_known_options_only(llama: ModuleType) -> None:
    assert len(llama.Llama.small(layers=3).layers) == 3
    with pytest.raises(TypeError, match="depth"):
        llama.Llama.small(depth=3)


def test_the_custom_operator_example(llama: ModuleType, own_rules: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The example compares itself with one device; its rules are used."""
    importlib.import_module("custom_operator").main()
    said = capsys.readouterr().out
    assert "gate runs as S(0)S(2), RS(0) -> S(0)S(2); nodes without a rule: 0" in said and "4 ranks compute the same as one device" in said
