"""Keys of verl that no row of table.py reads, with what becomes of them.

A name that ends with .* stands for a section. The first name that fits a key counts. A key with verl's default, that of
defaults.yaml or else nothing, means what the job here does.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_mg.from_verl.job import DEFAULTS, Kind, VerlJob
from verl_mg.from_verl.rows import keys_of

FSDP = "aorr.actor.fsdp_config aorr.ref.fsdp_config critic.fsdp"
MEGATRON = "aorr.actor.megatron aorr.ref.megatron critic.megatron"
OPTIM, MODELS = "aorr.actor.optim critic.optim", "aorr.model critic.model"


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
    return Unread("ignored", text, keys_of(*keys))


def _missing(text: str, *keys: str, switch: str = "") -> Unread:
    return Unread("no counterpart", text, keys_of(*keys), switch)


def _ask(text: str, *keys: str, switch: str = "") -> Unread:
    return Unread("ask", text, keys_of(*keys), switch)


UNREAD = (
    # Sections, whole.
    _ignored("there is no Ray", "ray_kwargs.* transfer_queue.* trainer.ray_wait_register_center_timeout"),
    _ask("write the section profile", "aorr.actor aorr.ref aorr.rollout critic reward.reward_model: profiler.*",
         switch="enable"),
    _ask("write the section profile", "global_profiler.* trainer.profile_steps", switch="tool"),
    _missing("rollouts are not cached; a run is trained again with --replay",
             "skip.rollout.* skip.rollout_tq.* skip.async_rollout.*", switch="enable"),
    _missing("rollouts are not cached; a run is trained again with --replay",
             "aorr.rollout: skip_rollout skip_dump_dir"),
    _missing("a job that distils is another recipe: docs/distillation.md", "distillation.*", switch="enabled"),
    _missing("write rollout.mode=one_step_off or async, with rollout.num_ranks", "trainer.v1.*", switch="trainer_mode"),
    _missing("write rollout.mode=one_step_off or async, with rollout.num_ranks",
             "async_training.* rollout.* trainer.use_v1 aorr.rollout.nnodes aorr.hybrid_engine"),
    # The actor.
    _ignored("micro-batches hold rows without padding, always",
             "aorr.model aorr.actor critic.model: use_remove_padding", "aorr.actor aorr.ref: pad_to_length"),
    _ignored("a micro-batch is given in tokens", "aorr.actor critic: ppo_micro_batch_size",
             "critic: forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu",
             "aorr.ref aorr.rollout: log_prob_micro_batch_size",
             "aorr.rollout: log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu"),
    _ignored("verl reads clip_ratio_low and clip_ratio_high, by default 0.2", "aorr.actor.clip_ratio"),
    _ignored("log-probs and entropy are computed in chunks, without whole logits",
             "aorr.model aorr.actor critic.model: use_fused_kernels",
             f"{MODELS}: fused_kernel_options.* use_liger tiled_mlp.*",
             "aorr.actor aorr.ref: entropy_from_logits_with_chunking entropy_from_logits_chunk_size "
             "entropy_checkpointing use_torch_compile",
             "aorr.actor: calculate_entropy calculate_sum_pi_squared use_prefix_grouper"),
    _ignored("dropout is off", "aorr.model.override_config.hidden_dropout",
             "aorr.model.override_config critic.model.override_config: attention_dropout embd_pdrop resid_pdrop",
             f"{MODELS}: lora.dropout"),
    _missing("the model is that of its config.json; change it there",
             "aorr.model.override_config critic.model.override_config: *", f"{MODELS}: hf_config_path"),
    _missing("code of a model folder is not executed", "aorr.model critic.model data: trust_remote_code",
             f"{MODELS}: external_lib"),
    _ignored("the tokenizer is that of the model's folder", "data.tokenizer", f"{MODELS}: tokenizer_path"),
    _missing("the chat template is that of the model's folder", f"{MODELS}: custom_chat_template"),
    _ignored("files are read where they are", "aorr.model critic.model data: use_shm"),
    _missing("activations are recomputed, not offloaded", f"{MODELS}: enable_activation_offload"),
    _missing("adapters are PEFT's: write actor.lora", "aorr.model.lora.*", switch="rank"),
    _missing("adapters are PEFT's: write actor.lora", "aorr.model: exclude_modules lora_dtype"),
    _missing("write critic.lora", "critic.model.lora.*", switch="rank"),
    _missing("write critic.lora",
             "critic.model: lora_rank lora_alpha target_modules exclude_modules lora_adapter_path"),
    _ask("multi-token prediction: megatron.transformer.mtp_loss_scaling_factor, and arguments of the engine",
         "aorr.model aorr.rollout critic.model: mtp.*", switch="enable"),
    _ignored("samples stay in their order", "aorr.actor critic: shuffle data_loader_seed"),
    _ignored("it follows from rollout.n", "aorr.actor aorr.ref critic: rollout_n"),
    _ignored("weights are read from Hugging Face folders into every layout, and checkpoints are whole",
             "aorr.actor aorr.ref critic: load_weight",
             "aorr.actor.checkpoint critic.checkpoint: save_contents load_contents async_save strict mbridge_config.*"),
    _missing("only Megatron's distributed optimizer shards Megatron models",
             f"{MEGATRON}: use_megatron_fsdp"),
    _missing("weights are not quantized in training",
             f"aorr.actor aorr.rollout {FSDP} {MEGATRON}: qat.*", switch="enable"),
    _missing("Muon has momentum and a learning rate, and moments have a dtype: actor.optimizer",
             f"{OPTIM}: use_precision_aware_optimizer main_grads_dtype exp_avg_dtype "
             "exp_avg_sq_dtype muon_momentum use_layer_wise_distributed_optimizer muon_nesterov muon_split_qkv "
             "muon_scale_mode muon_tp_mode muon_coefficient_type muon_num_ns_steps muon_fp32_matmul_prec "
             "muon_extra_scale_factor muon_scalar_optimizer muon_match_adamw_update_rms"),
    _missing("write actor.offload, or actor.optimizer.nvme_folder for a disk",
             f"{MEGATRON}: offload.*"),
    _missing("every model has the fields of the actor: megatron", "aorr.ref.megatron.override_moe_config.*",
             "aorr.ref.megatron critic.megatron aorr.actor.megatron: override_transformer_config.* "
             "override_ddp_config.* override_mcore_model_config.*",
             "critic.optim aorr.actor.optim: override_optimizer_config.*"),
    _missing("warm-up starts at 0, decay is that of the schedule, and weight decay is constant",
             f"{OPTIM}: lr_warmup_init num_cycles lr_wsd_decay_style lr_wsd_decay_steps "
             "weight_decay_incr_style"),
    _ignored("a checkpoint has the state of optimizer and schedule",
             f"{OPTIM}: use_checkpoint_opt_param_scheduler"),
    _ignored("they follow from the job", "critic.enable",
             f"{OPTIM}: total_training_steps optimizer_impl zero_indexed_step",
             "critic aorr.ref: strategy"),
    _ignored("results do not depend on it",
             f"{FSDP}: entropy_checkpointing forward_prefetch "
             "use_no_sync_for_gradient_accumulation use_orig_params use_torch_compile strategy turbo_config.*",
             f"{FSDP} {MEGATRON}: entropy_from_logits_chunk_size entropy_from_logits_with_chunking forward_only "
             "pad_to_length pad_to_length_bucket seed",
             f"{MEGATRON}: pad_bshd_to_minibatch_max "
             "max_seqlen_per_dp_cp_rank sequence_parallel use_distributed_optimizer use_remove_padding use_mbridge "
             "vanilla_mbridge use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix "
             "dist_ckpt_optim_fully_reshardable load_weight distrib_optim_fully_reshardable_mem_efficient"),
    _ignored("the reference has no optimizer", "aorr.ref.megatron.grad_offload",
             "aorr.ref.fsdp_config aorr.ref.megatron: optimizer_offload"),
    _missing("weights are bfloat16 with float32 master weights, or float32: model.dtype",
             f"{FSDP}: model_dtype mixed_precision.*",
             "aorr.ref.fsdp_config critic.fsdp aorr.ref.megatron critic.megatron: dtype"),
    _missing("layers are sharded one by one", f"{FSDP}: wrap_policy.*"),
    _missing("write job.deterministic", f"{FSDP}: full_determinism"),
    _missing("every model has that of the actor: fsdp",
             "aorr.ref.fsdp_config critic.fsdp: fsdp_size offload_policy reshard_after_forward"),
    _missing("every model has that of the actor", "aorr.ref.megatron critic.megatron: dynamic_context_parallel"),
    _missing("only experts of the rollout are replayed, in the actor: rollout.replay_routing",
             f"{MEGATRON}: router_replay.record_file "
             "router_replay.replay_file", "aorr.ref.megatron critic.megatron: router_replay.mode"),
    _missing("another loss is a recipe: docs/guides/add_a_recipe.md", "aorr.actor.policy_loss.*"),
    _missing("write algorithm.off_policy", "aorr.actor.tis_imp_ratio_cap algorithm.rollout_correction.*"),
    # Rollout.
    _ignored("processes of engines are the job's", "aorr.rollout.engine_kwargs.trtllm.*", "aorr critic: nccl_timeout",
             "aorr.rollout: mode load_format skip_tokenizer_init disable_log_stats calculate_log_probs "
             "logprobs_mode scheduling_policy layered_summon multi_stage_wake_up layer_name_map.* "
             "checkpoint_engine.* n_gpus_per_node cudagraph_capture_sizes moe_load_balance_metrics_interval "
             "update_weights_bucket_megabytes"),
    _missing("arguments of an engine are a section", "aorr.rollout.engine_kwargs",
             "aorr.rollout.engine_kwargs: vllm sglang"),
    _missing("an engine computes prompts and responses", "aorr.rollout.disaggregation.*", switch="enabled"),
    _ignored("it follows from data.max_prompt_length and data.max_response_length",
             "aorr.rollout: prompt_length response_length max_model_len"),
    _ignored("engines compute in the actor's type, and draw from it where do_sample is off in evaluation only",
             "aorr.rollout: dtype do_sample"),
    _missing("responses end with the model's stop tokens", "aorr.rollout.ignore_eos"),
    _missing("seeds of samples follow from job.seed", "aorr.rollout.seed"),
    _missing("rollout.extra_prompts is a number of prompts", "aorr.rollout.over_sample_rate"),
    _missing("requests go to the engine that has a free place", "aorr.rollout.router_config_path"),
    _missing("only SGLang has quantized weights: rollout.wire", "aorr.rollout.quantization_config_file"),
    _missing("sums are divided by rollout.max_new_tokens", "critic.loss_scale_factor"),
    _missing("checkpoints are read by the same command", "trainer.checkpoint_callback_class"),
    _ask("agents and tools: docs/agents.md and docs/agent_tools.md", "aorr.rollout: agent.* multi_turn.*",
         "data: tool_config_path function_tool_path"),
    _ask("write tracking, where records of samples and metrics go", "aorr.rollout.trace.*", switch="backend"),
    _ask("write tracking.prometheus_port", "aorr.rollout.prometheus.*", switch="enable"),
    _missing("evaluations have other keys", "aorr.rollout.val_kwargs.*"),
    # Data.
    _ignored("a batch of a rollout has prompts_per_iteration prompts, and a further one follows where groups are "
             "left out", "algorithm.filter_groups.max_inflight_gen_batches", "data: gen_batch_size val_batch_size"),
    _ignored("prompts are read by the job itself",
             "data: dataloader_num_workers filter_overlong_prompts_workers return_raw_input_ids return_raw_chat "
             "return_full_prompt return_multi_modal_inputs image_patch_size validation_shuffle "
             "mm_processor_kwargs.*"),
    _ignored("data_source stays in the record, where verl's functions find it", "data.reward_fn_key"),
    _missing("prompts are drawn in random order, all of them", "data: shuffle train_max_samples"),
    _missing("images are read, not video and audio", "data: video_key audio_key"),
    _missing("write rollout.chat_template_options with agents; templates take no options otherwise",
             "data.apply_chat_template_kwargs.*"),
    _ask("write data.prepare, a function of a record, or data.curriculum",
         "data: custom_cls.* sampler.* datagen.* filter_prompts"),
    # Reward.
    _ask("write reward.function=verl_mg.rewards.sandbox_fusion:SandboxFusion, with its options",
         "reward.sandbox_fusion.*"),
    _ignored("responses are as long as rollout.max_new_tokens",
             "reward.reward_kwargs: max_resp_len overlong_buffer_cfg.log"),
    _ignored("a reward model is one more role on the actor's ranks", "reward.launch_reward_fn_async",
             "reward.reward_model: enable_resource_pool n_gpus_per_node nnodes strategy micro_batch_size "
             "micro_batch_size_per_gpu max_length use_dynamic_bsz forward_max_token_len_per_gpu",
             "reward.reward_model.model: fsdp_config.param_offload use_remove_padding",
             "reward.reward_model.rollout: cudagraph_capture_sizes data_parallel_size disable_log_stats "
             "disaggregation.* do_sample dtype enable_chunked_prefill enable_prefix_caching enforce_eager "
             "engine_kwargs.* expert_parallel_size free_cache_engine full_determinism gpu_memory_utilization "
             "ignore_eos layered_summon limit_images load_format max_model_len max_num_batched_tokens max_num_seqs "
             "mtp multi_stage_wake_up n name pipeline_model_parallel_size prompt_length quantization "
             "quantization_config_file seed response_length scheduling_policy skip_tokenizer_init temperature "
             "tensor_model_parallel_size top_k top_p"),
    _missing("a reward model reads the tokens of the actor", "reward.reward_model.model.input_tokenizer"),
    _missing("code of a model folder is not executed", "reward.reward_model.model: trust_remote_code external_lib"),
    _missing("options of the reward are reward.options", "reward.reward_kwargs.*",
             "reward: compute_score_kwargs.* reward_manager.* custom_reward_function.*"),
    # The run.
    _ignored("rows are always balanced over the ranks", "trainer.balance_batch"),
    _ignored("samples are always recorded in job.output",
             "trainer: rollout_data_dir validation_data_dir log_val_generations"),
    _ignored("checkpoints are whole, and of all roles",
             "trainer: max_critic_ckpt_to_keep default_hdfs_dir del_local_ckpt_after_load esi_redundant_time "
             "use_legacy_worker_impl"),
    _missing("verl-mg eval evaluates a model", "trainer.val_only"),
    _ask("give that run's folder as job.output", "trainer.resume_from_path"),
    _missing("there are CUDA and the CPU", "trainer.device"),
)  # fmt: skip
