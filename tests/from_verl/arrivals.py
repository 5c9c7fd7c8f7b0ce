"""For every key of verl that the table reads: a job in which it has a value, and where the value arrives here.

    key = value [further overrides] -> our key = value

Written from verl's documentation of the keys, not from the table. aorr is actor_rollout_ref.
"""

A, C = "aorr.actor", "critic"
GRPO = "algorithm.adv_estimator=grpo aorr.rollout.n=4"
REWARD_KL = f"{GRPO} algorithm.use_kl_in_reward=true"
LOSS_KL = f"{GRPO} {A}.use_kl_loss=true"
GAE = "algorithm.adv_estimator=gae critic.model.path=other"
MEGATRON = f"{GRPO} model_engine=megatron"
BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"
DAPO = f"{GRPO} algorithm.filter_groups.enable=true reward.reward_manager.name=dapo {BUFFER}.enable=true {BUFFER}.len=3"
RS = "algorithm.rollout_correction"
TOOLS = f"{GRPO} aorr.rollout.multi_turn.enable=true"
LORA = f"{GRPO} aorr.model.lora_rank=4"
MEGATRON_LORA = f"{MEGATRON} aorr.model.lora.rank=4"
SAMPLED = f"{GRPO} aorr.rollout.val_kwargs.do_sample=true"
K1 = f"{GRPO} {RS}.rollout_rs=token_k1"
RSK = f"{GRPO} {RS}.rollout_rs_threshold=4.0"
CP2 = f"{A}.megatron.context_parallel_size=2"
DYNAMIC = f"{A}.use_dynamic_bsz=true"
SELECTIVE = "megatron.override_transformer_config.recompute_granularity=selective"
STEPS = "trainer.total_training_steps=10"
MKL = f"{LOSS_KL} model_engine=megatron"
REF = "aorr.ref.megatron"
SGLANG = f"{GRPO} aorr.rollout.name=sglang"
VAL, KW = "aorr.rollout.val_kwargs", "aorr.rollout.engine_kwargs"
TURNS = "aorr.rollout.multi_turn.max_assistant_turns"
LOSS = f"{A}.policy_loss"

