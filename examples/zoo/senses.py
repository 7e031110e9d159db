"""Models of images, of sound, and of images with text."""

from __future__ import annotations

from typing import Any

import torch

from zoo.architecture import ANSWER, BATCH, CLASSES, LENGTH, VOCABULARY, Architecture, Inputs
from zoo.text import NO_DROPOUT, tokens

SIZE = 32


def images() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, SIZE, SIZE)}


def classifier(model_class: str, config: dict[str, Any], **options: Any) -> Architecture:
    return Architecture(model_class, config | {"num_labels": CLASSES}, images, (), **options)


LAYERS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
VIT = LAYERS | NO_DROPOUT | {"image_size": SIZE, "patch_size": 8}

VISION: dict[str, Architecture] = {
    "ViT": classifier("ViTForImageClassification", VIT),
    "DeiT": classifier("DeiTForImageClassification", VIT),
    "BEiT": classifier(
        "BeitForImageClassification",
        VIT | {"drop_path_rate": 0.0},
        variant={"use_relative_position_bias": True},
    ),
    "Swin": classifier(
        "SwinForImageClassification",
        NO_DROPOUT
        | {"image_size": SIZE, "patch_size": 4, "embed_dim": 8, "depths": [2, 2]}
        | {"num_heads": [2, 2], "window_size": 4, "drop_path_rate": 0.0},
    ),
    "ConvNext": classifier(
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.0},
    ),
    "ResNet": classifier(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"},
        mixes_samples=True,  # batch norm
    ),
    "SegFormer": Architecture(
        "SegformerForSemanticSegmentation",
        NO_DROPOUT
        | {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "strides": [4, 2]}
        | {"hidden_sizes": [8, 16], "patch_sizes": [7, 3], "num_attention_heads": [1, 2]}
        | {"mlp_ratios": [2, 2], "decoder_hidden_size": 8, "num_labels": CLASSES}
        | {"drop_path_rate": 0.0, "classifier_dropout_prob": 0.0},
        images,
        (SIZE // 4, SIZE // 4),
        mixes_samples=True,  # batch norm in the decoder
    ),
    "CLIP": Architecture(
        "CLIPModel",
        {
            "projection_dim": 8,
            "text_config": LAYERS
            | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 1},
            "vision_config": LAYERS | {"image_size": SIZE, "patch_size": 16},
        },
        lambda: tokens() | images(),
        None,
        uncovered=("logit_scale",),
        mixes_samples=True,  # each image against every text
    ),
}
"""Name -> architecture."""

SPEECH: dict[str, Architecture] = {
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, "num_mel_bins": 8, "d_model": 16, "dropout": 0.0}
        | {"encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        | {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
        | {"max_source_positions": 10, "max_target_positions": 16}
        | {"decoder_start_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
        lambda: {
            "input_features": torch.randn(BATCH, 8, 20),
            "decoder_input_ids": torch.randint(2, VOCABULARY, (BATCH, ANSWER)),
        },
        (ANSWER,),
        uncovered=("encoder.embed_positions.weight",),  # sinusoids, frozen
    ),
    "wav2vec 2.0": Architecture(
        "Wav2Vec2ForSequenceClassification",
        LAYERS
        | {"vocab_size": VOCABULARY, "conv_dim": [8, 8], "conv_stride": [5, 4]}
        | {"conv_kernel": [10, 8], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4}
        | {"num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "num_labels": CLASSES}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
        | {"feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0}
        | {"mask_time_prob": 0.0},
        lambda: {"input_values": torch.randn(BATCH, 60 * LENGTH)},
        (),
        uncovered=(  # weight norm; the mask's vector is for pretraining
            "pos_conv_embed.conv.parametrizations.weight.original0",
            "pos_conv_embed.conv.parametrizations.weight.original1",
        ),
    ),
}
"""Name -> architecture."""
