"""Audio models of Hugging Face: speech to text, and classification of sounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bench.families.family import LABELS, TINY, Case, Family, Loss, config_of, tokens, warmed

SAMPLES = 400


def transcribed(model_type: str, dropout: bool, **changes: Any) -> Case:
    """Spectrograms (b, mel, frames) to text."""
    from transformers import AutoModelForSpeechSeq2Seq

    config = config_of(model_type, dropout, use_cache=False, **changes)
    ids = tokens()
    inputs = {
        "input_features": torch.randn(4, config.num_mel_bins, 2 * config.max_source_positions),
        "decoder_input_ids": ids,
        "target": ids,
    }
    return Loss(AutoModelForSpeechSeq2Seq.from_config(config)), (), inputs


def heard(model_type: str, dropout: bool, **changes: Any) -> Case:
    """Wave forms (b, samples) to one class."""
    from transformers import AutoModelForAudioClassification

    config = config_of(model_type, dropout, num_labels=LABELS, **changes)
    inputs = {"input_values": torch.randn(4, SAMPLES), "target": torch.randint(LABELS, (4,))}
    model = AutoModelForAudioClassification.from_config(config)
    for module in model.modules():
        if hasattr(module, "_requires_grad"):  # else the forward calls requires_grad_ on the waves, which is untraceable
            module._requires_grad = False
    warmed(model, input_values=inputs["input_values"])
    return Loss(model), (), inputs


def spectrum_classes(model_type: str, dropout: bool, **changes: Any) -> Case:
    """Spectrograms (b, frames, mel) to one class."""
    from transformers import AutoModelForAudioClassification

    config = config_of(model_type, dropout, num_labels=LABELS, **changes)
    inputs = {"input_values": torch.randn(4, config.max_length, config.num_mel_bins), "target": torch.randint(LABELS, (4,))}
    return Loss(AutoModelForAudioClassification.from_config(config)), (), inputs


WHISPER = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
WHISPER |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}
WHISPER |= {"vocab_size": TINY["vocab_size"], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WAVES = {**TINY, "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embeddings": 4}
WAVES |= {"num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "layerdrop": 0.0, "num_feat_extract_layers": 2}
WAVES |= {"classifier_proj_size": 8}
AST = {name: TINY[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
AST |= {"max_length": 24, "num_mel_bins": 16, "patch_size": 8, "time_stride": 8, "frequency_stride": 8}

FAMILIES = (
    Family("whisper", "audio", partial(transcribed, "whisper", **WHISPER)),
    Family("wav2vec2", "audio", partial(heard, "wav2vec2", **WAVES)),
    Family("hubert", "audio", partial(heard, "hubert", **WAVES)),
    Family("wavlm", "audio", partial(heard, "wavlm", **WAVES)),
    Family("audio-spectrogram-transformer", "audio", partial(spectrum_classes, "audio-spectrogram-transformer", **AST)),
)
