"""Keys of a config.json without effect on what a model computes of a text, by the reason why.

A key stands here for all families; one that a class stores and ignores, and other classes do not,
stands in the family's file (`Family.ignores`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "it names a class, a file, a type or a program": (
        *("_name_or_path", "architectures", "auto_map", "base_model", "dtype", "model_name"),
        *("model_type", "name_or_path", "torch_dtype", "transformers_version", "unsloth_fixed"),
        *("unsloth_version", "init_device", "_commit_hash", "language_model_type"),
    ),
    "tensors, and how they are stored, say it": (
        *("compression_config", "quantization", "quantization_config", "expert_dtype"),
        "pretraining_dtype",
    ),
    "it is a token that texts begin, end or are filled up with": (
        *("bos_token_id", "bos_token", "cls_token_id", "decoder_start_token_id", "eod_token_id"),
        *("eos_token_id", "eos_token", "forced_bos_token_id", "forced_eos_token_id"),
        *("image_token_id", "mask_token_id", "pad_id", "pad_token_id", "sep_token_id", "unk_id"),
        *("im_start_id", "im_end_id", "eod_id", "sep_id", "num_media_ids", "tokenizer_class"),
    ),
    "weights were drawn by it before training": (
        *("init_std", "initializer_cutoff_factor", "initializer_factor", "initializer_range"),
        *("embedding_initializer_range", "rescale_prenorm_residual", "time_step_floor"),
        *("time_step_max", "time_step_min", "init_cutoff_factor", "init_method", "init_config"),
        *("reduce_scale", "embd_init_scale"),
    ),
    "it is dropout or noise of training": (
        *("activation_dropout", "attention_dropout", "attention_probs_dropout_prob"),
        *("attn_dropout", "attn_pdrop", "classifier_dropout", "dropout", "dropout_rate"),
        *("embd_pdrop", "emb_pdrop", "embed_dropout", "embedding_dropout", "ffn_dropout"),
        *("hidden_dropout", "hidden_dropout_prob", "input_jitter_noise", "layerdrop"),
        *("mlp_dropout", "resid_dropout", "resid_pdrop", "residual_dropout"),
        *("router_jitter_noise", "moe_dropout", "use_dropout", "classifier_dropout_prob"),
    ),
    "it is a loss, or another part of training": (
        *("aux_loss_alpha", "aux_loss_free", "moe_aux_loss_coeff", "router_aux_loss_coef"),
        *("router_aux_loss_coeff", "router_z_loss_coef", "seq_aux", "sparse_pred_ignore_index"),
        *("sparse_prediction", "z_loss_coefficient", "router_bias_update_speed"),
        *("embedding_fraction", "gradient_checkpointing", "gradient_checkpointing_use_reentrant"),
        *("load_balance_coeff", "mtp_loss_scaling_factor", "router_z_loss_coeff"),
    ),
    "it says what a call returns, or keeps for the next one": (
        *("cache_implementation", "keys_to_ignore_at_inference", "mamba_ssm_cache_dtype"),
        *("num_logits_to_keep", "output_attentions", "output_hidden_states", "output_past"),
        *("output_router_logits", "return_dict", "use_cache", "use_return_dict"),
        *("calc_logits_for_entire_prompt", "is_encoder_decoder", "output_scores"),
    ),
    "it says how something is computed, and not what": (
        *("attn_implementation", "attention_softmax_in_fp32", "chunk_size"),
        *("chunk_size_feed_forward", "deterministic_flash_attn", "enable_moe_fp32_combine"),
        *("ep_size", "flash_attention", "fused_bias_fc", "mamba_chunk_size"),
        *("moe_shared_expert_overlap", "pretraining_tp", "reorder_and_upcast_attn"),
        *("residual_in_fp32", "scale_attention_softmax_in_fp32", "slow_but_exact"),
        *("use_flash_attn", "use_flash_attention", "use_mamba_kernels", "reference_compile"),
        *("_attn_implementation", "_flash_attn_2_enabled", "_experts_implementation"),
        *("use_mem_eff_path", "is_causal_mask", "mamba_kernel", "moe_implementation"),
    ),
    "it belongs to a class with another head": (
        *("classifier_pooling", "finetuning_task", "id2label", "label2id", "num_labels"),
        *("problem_type", "summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params"),
        *("classification_head_dropout", "label_smoothing"),
    ),
    "it says how texts are generated, which generation_config.json does": (
        *("assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids"),
        *("begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
        *("encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff"),
        *("eta_cutoff", "exponential_decay_length_penalty", "length_penalty", "max_length"),
        *("min_length", "no_repeat_ngram_size", "num_assistant_tokens", "top_p"),
        *("num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "top_k"),
        *("num_return_sequences", "prefix", "remove_invalid_values", "repetition_penalty"),
        *("return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature"),
        *("typical_p", "max_new_tokens", "n_words", "use_bfloat16", "pruned_heads"),
        *("tie_encoder_decoder", "torchscript", "cross_attention_hidden_size"),
    ),
}
"""The keys, by reason."""

REASONS: Mapping[str, str] = {k: reason for reason, keys in WITHOUT_EFFECT.items() for k in keys}
"""The reason of each key."""


def find_unknown_keys(stored: Mapping[str, Any], known: Iterable[str]) -> tuple[str, ...]:
    """Return the keys that are neither `known` nor without effect, and not null."""
    names = {*known, *REASONS}
    return tuple(sorted(k for k, v in stored.items() if v is not None and k not in names))
