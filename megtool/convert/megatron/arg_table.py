"""Every arg of Megatron-LM and every field of megatron-core's configurations, by its meaning.

An arg is read as fields of ModelConfig, leaves the function of the model as it is, or changes it in
a way that megtool cannot describe (`megtool.convert.megatron.settings` has these, and their neutral
values). Sources: Megatron-LM 0.16.1, 0.19.0 and main of August 2026: the parser of
training/arguments.py, TransformerConfig, MLATransformerConfig, ModelParallelConfig, and the
constructors of GPTModel, MambaModel, HybridModel, BertModel and T5Model. The rest are args of older
releases, of Megatron-Bridge, and of megtool.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _table(text: str) -> dict[str, tuple[str, ...]]:
    rows = (line.split() for line in text.strip().splitlines())
    return {name: tuple(fields) for name, *fields in rows}


READ: dict[str, tuple[str, ...]] = _table(
    """
    num_layers num_layers
    hidden_size hidden_size
    ffn_hidden_size ffn_hidden_size
    num_attention_heads num_heads
    num_query_groups num_kv_heads
    group_query_attention num_kv_heads
    kv_channels head_dim
    v_head_dim v_head_dim
    vocab_size vocab_size
    padded_vocab_size vocab_size
    max_position_embeddings max_positions
    max_sequence_length max_positions
    seq_length max_positions
    untie_embeddings_and_output_weights tied_embeddings
    share_embeddings_and_output_weights tied_embeddings
    num_tokentypes num_token_types
    decoder_num_layers num_decoder_layers
    normalization norm
    layernorm_epsilon norm_eps
    norm_epsilon norm_eps
    layernorm_zero_centered_gamma zero_centered_norm
    apply_layernorm_1p zero_centered_norm
    qk_layernorm qk_norm
    qk_l2_norm qk_l2_norm qk_l2_norm_unrotated
    add_bias_linear qkv_bias attn_out_bias mlp_bias
    add_qkv_bias qkv_bias
    attention_output_gate attn_output_gate
    softmax_scale softmax_scale
    softmax_type attn_sinks attn_zero_sinks
    window_size window_size
    window_attn_skip_freq window_skip_freq
    swiglu activation gated
    squared_relu activation
    quick_geglu activation gated
    openai_gelu activation
    activation_func activation
    gated_linear_unit gated
    bias_gelu_fusion activation
    bias_activation_fusion activation
    use_legacy_models activation
    activation_func_clamp_value activation_limit
    glu_linear_offset glu_offset
    position_embedding_type position_embedding
    add_position_embedding position_embedding
    use_rotary_position_embeddings position_embedding
    alibi_bias_max alibi_bias_max
    rotary_base rope_base
    rotary_percent rotary_percent
    rotary_interleaved rope_interleaved
    use_rope_scaling rope_scaling
    rope_scaling rope_scaling
    rope_scaling_factor rope_scaling
    rotary_seq_len_interpolation_factor rope_scaling
    seq_len_interpolation_factor rope_scaling
    no_rope_freq no_rope_layers
    relative_attention_num_buckets relative_num_buckets
    relative_attention_max_distance relative_max_distance
    rope_type rope_scaling
    rotary_scaling_factor rope_scaling
    original_max_position_embeddings rope_scaling
    beta_fast rope_scaling
    beta_slow rope_scaling
    mscale rope_scaling
    mscale_all_dim rope_scaling softmax_scale
    yarn_rotary_scaling_factor rope_scaling
    yarn_original_max_position_embeddings rope_scaling
    yarn_beta_fast rope_scaling
    yarn_beta_slow rope_scaling
    yarn_mscale rope_scaling
    yarn_mscale_all_dim rope_scaling
    yarn_correction_range_round_to_int rope_scaling
    use_mup embedding_scale logit_scale softmax_scale
    mup_base_hidden_size logit_scale
    mup_embedding_mult embedding_scale
    mup_output_mult logit_scale
    mup_base_head_dim softmax_scale
    mup_attn_scale_power softmax_scale
    num_experts num_experts
    num_moe_experts num_experts
    moe_ffn_hidden_size moe_ffn_hidden_size
    moe_router_topk num_experts_per_token
    moe_layer_freq moe_layer_freq
    moe_latent_size moe_latent_size
    moe_shared_expert_intermediate_size shared_ffn_hidden_size
    moe_shared_expert_gate shared_expert_gate
    moe_router_load_balancing_type router_score router_pre_softmax
    moe_router_score_function router_score
    moe_router_pre_softmax router_pre_softmax
    moe_router_topk_scaling_factor router_scaling
    moe_router_num_groups router_num_groups
    moe_router_group_topk router_topk_groups
    moe_router_enable_expert_bias router_expert_bias
    moe_router_dtype router_fp32
    moe_apply_probs_on_input router_scales_input
    moe_n_hash_layers num_hash_layers
    mtp_num_layers num_mtp_layers
    mtp_use_repeated_layer num_mtp_layers
    multi_latent_attention kv_lora_rank
    q_lora_rank q_lora_rank
    kv_lora_rank kv_lora_rank
    qk_head_dim qk_nope_head_dim
    qk_pos_emb_head_dim qk_rope_head_dim
    hybrid_layer_pattern layer_kinds mtp_kind
    hybrid_override_pattern layer_kinds
    mtp_hybrid_override_pattern mtp_kind
    is_hybrid_model layer_kinds
    hybrid_attention_ratio layer_kinds
    hybrid_mlp_ratio layer_kinds
    falconh1_ratio layer_kinds
    rmsnorm mamba_norm
    mamba_num_heads mamba_num_heads
    mamba_head_dim mamba_head_dim
    mamba_state_dim mamba_state_dim
    mamba_num_groups mamba_num_groups
    experimental_attention_variant layer_kinds
    linear_attention_freq layer_kinds
    linear_conv_kernel_dim linear_conv_kernel
    linear_key_head_dim linear_key_head_dim
    linear_value_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_key_heads
    linear_num_value_heads linear_num_value_heads
    kda_two_stage_gates layer_kinds
    kda_safe_gate layer_kinds
    short_conv_kernel_dim short_conv_taps
    short_conv_bias short_conv_bias
    heterogeneous_layers_config_encoded_json layer_sizes
    layer_sizes layer_sizes
    global_head_dim layer_sizes
    attention_k_eq_v tied_values
    attention_value_scale attn_value_scale
    num_kv_shared_layers shared_kv
    hidden_size_per_layer_input layer_input_size
    rotary_base_local rope_local_base
    swa_num_query_groups window_sinks
    dsa_indexer_n_heads index_num_heads
    dsa_indexer_head_dim index_head_dim
    dsa_indexer_topk index_topk
    dsa_indexer_topk_freq shared_index_layers
    dsa_indexer_skip_topk_offset shared_index_layers
    dsa_indexer_rope_interleaved index_interleaved
    enable_hyper_connections hyper_streams
    enable_mhc_connections hyper_streams
    num_residual_streams hyper_streams
    mhc_num_residual_streams hyper_streams
    mhc_sinkhorn_iterations hyper_iterations
    csa_compress_ratios compress_ratios
    csa_compress_rotary_base compress_rope_base
    csa_window_size window_size
    o_groups out_groups
    o_lora_rank out_lora_rank
    """
)
"""Args that `config_from_args` reads, and the fields that they say."""

NO_EFFECT: dict[str, frozenset[str]] = {
    "another arg, a tensor or the kind of model says it": _names(
        """
        actual_vocab_size add_binary_head add_decoder add_encoder apply_lm_head bert_binary_head
        bert_embedder_type config deprecated_use_mcore_models do_test do_train do_valid
        encoder_config encoder_num_layers hetereogenous_dist_checkpoint heterogeneous_block_specs
        hybrid_stack_spec iteration make_vocab_size_divisible_by mamba_stack_spec model_type
        mtp_block_spec mtp_standalone mup_width_mult output_bert_embeddings output_layer_bias
        pad_vocab_size parallel_output pg_collection post_process pre_process return_embeddings
        scatter_embedding_sequence_parallel transformer_decoder_layer_spec
        transformer_encoder_layer_spec transformer_impl transformer_layer_spec use_mcore_models
        vp_stage
        """
    ),
    "it means something beside an arg that is refused": _names(
        "gdp_num_householder moe_pad_expert_input_to_capacity moe_token_drop_policy"
    ),
    "texts alone have one position a token": _names("mrope_section"),
    "megatron-core has no code that reads it": _names(
        """
        apply_query_key_layer_scaling moe_router_topk_limited_devices moe_token_dropping test_mode
        """
    ),
    "how the model and its gradients lie on ranks": _names(
        """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split align_grad_reduce
        align_param_gather async_tensor_model_parallel_allreduce batch_p2p_comm batch_p2p_sync
        clone_scatter_output_in_embedding context_parallel_size cp_comm_type create_all_gather_group
        data_parallel_random_init data_parallel_sharding_strategy data_parallel_size
        ddp_average_in_collective ddp_bucket_size DDP_impl ddp_num_buckets
        ddp_pad_buckets_for_high_nccl_busbw ddp_param_name_patterns_for_fp32_local_accumulation
        ddp_reduce_scatter_with_fp32_accumulation deallocate_pipeline_outputs
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        defer_embedding_wgrad_compute delay_grad_reduce delay_param_gather delay_wgrad_compute
        distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init
        dump_param_to_param_group_map enable_full_sharding_in_hsdp enable_gloo_process_groups
        encoder_pipeline_model_parallel_size encoder_tensor_model_parallel_size
        ep_overlap_early_attn_memory_release expert_gtp_weight_remat_size expert_model_parallel_size
        expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size fake_process_group
        fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer fsdp_manual_registration
        grad_sync_func gradient_reduce_div_fusion gtp_expert_remat_nccl_ub gtp_remat_nccl_ub
        gtp_remat_opt_in_modules gtp_remat_reduce_scatter_with_fp32_accumulation
        gtp_weight_remat_size hierarchical_context_parallel_sizes high_priority_a2a_comm_stream
        high_priority_stream_groups hybrid_context_parallel inprocess_active_world_size
        lazy_mpu_init local_rank max_seqlen_per_dp_cp_rank
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_grad_comm_dtype
        megatron_fsdp_max_pool_double_buffer megatron_fsdp_version
        microbatch_group_size_per_vp_stage model_parallel_size moe_extended_tp moe_grouped_gemm
        moe_ncclep_static_shape moe_ncclep_zero_copy moe_shared_expert_overlap
        moe_single_grouped_bias moe_single_grouped_weight moe_use_grouped_tensor
        moe_use_legacy_grouped_gemm nccl_communicator_config_path nccl_ub no_sync_func
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        outer_dp_sharding_strategy overlap_dispatch_backward_with_experts_wgrad overlap_grad_reduce
        overlap_moe_expert_parallel_comm overlap_p2p_comm overlap_p2p_comm_warmup_flush
        overlap_param_gather param_sync_func per_block_parameters
        pipeline_model_parallel_comm_backend pipeline_model_parallel_layout
        pipeline_model_parallel_size pipeline_model_parallel_split_rank rampup_batch_size rank
        scatter_gather_tensors_in_pipeline sequence_parallel sharp_enabled_group
        standalone_embedding_stage strict_fsdp_dtensor_load suggested_communication_unit_size
        tensor_model_parallel_size tensor_parallel_num_weight_shards
        torch_fsdp2_reshard_after_forward tp_comm_atomic_ag tp_comm_atomic_rs
        tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap
        tp_comm_overlap_ag tp_comm_overlap_cfg tp_comm_overlap_disable_fc1
        tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
        tp_comm_split_rs transformer_pipeline_model_parallel_size use_contiguous_buffers_in_ddp
        use_custom_fsdp use_gloo_process_groups use_grouped_gemm_for_dense_mlp
        use_grouped_gemm_for_shared_expert use_layer_wise_param_layout use_megatron_fsdp use_nccl_ub
        use_ring_exchange_p2p use_sharp use_torch_fsdp2 use_tp_pp_dp_mapping
        virtual_pipeline_model_parallel_size wgrad_deferral_limit world_size
        """
    ),
    "when activations and weights are kept, recomputed or moved": _names(
        """
        _cpu_offloading_context activation_offload_fraction checkpoint_activations
        checkpoint_num_layers cpu_offloading cpu_offloading_activations
        cpu_offloading_double_buffering cpu_offloading_num_layers
        cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights
        delta_offload_bytes_across_pp_ranks distribute_checkpointed_activations
        distribute_saved_activations fine_grained_activation_offloading
        gdp_num_chunk_states_to_recompute gradient_accumulation_fusion mhc_recompute_layer_num
        min_offloaded_tensor_size mlp_chunks_for_training moe_layer_recompute moe_paged_stash
        moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_page_size num_microbatches_with_partial_activation_checkpoints
        offload_modules optimizer_cpu_offload optimizer_offload_fraction recompute_activations
        recompute_granularity recompute_method recompute_modules recompute_num_layers
        use_torch_optimizer_for_cpu_offload
        """
    ),
    "another rounding of the same function": _names(
        """
        activation_func_fp8_input_store attention_softmax_in_fp32 autocast_dtype
        batch_invariant_backend batch_invariant_mode bf16 disable_bf16_reduced_precision_matmul
        dsa_indexer_k_norm_fp32 enable_autocast first_last_layers_bf16 fp16 fp16_lm_cross_entropy
        fp32_residual_connection fp4 fp4_param fp4_param_gather fp4_quantizer_factory fp4_recipe fp8
        fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_format fp8_interval
        fp8_margin fp8_multi_head_attention fp8_output_proj fp8_param fp8_param_gather
        fp8_quantizer_factory fp8_recipe fp8_wgrad grad_reduce_in_bf16 keep_fp8_transpose_cache
        keep_fp8_transpose_cache_when_using_custom_fsdp kitchen_attention_backend
        kitchen_config_file kitchen_recipe_number main_params_dtype mamba_training_ssm_states_dtype
        megatron_fsdp_main_params_dtype moe_combine_bwd_dtype moe_dispatch_fwd_dtype
        moe_router_padding_for_fp8 moe_router_padding_for_quantization num_layers_at_end_in_bf16
        num_layers_at_start_in_bf16 onnx_safe params_dtype pipeline_dtype quant_recipe
        reuse_grad_buf_for_mxfp8_param_ag te_precision_config_file tp_only_amax_red use_kitchen
        use_kitchen_attention
        """
    ),
    "another kernel for the same function": _names(
        """
        apply_rope_fusion attention_backend bias_swiglu_fusion config_logger_dir
        cross_entropy_fusion_impl cross_entropy_loss_fusion disable_jit_fuser
        disable_parameter_transpose_cache dsa_indexer_rotate_activation dsa_kernel_backend
        flash_attention_version fused_residual_rmsnorm fused_single_qkv_rope gdp_cutedsl_kernel
        masked_softmax_fusion memory_efficient_layer_norm moe_deepep_num_sms moe_enable_deepep
        moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
        moe_hybridep_pad_uneven_dispatch_inputs moe_per_layer_logging moe_permute_fusion
        moe_permute_fusion_into_hybridep moe_router_fusion moe_token_dispatcher_type
        no_persist_layer_norm persist_layer_norm use_flash_attn use_fused_weighted_squared_relu
        use_mamba_mem_eff_path use_te_activation_func use_transformer_engine_op_fuser
        """
    ),
    "losses, dropout and updates of training alone": _names(
        """
        attention_dropout bias_dropout_fusion calculate_per_token_loss dsa_indexer_loss_coeff
        dsa_indexer_use_sparse_loss freeze_all_layers hidden_dropout moe_aux_loss_coeff
        moe_enable_routing_replay moe_router_bias_update_rate moe_router_quantile_balancing_ema
        moe_z_loss_coeff mtp_detach_heads mtp_loss_scaling_factor qk_clip qk_clip_alpha
        qk_clip_threshold
        """
    ),
    "values before training": _names(
        """
        embedding_init_method embedding_init_method_std init_method init_method_std
        init_method_xavier_uniform init_model_with_meta_device mhc_init_gating_factor
        moe_upcycling_granularity moe_use_upcycling output_layer_init_method perform_initialization
        use_cpu_initialization
        """
    ),
    "the optimizer, its schedule and its numbers": _names(
        """
        accumulate_allreduce_grads_in_fp32 adam_beta1 adam_beta2 adam_eps apply_wd_to_qk_layernorm
        check_for_large_grads check_for_nan_in_loss_and_grad clip_grad decoupled_lr decoupled_min_lr
        distrib_optim_fully_reshardable_mem_efficient end_weight_decay exp_avg_dtype
        exp_avg_sq_dtype experimental_attention_variant_loss_scale_func finalize_model_grads_func
        grad_scale_func hysteresis initial_loss_scale lion_beta1 lion_beta2 loss_scale
        loss_scale_window lr lr_decay_iters lr_decay_samples lr_decay_style lr_warmup_fraction
        lr_warmup_init lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples
        lr_wsd_decay_style main_grads_dtype megatron_fsdp_main_grads_dtype min_loss_scale min_lr
        moe_grad_scale_func mtp_grad_scale_func muon_coefficient_type muon_extra_scale_factor
        muon_fp32_matmul_prec muon_momentum muon_nesterov muon_num_ns_steps muon_scalar_optimizer
        muon_scale_mode muon_split_qkv muon_tp_mode muon_use_nesterov muon_use_syrk
        no_weight_decay_cond_type num_distributed_optimizer_instances optimizer
        overlap_cpu_optimizer_d2h_h2d overlap_param_gather_with_optimizer_step override_lr_scheduler
        override_opt_param_scheduler pin_cpu_grads pin_cpu_params sgd_momentum start_weight_decay
        use_checkpoint_lr_scheduler use_checkpoint_opt_param_scheduler use_distributed_optimizer
        use_layer_wise_distributed_optimizer use_precision_aware_optimizer warmup weight_decay
        weight_decay_incr_style
        """
    ),
    "the course of a run: batches, steps, seeds, restarts": _names(
        """
        _is_global_batch_size_explicitly_specified adlr_autoresume adlr_autoresume_interval
        batch_size calc_ft_timeouts check_for_spiky_loss
        check_weight_hash_across_dp_replicas_interval consumed_train_bins consumed_train_samples
        consumed_valid_samples curr_iteration decrease_batch_size_if_needed deterministic_mode
        empty_unused_memory_level enable_experimental enable_ft_package error_injection_rate
        error_injection_type eval_global_batch_size eval_interval eval_iters eval_micro_batch_size
        exit_duration_in_mins exit_interval exit_signal exit_signal_handler
        exit_signal_handler_for_training fault_injector_delay_start_iteration
        fault_injector_fault_delay fault_injector_fault_probabilities fault_injector_fault_types
        fault_injector_mtti_seconds fault_injector_num_ranks fault_injector_offset_seconds
        fault_injector_ranks fault_injector_seed ft_num_warmup_iters full_validation
        global_batch_size gpu_sniff_test_interval inprocess_completion_timeout
        inprocess_empty_cuda_cache inprocess_granularity inprocess_hard_timeout
        inprocess_heartbeat_interval inprocess_heartbeat_timeout inprocess_last_call_wait
        inprocess_max_iterations inprocess_monitor_process_interval
        inprocess_monitor_thread_interval inprocess_progress_watchdog_interval inprocess_restart
        inprocess_soft_timeout inprocess_termination_grace_time iterations_to_skip manual_gc
        manual_gc_eval manual_gc_interval micro_batch_size multiple_validation_sets
        num_floating_point_operations_so_far phase_transition_iterations rerun_mode seed skip_train
        skipped_train_samples start_eval_at_iter step_batch_size_schedule train_iters train_samples
        train_sync_interval validation_set_names
        """
    ),
    "texts, tokens and batches that a run read": _names(
        """
        allow_ambiguous_pad_tokens chat_template create_attention_mask_in_dataloader data_args_path
        data_cache_path data_impl data_path data_sharding dataloader_defer_npy_index_mmap
        dataloader_fast_cache_load dataloader_inter_document_masking dataloader_type
        decoder_seq_length encoder_seq_length eod_mask_loss exit_signal_handler_for_dataloader
        fim_data fim_eod_token fim_fragment_rate fim_middle_token fim_no_prefix fim_pad_token
        fim_prefix_token fim_rate fim_split_sample fim_spm_rate fim_suffix_token legacy_tokenizer
        mask_prob merge_file metadata_path mid_level_dataset_surplus mmap_bin_files mmap_warmup
        mock_data null_tokenizer_eod_id null_tokenizer_pad_id num_dataset_builder_threads
        num_workers object_storage_cache_path per_dataset_sequences_path per_split_data_args_path
        reset_attention_mask reset_position_ids s3_cache_path sample_rate sft
        sft_tokenizer_prompt_format short_seq_prob special_tokens split test_data_path
        tiktoken_num_special_tokens tiktoken_pattern tiktoken_special_tokens
        tokenizer_hf_include_special_tokens tokenizer_hf_no_include_special_tokens
        tokenizer_hf_no_use_fast tokenizer_hf_use_fast tokenizer_metadata tokenizer_model
        tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_sentencepiece_legacy
        tokenizer_special_tokens tokenizer_type train_data_path trust_remote_code use_gigatoken
        valid_data_path variable_seq_lengths vocab_extra_ids vocab_file
        """
    ),
    "how checkpoints are saved and loaded": _names(
        """
        async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm async_save
        async_strategy auto_detect_ckpt_format ckpt_assume_constant_structure ckpt_convert_format
        ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format ckpt_drop_redundant_extra_state
        ckpt_format ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_load_per_rank_objects ckpt_fully_parallel_load_process_group
        ckpt_fully_parallel_save ckpt_fully_parallel_save_deprecated
        ckpt_fully_parallel_save_process_group ckpt_load_validate_sharding_integrity
        ckpt_pg_tensors_cache_create ckpt_pg_tensors_cache_path ckpt_step dist_ckpt_format
        dist_ckpt_format_deprecated dist_ckpt_optim_fully_reshardable dist_ckpt_save_pre_mcore_014
        dist_ckpt_strictness dist_ckpt_workers exit_on_missing_checkpoint finetune load
        load_main_params_from_ckpt load_model_opt_format no_load_optim no_load_rng no_save_optim
        no_save_rng non_persistent_ckpt_type non_persistent_global_ckpt_dir
        non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir non_persistent_save_interval
        override_ckpt_iteration persistent_save_interval pretrained_checkpoint replication
        replication_factor replication_jump save save_activations_interval save_dgrads_interval
        save_interval save_params_interval save_retain_interval save_tokenizer_assets
        save_tokens_per_expert_interval save_wgrads_interval stream_ckpt_dequant use_checkpoint_args
        use_dist_ckpt use_dist_ckpt_deprecated use_mp_args_from_checkpoint_args
        use_persistent_ckpt_worker use_tokenizer_model_from_checkpoint_args verify_integrity
        """
    ),
    "Megatron's inference engine": _names(
        """
        cache_mla_latents cuda_graph_impl cuda_graph_modules cuda_graph_retain_backward_graph
        cuda_graph_scope cuda_graph_scope_deprecated cuda_graph_use_single_mempool
        cuda_graph_warmup_steps decode_only_cuda_graphs delay_offload_until_cuda_graph
        disable_chunked_prefill disable_symmetric_registration enable_chunked_prefill
        enable_cuda_graph external_cuda_graph flash_decode inference_batch_times_seqlen_threshold
        inference_coordinator_port inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_cuda_graph_scope inference_disable_ep_consensus
        inference_disable_triton_nvls_kernels inference_dynamic_batching
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_block_size
        inference_dynamic_batching_buffer_guaranteed_fraction
        inference_dynamic_batching_buffer_overflow_factor inference_dynamic_batching_buffer_size_gb
        inference_dynamic_batching_chunk_size inference_dynamic_batching_cuda_graph_max_tokens
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution
        inference_dynamic_batching_enable_prefix_caching inference_dynamic_batching_logprobs_mode
        inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_max_requests
        inference_dynamic_batching_max_requests_override inference_dynamic_batching_max_tokens
        inference_dynamic_batching_max_tokens_override inference_dynamic_batching_num_cuda_graphs
        inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_prefix_caching_routing_alpha
        inference_dynamic_batching_sampling_backend
        inference_dynamic_batching_track_generated_token_events
        inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_unified_memory_level inference_fuse_tp_communication
        inference_grouped_gemm_backend inference_logging_step_interval inference_max_batch_size
        inference_max_requests inference_max_seq_length inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type inference_sampling_seed inference_shards
        inference_text_gen_server_logging inference_use_synchronous_zmq_collectives
        mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype max_tokens_to_oom
        mlp_chunks_for_prefill moe_pad_experts_for_cuda_graph_inference nccl_all_reduce_for_prefill
        num_speculative_tokens offset_sampling_seed_by_dp_rank optimizer_cuda_graph
        symmetric_ar_type use_inference_optimized_layers use_legacy_static_engine
        """
    ),
    "logs, traces and profiles": _names(
        """
        app_tag_run_name app_tag_run_version barrier_with_L1_time disable_msc_deprecated
        disable_straggler_on_startup enable_msc enable_one_logger
        fine_grained_offloading_max_inflight_offloads flight_recorder_dump_on_timeout
        flight_recorder_dump_path flight_recorder_extra_dump_on_exec
        flight_recorder_include_only_active flight_recorder_include_stack_trace
        flight_recorder_trace_buffer_size inference_rng_tracker inference_wandb_logging
        inprocess_barrier_timeout log_batch_size_to_tensorboard log_device_memory_used log_energy
        log_interval log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard
        log_max_attention_logit log_memory_interval log_memory_to_tensorboard log_num_zeros_in_grad
        log_params_norm log_progress log_straggler log_throughput log_timers_to_tensorboard
        log_validation_ppl_to_tensorboard log_world_size_to_tensorboard logging_level logit_dtype
        memory_snapshot_path moe_routing_trace_capture_hidden_states
        moe_routing_trace_capture_logits moe_routing_trace_dump_weights
        moe_routing_trace_max_training_iters moe_routing_trace_path nvtx_ranges one_logger_async
        one_logger_entity one_logger_project one_logger_run_name otel_enabled otel_service_name
        otel_span_groups profile profile_ranks profile_step_end profile_step_start
        pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra
        pytorch_profiler_collect_shapes record_memory_history record_shapes
        result_rejected_tracker_filename run_workload_inspector_server straggler_ctrlr_port
        straggler_minmax_count te_rng_tracker tensorboard_dir tensorboard_log_interval
        tensorboard_queue_size timers timing_log_level timing_log_option use_pytorch_profiler
        use_te_rng_tracker wandb_entity wandb_exp_name wandb_project wandb_save_dir
        """
    ),
    "reinforcement learning and distillation": _names(
        """
        grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_entropy_term_weight
        grpo_filter_groups_with_same_reward grpo_group_size grpo_iterations grpo_kl_beta
        grpo_prompts_per_step grpo_samples_per_iteration langrl_env_config langrl_external_server
        langrl_inference_server_conversation_template langrl_inference_server_type
        logits_load_decode_threads logits_load_dir logits_load_ignore_errors
        logits_load_kd_loss_alpha logits_load_msc_prefetch_depth logits_load_prefetch_factor
        logits_save_dir logits_save_dtype logits_save_top_k logits_save_top_p
        logits_save_top_p_min_k perform_rl_step refit_method rl_consumption_granularity
        rl_default_temperature rl_default_top_k rl_default_top_p rl_durable_rollout_bank
        rl_generation_lag rl_importance_sampling_truncation_coef
        rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
        rl_inference_logprobs_is_correction rl_inference_model_unified_memory_level
        rl_inference_parsers rl_inference_pipeline_model_parallel_size
        rl_inference_tensor_model_parallel_size rl_kv_cache_management_mode rl_max_inflight_requests
        rl_offload_inference_model_weights_when_idle rl_offload_kv_cache_during_training
        rl_offload_optimizer_during_inference rl_parallel_generation_tasks rl_partial_rollouts
        rl_persist_cuda_graphs rl_profile rl_profile_dir rl_prompts_per_eval
        rl_remove_kv_cache_during_training rl_reset_cuda_graphs rl_rollout_bank_dir
        rl_rollout_bank_max_bytes rl_sequence_packing_algo rl_sequence_packing_max_sequences_per_bin
        rl_skip_bos_token rl_submission_granularity rl_training_cuda_graphs rl_use_sequence_packing
        rl_verify_model_weights_swap
        """
    ),
    "models of another kind, which their tensors show": _names(
        """
        bert_load biencoder_projection_dim biencoder_shared_query_context_model block_data_path
        classes_fraction data_per_class_fraction dino_bottleneck_size dino_freeze_last_layer
        dino_head_hidden_size dino_local_crops_number dino_local_img_size dino_norm_last_layer
        dino_teacher_temp dino_warmup_teacher_temp dino_warmup_teacher_temp_epochs embedding_path
        evidence_data_path head_lr_mult ict_head_size ict_load img_dim img_h img_w
        indexer_batch_size indexer_log_interval iter_per_epoch mask_factor mask_type num_channels
        num_classes patch_dim query_in_block_prob retriever_report_topk_accuracies
        retriever_score_scaling retriever_seq_length retro_add_retriever retro_cyclic_train_iters
        retro_encoder_attention_dropout retro_encoder_hidden_dropout retro_encoder_layers
        retro_project_dir retro_verify_neighbor_count retro_workdir swin_backbone_type
        titles_data_path use_one_sent_docs vision_backbone_type vision_pretraining
        vision_pretraining_type
        """
    ),
}
"""Args that leave the prediction of the next token as it is, by the reason."""
