"""Language models: decoders, encoders, both, state spaces, mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch

from zoo.architecture import ANSWER, BATCH, LENGTH, VOCABULARY, Architecture, Inputs


def tokens() -> Inputs:
    return {"input_ids": torch.randint(2, VOCABULARY, (BATCH, LENGTH))}


def tokens_and_mask() -> Inputs:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, -2:] = 0  # one sample is shorter
    return tokens() | {"attention_mask": mask}


def question_and_answer() -> Inputs:
    return tokens() | {"decoder_input_ids": torch.randint(2, VOCABULARY, (BATCH, ANSWER))}


SPECIAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
# Two query heads share a key and a value: grouped attention.
LLAMA = SPECIAL | SMALL | {"num_key_value_heads": 2, "head_dim": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = SMALL | NO_DROPOUT | {"vocab_size": VOCABULARY}
EXPERTS = LLAMA | {"num_experts_per_tok": 2, "experts_implementation": "eager"}


def decoder(model_class: str, config: dict[str, Any], **options: Any) -> Architecture:
    return Architecture(model_class, config, tokens, (LENGTH,), **options)


def encoder(model_class: str, config: dict[str, Any], **options: Any) -> Architecture:
    return Architecture(model_class, config, tokens_and_mask, (LENGTH,), **options)


TEXT: dict[str, Architecture] = {
    "GPT-2": decoder(
        "GPT2LMHeadModel",
        SPECIAL
        | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "GPT-NeoX": decoder("GPTNeoXForCausalLM", SPECIAL | SMALL),
    "OPT": decoder(
        "OPTForCausalLM",
        SPECIAL
        | SMALL
        | {"pad_token_id": 1, "eos_token_id": 2, "word_embed_proj_dim": 16}
        | {"ffn_dim": 24, "dropout": 0.0},
    ),
    "Llama": decoder("LlamaForCausalLM", LLAMA),
    "Qwen2": decoder("Qwen2ForCausalLM", LLAMA),
    "Qwen3": decoder("Qwen3ForCausalLM", LLAMA),
    "Mistral": decoder("MistralForCausalLM", LLAMA | {"sliding_window": 4}),
    "Gemma 2": decoder("Gemma2ForCausalLM", LLAMA),
    "Phi-3": decoder("Phi3ForCausalLM", LLAMA),
    "Mixtral": decoder("MixtralForCausalLM", EXPERTS | {"num_local_experts": 4}, picks_rows=True),
    "Mixtral, grouped": decoder(  # the kernel that transformers takes by default
        "MixtralForCausalLM",
        EXPERTS | {"num_local_experts": 4, "experts_implementation": "grouped_mm"},
        uncovered=("experts.gate_up_proj", "experts.down_proj"),
        dtype=torch.float32,  # torch has no grouped_mm in float64
    ),
    "Qwen3-MoE": decoder(
        "Qwen3MoeForCausalLM",
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 8},
        picks_rows=True,
    ),
    "Mamba": decoder(
        "MambaForCausalLM",
        SPECIAL | {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 2},
        uncovered=("mixer.A_log",),
    ),
    "Mamba-2": decoder(
        "Mamba2ForCausalLM",
        SPECIAL
        | {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4}
        | {"head_dim": 8, "n_groups": 2, "chunk_size": 4},
        uncovered=("mixer.A_log",),
    ),
    "BERT": encoder("BertForMaskedLM", BERT),
    "RoBERTa": encoder("RobertaForMaskedLM", BERT | {"pad_token_id": 1}),
    "DistilBERT": encoder(
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}
        | {"max_position_embeddings": 16, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "ALBERT": encoder("AlbertForMaskedLM", BERT | {"embedding_size": 8}),
    "ELECTRA": encoder("ElectraForMaskedLM", BERT | {"embedding_size": 8}),
    "DeBERTa-v2": encoder(
        "DebertaV2ForMaskedLM",
        BERT,
        variant={"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "T5": Architecture(
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
        | {"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0},
        question_and_answer,
        (ANSWER,),
    ),
    "BART": Architecture(
        "BartForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        | {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16}
        | {"dropout": 0.0, "decoder_start_token_id": 0, "eos_token_id": 1}
        | {"forced_eos_token_id": None},
        question_and_answer,
        (ANSWER,),
    ),
}
"""Name -> architecture."""
