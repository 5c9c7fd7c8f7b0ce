"""Keys of verl that no row of table.py reads, with what becomes of them.

A name that ends with .* stands for a section. The first name that fits a key counts. A key with verl's default, that of
defaults.yaml or else nothing, means what the job here does.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_mg.from_verl.job import DEFAULTS, Kind, VerlJob

MUON = (
    *("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "muon_momentum"),
    *("use_layer_wise_distributed_optimizer", "muon_nesterov", "muon_split_qkv", "muon_scale_mode", "muon_tp_mode"),
    *("muon_coefficient_type", "muon_num_ns_steps", "muon_fp32_matmul_prec", "muon_extra_scale_factor"),
    *("muon_scalar_optimizer", "muon_match_adamw_update_rms"),
)
"""Options of optimizers of Megatron with no key here."""
OF_FSDP = (
    *("entropy_checkpointing", "entropy_from_logits_chunk_size", "entropy_from_logits_with_chunking", "forward_only"),
    *("forward_prefetch", "use_no_sync_for_gradient_accumulation", "use_orig_params", "use_torch_compile", "strategy"),
    *("pad_to_length", "pad_to_length_bucket", "seed", "turbo_config.*"),
)
"""Options of FSDP that change no result, or that verl reads with another engine."""
OF_MEGATRON = (
    *("entropy_from_logits_chunk_size", "entropy_from_logits_with_chunking", "forward_only", "pad_to_length"),
    *("pad_to_length_bucket", "pad_bshd_to_minibatch_max", "max_seqlen_per_dp_cp_rank", "seed", "sequence_parallel"),
    *("use_distributed_optimizer", "use_remove_padding", "use_mbridge", "vanilla_mbridge", "use_dist_checkpointing"),
    *("dist_checkpointing_path", "dist_checkpointing_prefix", "dist_ckpt_optim_fully_reshardable", "load_weight"),
    "distrib_optim_fully_reshardable_mem_efficient",
)
"""Options of Megatron that change no result here: sequences are parallel with tp, weights come from the folder."""
OF_REWARD_ENGINE = (
    *("cudagraph_capture_sizes", "data_parallel_size", "disable_log_stats", "disaggregation.*", "do_sample", "dtype"),
    *("enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "engine_kwargs.*", "expert_parallel_size"),
    *(
        "free_cache_engine",
        "full_determinism",
        "gpu_memory_utilization",
        "ignore_eos",
        "layered_summon",
        "limit_images",
    ),
    *("load_format", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "mtp", "multi_stage_wake_up", "n"),
    *("name", "pipeline_model_parallel_size", "prompt_length", "quantization", "quantization_config_file", "seed"),
    *("response_length", "scheduling_policy", "skip_tokenizer_init", "temperature", "tensor_model_parallel_size"),
    *("top_k", "top_p"),
)
"""Options of the engine in which verl runs a reward model."""


def _of(sections: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for section in sections for name in names)


FSDP = ("aorr.actor.fsdp_config", "aorr.ref.fsdp_config", "critic.fsdp")
MEGATRON = ("aorr.actor.megatron", "aorr.ref.megatron", "critic.megatron")


@dataclass(frozen=True)
class Unread:
    """Keys without a row, and the line about them."""

    kind: Kind
    text: str
    keys: tuple[str, ...]
    switch: str = ""  # key of a section without which its other keys do nothing

    def fits(self, key: str) -> bool:
        """Whether a key of verl is one of them."""
        return self._section(key) is not None

    def is_off(self, key: str, job: VerlJob) -> bool:
        """Whether a key that fits has verl's default, or the one that switches its section on."""
        section = self._section(key)
        decisive = f"{section}.{self.switch}" if self.switch and section else key
        value, default = job[decisive], DEFAULTS.get(decisive)
        if not default:
            return not value
        return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)

    def _section(self, key: str) -> str | None:
        for name in self.keys:
            section = name.removesuffix(".*")
            if key == section or (name != section and key.startswith(f"{section}.")):
                return section
        return None


def _ignored(text: str, *keys: str) -> Unread:
    return Unread("ignored", text, keys)


def _missing(text: str, *keys: str, switch: str = "") -> Unread:
    return Unread("no counterpart", text, keys, switch)