DATA = f"""
data.train_files=x.parquet | {GRPO} | data.train=x.parquet
data.val_files=y.parquet | {GRPO} | data.test=y.parquet
data.prompt_key=question | {GRPO} | data.prompt_field=question
data.image_key=pictures | {GRPO} | data.image_field=pictures
data.train_batch_size=2048 | {GRPO} | algorithm.prompts_per_iteration=2048
data.max_prompt_length=77 | {GRPO} | data.max_prompt_tokens=77
data.max_response_length=78 | {GRPO} | rollout.max_new_tokens=78
data.filter_overlong_prompts=True | {GRPO} | data.overlong_prompts=drop
data.truncation=error | {GRPO} data.filter_overlong_prompts=false | data.overlong_prompts=error
data.val_max_samples=9 | {GRPO} | evaluation.prompts=9
data.seed=5 | {GRPO} | job.seed=5
reward.custom_reward_function.path=r.py | {GRPO} | reward.function=verl:r.py:compute_score
reward.custom_reward_function.name=f | {GRPO} reward.custom_reward_function.path=r.py | reward.function=verl:r.py:f
reward.custom_reward_function.reward_kwargs.*=3 | {GRPO} reward.custom_reward_function.path=r.py | reward.options.x=3
reward.reward_manager.name=dapo | {GRPO} | reward.function=verl:verl.utils.reward_score:default_compute_score
reward.reward_model.enable=true | {GRPO} reward.reward_model.model_path=m | reward.from_model=true
reward.reward_model.model_path=m | {GRPO} reward.reward_model.enable=true | reward_model.path=m
{BUFFER}.enable=true | {DAPO} | algorithm.overlong_buffer=3
{BUFFER}.len=9 | {DAPO} | algorithm.overlong_buffer=9
{BUFFER}.penalty_factor=1.0 | {DAPO} | algorithm.overlong_buffer=3
reward.num_workers=3 | {GRPO} | reward.workers=3
"""
ALGORITHM = f"""
algorithm.adv_estimator=opo | aorr.rollout.n=4 | recipe=opo
{LOSS}.loss_mode=gspo | {GRPO} | recipe=gspo
algorithm.filter_groups.enable=true | {GRPO} | recipe=dapo
algorithm.use_pf_ppo=true | {GAE} | recipe=pf_ppo
algorithm.gamma=0.9 | {GAE} | algorithm.gamma=0.9
algorithm.lam=0.8 | {GAE} | algorithm.lam=0.8
algorithm.lam=0.7 | {GAE} | algorithm.critic_lam=0.7
algorithm.norm_adv_by_std_in_grpo=false | {GRPO} | algorithm.normalize_by_std=false
algorithm.filter_groups.max_num_gen_batches=4 | {DAPO} | algorithm.max_sampling_rounds=4
algorithm.filter_groups.max_num_gen_batches=0 | {DAPO} | algorithm.max_sampling_rounds=null
algorithm.filter_groups.metric=acc | {DAPO} | recipe=dapo
algorithm.use_kl_in_reward=true | {GRPO} | algorithm.kl.placement=reward
{A}.use_kl_loss=true | {GRPO} | algorithm.kl.coefficient=0.001
algorithm.kl_penalty=low_var_kl | {REWARD_KL} | algorithm.kl.estimator=k3
{A}.kl_loss_type=k3+ | {LOSS_KL} | algorithm.kl.estimator=k3+
{A}.kl_loss_type=kl | {LOSS_KL} | algorithm.kl.estimator=k1
algorithm.kl_ctrl.kl_coef=0.2 | {REWARD_KL} | algorithm.kl.coefficient=0.2
{A}.kl_loss_coef=0.3 | {LOSS_KL} | algorithm.kl.coefficient=0.3
algorithm.kl_ctrl.type=adaptive | {REWARD_KL} | algorithm.kl.target=0.1
algorithm.kl_ctrl.target_kl=0.4 | {REWARD_KL} algorithm.kl_ctrl.type=adaptive | algorithm.kl.target=0.4
algorithm.kl_ctrl.horizon=50 | {REWARD_KL} algorithm.kl_ctrl.type=adaptive | algorithm.kl.horizon=50
{RS}.rollout_is=token | {GRPO} | algorithm.off_policy.weight=token
{RS}.rollout_is_threshold=4.0 | {GRPO} {RS}.rollout_is=sequence | algorithm.off_policy.high=4.0
{RS}.rollout_rs=seq_mean_k3 | {RSK} | algorithm.off_policy.rejection={{sequence-mean-k3: 4.0}}
{RS}.rollout_rs_threshold=0.5_4.0 | {K1} | algorithm.off_policy.rejection={{token-k1: [0.25, 2.0]}}
{RS}.rollout_is_batch_normalize=true | {GRPO} {RS}.rollout_is=token | algorithm.off_policy.normalize=true
{RS}.bypass_mode=true | {GRPO} | algorithm.old_logprobs=rollout
{RS}.loss_type=ppo_clip | {GRPO} {RS}.bypass_mode=true | algorithm.old_logprobs=rollout
aorr.rollout.n=6 | {GRPO} | algorithm.group_size=6
{A}.ppo_mini_batch_size=128 | {GRPO} | algorithm.num_minibatches=8
{C}.ppo_mini_batch_size=256 | {GAE} | algorithm.num_minibatches=4
{A}.ppo_epochs=3 | {GRPO} | algorithm.num_epochs=3
{C}.ppo_epochs=3 | {GAE} {A}.ppo_epochs=3 | algorithm.num_epochs=3
{A}.clip_ratio_low=0.1 | {GRPO} | algorithm.clip_low=0.1
{A}.clip_ratio_low=null | {GRPO} {A}.clip_ratio=0.4 | algorithm.clip_low=0.4
{A}.clip_ratio_high=0.3 | {GRPO} | algorithm.clip_high=0.3
{A}.clip_ratio_high=0.3 | {GRPO} {LOSS}.loss_mode=dppo_kl | algorithm.limit_high=0.3
{A}.clip_ratio_c=5.0 | {GRPO} | algorithm.dual_clip=5.0
{A}.clip_ratio_c=6.0 | {GRPO} {LOSS}.loss_mode=dppo_tv | algorithm.ratio_limit=6.0
{A}.loss_agg_mode=seq-mean-token-sum | {GRPO} {LOSS}.loss_mode=cispo | algorithm.loss_aggregation=seq-mean-token-sum
{C}.loss_agg_mode=token-mean | {GAE} | recipe=ppo
{A}.loss_scale_factor=512 | {GRPO} {A}.loss_agg_mode=seq-mean-token-sum-norm | recipe=grpo
{A}.entropy_coeff=0.01 | {GRPO} | algorithm.entropy_coefficient=0.01
{A}.tau_pos=1.5 | {GRPO} {LOSS}.loss_mode=sapo | algorithm.tau_positive=1.5
{A}.tau_neg=1.6 | {GRPO} {LOSS}.loss_mode=sapo | algorithm.tau_negative=1.6
{LOSS}.clip_cov_ratio=0.1 | {GRPO} {LOSS}.loss_mode=clip_cov | algorithm.fraction=0.1
{LOSS}.clip_cov_lb=0.5 | {GRPO} {LOSS}.loss_mode=clip_cov | algorithm.covariance_low=0.5
{LOSS}.clip_cov_ub=6.0 | {GRPO} {LOSS}.loss_mode=clip_cov | algorithm.covariance_high=6.0
{LOSS}.kl_cov_ratio=0.3 | {GRPO} {LOSS}.loss_mode=kl_cov | algorithm.fraction=0.3
{LOSS}.ppo_kl_coef=0.4 | {GRPO} {LOSS}.loss_mode=kl_cov | algorithm.penalty=0.4
{C}.cliprange_value=0.2 | {GAE} | algorithm.value_clip=0.2
trainer.critic_warmup=7 | {GAE} | algorithm.critic_warmup=7
algorithm.pf_ppo.reweight_method=max_random | {GAE} algorithm.use_pf_ppo=true | algorithm.resampling=max_random
algorithm.pf_ppo.weight_pow=3.0 | {GAE} algorithm.use_pf_ppo=true | algorithm.power=3.0
"""
TRAINED = """
{Q}.tensor_model_parallel_size=4 | {M} | {O}.layout=tp4
{Q}.pipeline_model_parallel_size=2 | {M} | {O}.layout=pp2
{Q}.virtual_pipeline_model_parallel_size=2 | {M} {Q}.pipeline_model_parallel_size=2 | {O}.layout=pp2-vpp2
{Q}.context_parallel_size=2 | {M} | {O}.layout=cp2
{Q}.expert_model_parallel_size=8 | {M} | {O}.layout=ep8
{Q}.expert_tensor_parallel_size=1 | {M} {Q}.tensor_model_parallel_size=2 | {O}.layout=tp2-etp1
{F}.ulysses_sequence_parallel_size=2 | {G} | {O}.layout=cp2
{T}.ppo_micro_batch_size_per_gpu=2 | {G} | {O}.tokens_per_micro_batch=2048
{T}.use_dynamic_bsz=true | {G} {T}.ppo_max_token_len_per_gpu=4096 | {O}.tokens_per_micro_batch=4096
{T}.ppo_max_token_len_per_gpu=5000 | {M} {D} {Q}.context_parallel_size=2 | {O}.tokens_per_micro_batch=10000
{T}.optim.lr=3e-6 | {G} | {O}.optimizer.lr=3.0e-6
{T}.optim.weight_decay=0.1 | {G} | {O}.optimizer.weight_decay=0.1
{T}.optim.betas=[0.9,0.95] | {G} | {O}.optimizer.betas=[0.9, 0.95]
{T}.optim.clip_grad=0.3 | {G} | {O}.optimizer.clip_grad=0.3
{T}.optim.optimizer=muon | {M} | {O}.optimizer.kind=muon
{T}.optim.lr_scheduler_type=cosine | {G} {S} | {O}.optimizer.decay_steps=40
{T}.optim.lr_decay_style=linear | {M} {S} | {O}.optimizer.schedule=linear
{T}.optim.lr_warmup_steps=10 | {G} | {O}.optimizer.warmup_steps=40
{T}.optim.lr_warmup_steps_ratio=0.1 | {G} | {O}.optimizer.warmup_ratio=0.1
{T}.optim.min_lr_ratio=0.1 | {G} {T}.optim.lr=1e-6 {T}.optim.lr_scheduler_type=cosine {S} | {O}.optimizer.min_lr=1.0e-7
{T}.optim.min_lr=2e-7 | {M} {T}.optim.lr_decay_style=cosine {S} | {O}.optimizer.min_lr=2.0e-7
{T}.optim.lr_decay_steps=20 | {M} {T}.optim.lr_decay_style=cosine | {O}.optimizer.decay_steps=80
{Q}.param_offload=true | {M} | {O}.offload=true
{Q}.grad_offload=true | {M} | {O}.offload=true
{Q}.optimizer_offload=true | {M} | {O}.offload=true
{F}.param_offload=true | {G} | {O}.offload=true
{F}.optimizer_offload=true | {G} | {O}.offload=true
{N}.enable_gradient_checkpointing=true | {G} | {O}.recompute=true
{Q}.override_transformer_config.recompute_granularity=full | {M} | {O}.recompute=true
{Q}.override_transformer_config.recompute_modules=[mlp,moe] | {M} {T}.{X} | {O}.recompute=[mlp, moe]
"""
ACTOR = {
    "S": STEPS,
    "X": SELECTIVE,
    "T": A,
    "F": f"{A}.fsdp_config",
    "N": "aorr.model",
    "O": "actor",
    "Q": f"{A}.megatron",
}
ACTOR |= {"M": MEGATRON, "G": GRPO, "D": DYNAMIC}
CRITIC = {
    "S": STEPS,
    "X": SELECTIVE,
    "T": C,
    "F": "critic.fsdp",
    "N": "critic.model",
    "O": "critic",
    "Q": "critic.megatron",
}
CRITIC |= {"M": f"{GAE} model_engine=megatron", "G": GAE, "D": "critic.use_dynamic_bsz=true"}
MODELS = f"""
aorr.model.path=Qwen/Q | {GRPO} | model.path=Qwen/Q
{A}.strategy=megatron | {GRPO} | actor.backend=megatron
{A}.strategy=fsdp2 | {GRPO} | actor.backend=fsdp
{A}.megatron.dtype=float32 | {MEGATRON} | model.dtype=float32
{A}.fsdp_config.dtype=fp32 | {GRPO} | model.dtype=float32
aorr.model.lora_rank=8 | {GRPO} | actor.lora.rank=8
aorr.model.lora_alpha=64 | {LORA} | actor.lora.alpha=64.0
aorr.model.target_modules=[q_proj] | {LORA} | actor.lora.targets=[q_proj]
aorr.model.lora_adapter_path=a | {LORA} | actor.lora.path=a
aorr.model.lora.rank=8 | {MEGATRON} | actor.lora.rank=8
aorr.model.lora.alpha=65 | {MEGATRON_LORA} | actor.lora.alpha=65.0
aorr.model.lora.target_modules=[v_proj] | {MEGATRON_LORA} | actor.lora.targets=[v_proj]
aorr.model.lora.adapter_path=b | {MEGATRON_LORA} | actor.lora.path=b
{A}.fsdp_config.fsdp_size=4 | {GRPO} trainer.nnodes=2 | fsdp.replicas=4
{A}.fsdp_config.reshard_after_forward=false | {GRPO} | fsdp.reshard_after_forward=false
{A}.fsdp_config.offload_policy=true | {GRPO} | fsdp.cpu_offload=true
{A}.freeze_vision_tower=true | {GRPO} | fsdp.freeze_vision_tower=true
{A}.megatron.dynamic_context_parallel=true | {MEGATRON} {CP2} | actor.dynamic_context=true
{A}.megatron.override_transformer_config.*=0.01 | {MEGATRON} | megatron.transformer.moe_aux_loss_coeff=0.01
{A}.megatron.override_ddp_config.*=true | {MEGATRON} | megatron.ddp.overlap_grad_reduce=true
{A}.optim.override_optimizer_config.*=true | {MEGATRON} | actor.optimizer.cpu_offload=true
{A}.megatron.router_replay.mode=R3 | {GRPO} | rollout.replay_routing=true
aorr.rollout.enable_rollout_routing_replay=true | {GRPO} | rollout.replay_routing=true
critic.model.path=third | {GAE} | critic.path=third
{REF}.tensor_model_parallel_size=2 | {MKL} | reference.layout=tp2
{REF}.pipeline_model_parallel_size=4 | {MKL} | reference.layout=pp4
{REF}.virtual_pipeline_model_parallel_size=2 | {MKL} {REF}.pipeline_model_parallel_size=2 | reference.layout=pp2-vpp2
{REF}.context_parallel_size=2 | {MKL} | reference.layout=cp2
{REF}.expert_model_parallel_size=2 | {MKL} | reference.layout=ep2
{REF}.expert_tensor_parallel_size=1 | {MKL} {REF}.tensor_model_parallel_size=2 | reference.layout=tp2-etp1
{REF}.param_offload=true | {MKL} | reference.offload=true
aorr.ref.fsdp_config.ulysses_sequence_parallel_size=4 | {LOSS_KL} | reference.layout=cp4
aorr.ref.fsdp_config.param_offload=true | {LOSS_KL} | reference.offload=true
aorr.ref.log_prob_micro_batch_size_per_gpu=3 | {LOSS_KL} | reference.tokens_per_micro_batch=3072
aorr.ref.log_prob_use_dynamic_bsz=true | {LOSS_KL} | reference.tokens_per_micro_batch=16384
aorr.ref.log_prob_max_token_len_per_gpu=2000 | {LOSS_KL} {DYNAMIC} | reference.tokens_per_micro_batch=2000
"""
RUN = f"""
aorr.rollout.name=sglang | {GRPO} | rollout.engine=sglang
aorr.rollout.temperature=0.6 | {GRPO} | rollout.temperature=0.6
aorr.rollout.top_p=0.9 | {GRPO} | rollout.top_p=0.9
aorr.rollout.top_k=20 | {GRPO} | rollout.top_k=20
aorr.rollout.top_p=0.8 | {GRPO} | algorithm.support=full
aorr.rollout.tensor_model_parallel_size=4 | {GRPO} | rollout.layout=tp4
aorr.rollout.pipeline_model_parallel_size=2 | {GRPO} | rollout.layout=tp2-pp2
aorr.rollout.data_parallel_size=2 | {SGLANG} | rollout.layout=tp4-adp2
aorr.rollout.expert_parallel_size=2 | {GRPO} | rollout.layout=tp2-ep2
aorr.rollout.gpu_memory_utilization=0.7 | {GRPO} | rollout.memory_fraction=0.7
aorr.rollout.free_cache_engine=false | {GRPO} | rollout.sleep=false
aorr.rollout.max_num_seqs=64 | {GRPO} | rollout.max_running_requests=64
aorr.rollout.enforce_eager=true | {GRPO} | rollout.vllm.enforce_eager=true
aorr.rollout.enable_prefix_caching=false | {SGLANG} | rollout.sglang.disable_radix_cache=true
aorr.rollout.enable_chunked_prefill=false | {GRPO} | rollout.vllm.enable_chunked_prefill=false
aorr.rollout.max_num_batched_tokens=4096 | {GRPO} | rollout.vllm.max_num_batched_tokens=4096
aorr.rollout.engine_kwargs.vllm.*=3 | {GRPO} | rollout.vllm.x=3
aorr.rollout.engine_kwargs.sglang.*=3 | {SGLANG} | rollout.sglang.x=3
aorr.rollout.quantization=fp8 | {SGLANG} | rollout.wire=fp8_block
aorr.rollout.full_determinism=true | {GRPO} | job.deterministic=true
aorr.rollout.multi_turn.enable=true | {TOOLS} {TURNS}=5 | unused.rollout.max_turns=5
{TURNS}=4 | {TOOLS} | unused.rollout.max_turns=4
aorr.rollout.multi_turn.format=llama3 | {TOOLS} | unused.rollout.tool_call_parser=llama3
{VAL}.n=8 | {SAMPLED} {VAL}.temperature=1.0 | evaluation.samples=8
{VAL}.temperature=0.5 | {SAMPLED} | evaluation.temperature=0.5
{VAL}.temperature=0.5 | {GRPO} | evaluation.temperature=0.0
{VAL}.top_p=0.7 | {SAMPLED} | evaluation.top_p=0.7
{VAL}.top_k=-1 | {SAMPLED} | rollout.top_k=0
{VAL}.do_sample=true | {GRPO} {VAL}.temperature=0.3 | evaluation.temperature=0.3
trainer.test_freq=5 | {GRPO} | evaluation.every=5
trainer.val_before_train=true | {GRPO} trainer.test_freq=5 | evaluation.every=5
trainer.total_training_steps=33 | {GRPO} | job.iterations=33
trainer.total_epochs=3 | {GRPO} trainer.total_training_steps=34 | job.iterations=34
trainer.default_local_dir=out | {GRPO} | job.output=out
trainer.save_freq=7 | {GRPO} | checkpoint.every=7
trainer.max_actor_ckpt_to_keep=3 | {GRPO} trainer.save_freq=7 | checkpoint.keep=3
trainer.max_actor_ckpt_to_keep=null | {GRPO} trainer.save_freq=7 | checkpoint.keep=null
{A}.checkpoint.save_contents=[hf_model] | {GRPO} trainer.save_freq=7 | checkpoint.export_every=7
trainer.resume_mode=auto | {GRPO} | recipe=grpo
trainer.logger=["console","swanlab"] | {GRPO} | tracking.services=[swanlab]
trainer.project_name=p | {GRPO} | tracking.project=p
trainer.experiment_name=e | {GRPO} | tracking.name=e
trainer.nnodes=2 | {GRPO} | ranks=16
trainer.n_gpus_per_node=4 | {GRPO} | ranks=4
"""
NAMES = {
    "aorr.actor.megatron.override_transformer_config.*": "moe_aux_loss_coeff",
    "aorr.actor.megatron.override_ddp_config.*": "overlap_grad_reduce",
    "aorr.actor.optim.override_optimizer_config.*": "optimizer_cpu_offload",
}
"""Keys in place of .*, x for others."""


def arrivals() -> list[tuple[str, str, list[str], str, str]]:
    """(key of verl, its value, further overrides, our key, its value) of each line."""
    text = DATA + ALGORITHM + TRAINED.format(**ACTOR) + TRAINED.format(**CRITIC) + MODELS + RUN
    found = []
    for line in filter(None, text.replace("aorr.", "actor_rollout_ref.").splitlines()):
        left, context, right = (part.strip() for part in line.split(" | "))
        (key, value), (ours, expected) = left.split("=", 1), right.split("=", 1)
        found.append((key, value, context.split(), ours, expected))
    return found