def _ask(text: str, *keys: str, switch: str = "") -> Unread:
    return Unread("ask", text, keys, switch)


UNREAD = (
    # Sections, whole.
    _ignored("there is no Ray", "ray_kwargs.*", "trainer.ray_wait_register_center_timeout", "transfer_queue.*"),
    _ask("write the section profile", "aorr.actor.profiler.*", "aorr.ref.profiler.*", "aorr.rollout.profiler.*",
         "critic.profiler.*", "reward.reward_model.profiler.*", switch="enable"),
    _ask("write the section profile", "global_profiler.*", "trainer.profile_steps", switch="tool"),
    _missing("rollouts are not cached; a run is trained again with --replay", "skip.rollout.*", "skip.rollout_tq.*",
             "skip.async_rollout.*", switch="enable"),
    _missing("rollouts are not cached; a run is trained again with --replay", "aorr.rollout.skip_rollout",
             "aorr.rollout.skip_dump_dir"),
    _missing("a job that distils is another recipe: docs/distillation.md", "distillation.*", switch="enabled"),
    _missing("write rollout.mode=one_step_off or async, with rollout.num_ranks", "trainer.v1.*",
             switch="trainer_mode"),
    _missing("write rollout.mode=one_step_off or async, with rollout.num_ranks", "async_training.*", "trainer.use_v1",
             "rollout.*", "aorr.rollout.nnodes", "aorr.hybrid_engine"),
    # The actor.
    _ignored("micro-batches hold rows without padding, always", "aorr.model.use_remove_padding",
             "aorr.actor.use_remove_padding", "critic.model.use_remove_padding", "aorr.actor.pad_to_length",
             "aorr.ref.pad_to_length"),
    _ignored("a micro-batch is given in tokens", "aorr.actor.ppo_micro_batch_size", "critic.ppo_micro_batch_size",
             "critic.forward_micro_batch_size", "critic.forward_micro_batch_size_per_gpu",
             "critic.forward_max_token_len_per_gpu", "aorr.ref.log_prob_micro_batch_size",
             "aorr.rollout.log_prob_micro_batch_size", "aorr.rollout.log_prob_micro_batch_size_per_gpu",
             "aorr.rollout.log_prob_use_dynamic_bsz", "aorr.rollout.log_prob_max_token_len_per_gpu"),
    _ignored("verl reads clip_ratio_low and clip_ratio_high, by default 0.2", "aorr.actor.clip_ratio"),
    _ignored("log-probs and entropy are computed in chunks, without whole logits", "aorr.model.use_fused_kernels",
             "aorr.model.fused_kernel_options.*", "aorr.actor.use_fused_kernels", "aorr.model.use_liger",
             "aorr.actor.entropy_from_logits_with_chunking", "aorr.actor.entropy_from_logits_chunk_size",
             "aorr.actor.entropy_checkpointing", "aorr.ref.entropy_from_logits_with_chunking",
             "aorr.ref.entropy_from_logits_chunk_size", "aorr.ref.entropy_checkpointing", "aorr.model.tiled_mlp.*",
             "aorr.actor.calculate_entropy", "aorr.actor.calculate_sum_pi_squared", "aorr.actor.use_torch_compile",
             "aorr.ref.use_torch_compile", "critic.model.use_liger", "critic.model.use_fused_kernels",
             "critic.model.fused_kernel_options.*", "critic.model.tiled_mlp.*", "aorr.actor.use_prefix_grouper"),
    _ignored("dropout is off", "aorr.model.override_config.attention_dropout", "aorr.model.override_config.embd_pdrop",
             "aorr.model.override_config.resid_pdrop", "critic.model.override_config.attention_dropout",
             "critic.model.override_config.embd_pdrop", "critic.model.override_config.resid_pdrop",
             "aorr.model.override_config.hidden_dropout", "aorr.model.lora.dropout", "critic.model.lora.dropout"),
    _missing("the model is that of its config.json; change it there", "aorr.model.override_config.*",
             "critic.model.override_config.*", "aorr.model.hf_config_path", "critic.model.hf_config_path"),
    _missing("code of a model folder is not executed", "aorr.model.trust_remote_code", "critic.model.trust_remote_code",
             "data.trust_remote_code", "aorr.model.external_lib", "critic.model.external_lib"),
    _ignored("the tokenizer is that of the model's folder", "aorr.model.tokenizer_path", "critic.model.tokenizer_path",
             "data.tokenizer"),
    _missing("the chat template is that of the model's folder", "aorr.model.custom_chat_template",
             "critic.model.custom_chat_template"),
    _ignored("files are read where they are", "aorr.model.use_shm", "critic.model.use_shm", "data.use_shm"),
    _missing("activations are recomputed, not offloaded", "aorr.model.enable_activation_offload",
             "critic.model.enable_activation_offload"),
    _missing("adapters are PEFT's: write actor.lora", "aorr.model.lora.*", switch="rank"),
    _missing("adapters are PEFT's: write actor.lora", "aorr.model.exclude_modules", "aorr.model.lora_dtype"),
    _missing("write critic.lora", "critic.model.lora.*", switch="rank"),
    _missing("write critic.lora", "critic.model.lora_rank", "critic.model.lora_alpha", "critic.model.target_modules",
             "critic.model.exclude_modules", "critic.model.lora_adapter_path"),
    _ask("multi-token prediction: megatron.transformer.mtp_loss_scaling_factor, and arguments of the engine",
         "aorr.model.mtp.*", "aorr.rollout.mtp.*", "critic.model.mtp.*", switch="enable"),
    _ignored("samples stay in their order", "aorr.actor.shuffle", "aorr.actor.data_loader_seed", "critic.shuffle",
             "critic.data_loader_seed"),
    _ignored("it follows from rollout.n", "aorr.actor.rollout_n", "aorr.ref.rollout_n", "critic.rollout_n"),
    _ignored("weights are read from Hugging Face folders into every layout, and checkpoints are whole",
             "aorr.actor.load_weight", "aorr.ref.load_weight", "critic.load_weight",
             *_of(("aorr.actor.checkpoint", "critic.checkpoint"),
                  ("save_contents", "load_contents", "async_save", "strict", "mbridge_config.*"))),
    _missing("only Megatron's distributed optimizer shards Megatron models", *_of(MEGATRON, ("use_megatron_fsdp",))),
    _missing("weights are not quantized in training", "aorr.actor.qat.*", "aorr.rollout.qat.*",
             "aorr.actor.fsdp_config.qat.*", "aorr.actor.megatron.qat.*", "aorr.ref.fsdp_config.qat.*",
             "aorr.ref.megatron.qat.*", "critic.fsdp.qat.*", "critic.megatron.qat.*", switch="enable"),
    _missing("Muon has momentum and a learning rate, and moments have a dtype: actor.optimizer",
             *(f"{role}.optim.{name}" for role in ("aorr.actor", "critic") for name in MUON)),
    _missing("write actor.offload, or actor.optimizer.nvme_folder for a disk", "aorr.actor.megatron.offload.*",
             "aorr.ref.megatron.offload.*", "critic.megatron.offload.*"),
    _missing("every model has the fields of the actor: megatron", "aorr.ref.megatron.override_moe_config.*",
             "critic.megatron.override_transformer_config.*", "critic.megatron.override_ddp_config.*",
             "critic.optim.override_optimizer_config.*", "critic.megatron.override_mcore_model_config.*",
             "aorr.ref.megatron.override_transformer_config.*", "aorr.ref.megatron.override_ddp_config.*",
             "aorr.ref.megatron.override_mcore_model_config.*", "aorr.actor.megatron.override_mcore_model_config.*",
             "aorr.actor.megatron.override_ddp_config.*", "aorr.actor.megatron.override_transformer_config.*",
             "aorr.actor.optim.override_optimizer_config.*"),
    _missing("warm-up starts at 0, decay is that of the schedule, and weight decay is constant",
             "aorr.actor.optim.lr_warmup_init", "aorr.actor.optim.num_cycles", "aorr.actor.optim.lr_wsd_decay_style",
             "aorr.actor.optim.lr_wsd_decay_steps", "aorr.actor.optim.weight_decay_incr_style",
             "critic.optim.lr_warmup_init", "critic.optim.num_cycles", "critic.optim.lr_wsd_decay_style",
             "critic.optim.lr_wsd_decay_steps", "critic.optim.weight_decay_incr_style"),
    _ignored("a checkpoint has the state of optimizer and schedule",
             "aorr.actor.optim.use_checkpoint_opt_param_scheduler", "critic.optim.use_checkpoint_opt_param_scheduler"),
    _ignored("they follow from the job", "aorr.actor.optim.total_training_steps", "critic.optim.total_training_steps",
             "aorr.actor.optim.optimizer_impl", "critic.optim.optimizer_impl", "aorr.actor.optim.zero_indexed_step",
             "critic.optim.zero_indexed_step", "critic.enable", "aorr.ref.strategy", "critic.strategy"),
    _ignored("results do not depend on it", *_of(FSDP, OF_FSDP), *_of(MEGATRON, OF_MEGATRON)),
    _ignored("the reference has no optimizer", "aorr.ref.fsdp_config.optimizer_offload",
             "aorr.ref.megatron.optimizer_offload", "aorr.ref.megatron.grad_offload"),
    _missing("weights are bfloat16 with float32 master weights, or float32: model.dtype",
             *_of(FSDP, ("model_dtype", "mixed_precision.*")), "aorr.ref.fsdp_config.dtype", "critic.fsdp.dtype",
             "aorr.ref.megatron.dtype", "critic.megatron.dtype"),
    _missing("layers are sharded one by one", *_of(FSDP, ("wrap_policy.*",))),
    _missing("write job.deterministic", *_of(FSDP, ("full_determinism",))),
    _missing("every model has that of the actor: fsdp", *_of(FSDP[1:], ("fsdp_size", "offload_policy",
                                                                       "reshard_after_forward"))),
    _missing("every model has that of the actor", *_of(MEGATRON[1:], ("dynamic_context_parallel",))),
    _missing("only experts of the rollout are replayed, in the actor: rollout.replay_routing",
             *_of(MEGATRON, ("router_replay.record_file", "router_replay.replay_file")),
             *_of(MEGATRON[1:], ("router_replay.mode",))),
    _missing("another loss is a recipe: docs/guides/add_a_recipe.md", "aorr.actor.policy_loss.*"),
    _missing("write algorithm.off_policy", "aorr.actor.tis_imp_ratio_cap", "algorithm.rollout_correction.*"),
    # Rollout.
    _ignored("processes of engines are the job's", "aorr.nccl_timeout", "critic.nccl_timeout", "aorr.rollout.mode",
             "aorr.rollout.load_format", "aorr.rollout.skip_tokenizer_init", "aorr.rollout.disable_log_stats",
             "aorr.rollout.calculate_log_probs", "aorr.rollout.logprobs_mode", "aorr.rollout.scheduling_policy",
             "aorr.rollout.layered_summon", "aorr.rollout.multi_stage_wake_up", "aorr.rollout.layer_name_map.*",
             "aorr.rollout.checkpoint_engine.*", "aorr.rollout.n_gpus_per_node", "aorr.rollout.engine_kwargs.trtllm.*",
             "aorr.rollout.cudagraph_capture_sizes", "aorr.rollout.moe_load_balance_metrics_interval",
             "aorr.rollout.update_weights_bucket_megabytes"),
    _missing("arguments of an engine are a section", "aorr.rollout.engine_kwargs", "aorr.rollout.engine_kwargs.vllm",
             "aorr.rollout.engine_kwargs.sglang"),
    _missing("an engine computes prompts and responses", "aorr.rollout.disaggregation.*", switch="enabled"),
    _ignored("it follows from data.max_prompt_length and data.max_response_length", "aorr.rollout.prompt_length",
             "aorr.rollout.response_length", "aorr.rollout.max_model_len"),
    _ignored("engines compute in the actor's type, and draw from it where do_sample is off in evaluation only",
             "aorr.rollout.dtype", "aorr.rollout.do_sample"),
    _missing("responses end with the model's stop tokens", "aorr.rollout.ignore_eos"),
    _missing("seeds of samples follow from job.seed", "aorr.rollout.seed"),
    _missing("rollout.extra_prompts is a number of prompts", "aorr.rollout.over_sample_rate"),
    _missing("requests go to the engine that has a free place", "aorr.rollout.router_config_path"),
    _missing("only SGLang has quantized weights: rollout.wire", "aorr.rollout.quantization_config_file"),
    _missing("sums are divided by rollout.max_new_tokens", "critic.loss_scale_factor"),
    _missing("checkpoints are read by the same command", "trainer.checkpoint_callback_class"),
    _ask("agents and tools: docs/agents.md and docs/agent_tools.md", "aorr.rollout.agent.*",
         "aorr.rollout.multi_turn.*",
         "data.tool_config_path", "data.function_tool_path"),
    _ask("write tracking, where records of samples and metrics go", "aorr.rollout.trace.*", switch="backend"),
    _ask("write tracking.prometheus_port", "aorr.rollout.prometheus.*", switch="enable"),
    _missing("evaluations have other keys", "aorr.rollout.val_kwargs.*"),
    # Data.
    _ignored("a batch of a rollout has prompts_per_iteration prompts, and a further one follows where groups are left "
             "out", "data.gen_batch_size", "data.val_batch_size",
             "algorithm.filter_groups.max_inflight_gen_batches"),
    _ignored("prompts are read by the job itself", "data.dataloader_num_workers",
             "data.filter_overlong_prompts_workers",
             "data.return_raw_input_ids", "data.return_raw_chat", "data.return_full_prompt",
             "data.return_multi_modal_inputs", "data.image_patch_size", "data.validation_shuffle",
             "data.mm_processor_kwargs.*"),
    _ignored("data_source stays in the record, where verl's functions find it", "data.reward_fn_key"),
    _missing("prompts are drawn in random order, all of them", "data.shuffle", "data.train_max_samples"),
    _missing("images are read, not video and audio", "data.video_key", "data.audio_key"),
    _missing("write rollout.chat_template_options with agents; templates take no options otherwise",
             "data.apply_chat_template_kwargs.*"),
    _ask("write data.prepare, a function of a record, or data.curriculum", "data.custom_cls.*", "data.sampler.*",
         "data.datagen.*", "data.filter_prompts"),
    # Reward.
    _ask("write reward.function=verl_mg.rewards.sandbox_fusion:SandboxFusion, with its options",
         "reward.sandbox_fusion.*"),
    _ignored("responses are as long as rollout.max_new_tokens", "reward.reward_kwargs.max_resp_len",
             "reward.reward_kwargs.overlong_buffer_cfg.log"),
    _ignored("a reward model is one more role on the actor's ranks", "reward.launch_reward_fn_async",
             *_of(("reward.reward_model",), ("enable_resource_pool", "n_gpus_per_node", "nnodes", "strategy",
                                             "micro_batch_size", "micro_batch_size_per_gpu", "max_length",
                                             "use_dynamic_bsz", "forward_max_token_len_per_gpu",
                                             "model.fsdp_config.param_offload", "model.use_remove_padding")),
             *_of(("reward.reward_model.rollout",), OF_REWARD_ENGINE)),
    _missing("a reward model reads the tokens of the actor", "reward.reward_model.model.input_tokenizer"),
    _missing("code of a model folder is not executed", "reward.reward_model.model.trust_remote_code",
             "reward.reward_model.model.external_lib"),
    _missing("options of the reward are reward.options", "reward.reward_kwargs.*", "reward.compute_score_kwargs.*",
             "reward.reward_manager.*", "reward.custom_reward_function.*"),
    # The run.
    _ignored("rows are always balanced over the ranks", "trainer.balance_batch"),
    _ignored("samples are always recorded in job.output", "trainer.rollout_data_dir", "trainer.validation_data_dir",
             "trainer.log_val_generations"),
    _ignored("checkpoints are whole, and of all roles", "trainer.max_critic_ckpt_to_keep", "trainer.default_hdfs_dir",
             "trainer.del_local_ckpt_after_load", "trainer.esi_redundant_time", "trainer.use_legacy_worker_impl"),
    _missing("verl-mg eval evaluates a model", "trainer.val_only"),
    _ask("give that run's folder as job.output", "trainer.resume_from_path"),
    _missing("there are CUDA and the CPU", "trainer.device"),
)  # fmt: skip
