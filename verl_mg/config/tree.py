"""The complete configuration of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, InstanceOf, PlainSerializer, PositiveInt, create_model, field_validator
from pydantic_core import PydanticCustomError

from verl_mg.config.alarm import AlarmConfig
from verl_mg.config.data import DataConfig, EvaluationConfig, RewardConfig
from verl_mg.config.roles import (
    CriticConfig,
    Dtype,
    ReferenceConfig,
    RoleSection,
    RolloutConfig,
    TeacherConfig,
    TrainableConfig,
)
from verl_mg.config.section import ConfigSection, RecipeConfig
from verl_mg.stores.url import ObjectUrl


def _place(value: Any) -> Any:
    if not isinstance(value, str | Path | ObjectUrl):
        raise PydanticCustomError("path_type", "Input should be a path")
    # A path has one slash where a URL has two.
    return value if isinstance(value, ObjectUrl) else ObjectUrl.parse(str(value)) or value


Place = Annotated[
    Path | Annotated[InstanceOf[ObjectUrl], PlainSerializer(str, return_type=str)], BeforeValidator(_place)
]
"""Local folder, or one of an object store."""


class ModelConfig(ConfigSection):
    """Model from which the policy starts."""

    path: Path
    """Hugging Face directory with config.json, weights and tokenizer. If there is no such directory, a model of the
    Hugging Face hub such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION, or of ModelScope with the prefix
    modelscope:."""
    dtype: Dtype = "float32"
    """Type of the weights in training and generation, for roles whose `dtype` is null. Master weights and moments of
    bfloat16 are float32."""
    kernels: Literal["auto", "transformer_engine", "torch"] = "auto"
    """Kernels of training. transformer_engine: NVIDIA's Transformer Engine, which must be installed, for bfloat16.
    torch: torch's, on GPUs and CPUs. auto: Transformer Engine for bfloat16 on GPUs where it is installed, otherwise
    torch."""


class FsdpConfig(ConfigSection):
    """Options of the roles with `backend: fsdp`."""

    replicas: PositiveInt = 1
    """Copies of the model, each sharded over its part of the ranks (HSDP): with as many as there are nodes, weights are
    gathered within a node. Must divide the data-parallel size."""
    reshard_after_forward: bool = True
    """Free the gathered weights of a layer after its forward pass and gather them again in the backward pass. false:
    more memory, less communication."""
    freeze_vision_tower: bool = False
    """Do not train the vision tower of vision-language models, nor what connects it with the language model."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, where the optimizer step is computed as well."""


class MegatronConfig(ConfigSection):
    """Fields of megatron-core's configurations by their own names, for what no other key sets.

    They are checked against the installed version. A field that another key sets, or that would change what a recipe
    computes, is an error that names the reason.
    """

    transformer: dict[str, Any] = {}
    """Fields of TransformerConfig for every model of the job, such as {fp8: hybrid, fp8_recipe: blockwise}. Updates
    change the biases of DeepSeek-V3's routers by moe_router_bias_update_rate, which is 0 unless it is set: 0.001 as in
    its pre-training balances the loads of experts. mtp_loss_scaling_factor trains the actor's layer of multi-token
    prediction, and with mtp_detach_heads nothing but the layer. moe_aux_loss_coeff and moe_z_loss_coeff are factors of
    losses for the balance of experts within each row, and for small logits of routers."""
    optimizer: dict[str, Any] = {}
    """Fields of OptimizerConfig for every trained model."""
    # Off by default there: overlap_grad_reduce and overlap_param_gather sum gradients into the norm in another order,
    # which changes the last bits of a run, and gain only where a step has few micro-batches.
    ddp: dict[str, Any] = {}
    """Fields of DistributedDataParallelConfig for every trained model, such as {overlap_grad_reduce: true}."""


class JobConfig(ConfigSection):
    """Run folder, length and process supervision."""

    output: Place = Path("runs/job")
    """Run folder: metrics, samples, checkpoints and the trained model. The same command resumes there. It is a local
    folder or one of an S3 bucket, s3://BUCKET/runs/first: address and credentials of the store are in the environment
    variables of its clients, such as AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID."""
    iterations: PositiveInt = 100
    """Iterations of the recipe."""
    seed: int = 0
    """Random seed of prompt order and sampling."""
    save: bool = True
    """Write the trained model as a Hugging Face directory at the end."""
    console: bool = True
    """Print a line per iteration."""
    deterministic: bool = False
    """Use only deterministic kernels, of which attention is torch's, and assign samples to engines statically, so that
    a run is bitwise repeatable. Slower."""
    heartbeat_timeout_s: float = Field(60.0, gt=0)
    """Seconds without a heartbeat of a rank after which the job ends and names the rank."""
    stall_timeout_s: float = Field(3600.0, ge=0)
    """Seconds without progress on any rank after which the job ends with the stack of the blocking rank. 0: no
    limit."""
    dump_on_stall: bool = False
    """Write the stacks of all threads of all ranks, and torch's records of their latest collectives, into the folder
    stalls of the run when the job ends because a rank is lost or no rank makes progress."""

    @property
    def folder(self) -> Path:
        """Local folder of the run: `output`, or where a node has its files of a run on an object store."""
        return self.output.working_folder if isinstance(self.output, ObjectUrl) else self.output


class RecordConfig(ConfigSection):
    """Records of samples in the run folder."""

    samples_per_rank: int | None = Field(None, ge=0)
    """Samples of an iteration that each rank records. null: all, which `--replay` needs."""


class CheckpointConfig(ConfigSection):
    """Checkpoints from which an interrupted run resumes, and exports of the model."""

    every: int = Field(20, ge=0)
    """Iterations between checkpoints. 0: only when a signal asks the job to end."""
    keep: PositiveInt | None = 2
    """Number of newest checkpoints that are kept. null: all."""
    best: str | None = None
    """Metric such as eval/reward; the checkpoint with its highest value is kept as well. null: none."""
    export_every: int = Field(0, ge=0)
    """Iterations between exports of the model as a Hugging Face directory. 0: never."""


class TrackingConfig(ConfigSection):
    """Tracking services for metrics, in addition to files, TensorBoard and the console."""

    services: list[Literal["wandb", "mlflow", "swanlab"]] = []
    """Services that receive the metrics. Their packages are installed separately."""
    project: str = "verl_mg"
    """Name of the project (experiment in MLflow)."""
    name: str | None = None
    """Name of the run. null: name of the folder `job.output`."""
    samples: int = Field(0, ge=0)
    """Samples of each iteration that wandb and swanlab receive as a table, of those on rank 0. 0: none."""
    prometheus_port: int | None = Field(None, ge=0, le=65535)
    """Port at which rank 0 serves the latest metrics and the state of the run to Prometheus, at /metrics. 0: a free
    one; prometheus.json in the run folder has the address. null: none."""
    prometheus_host: str = "127.0.0.1"
    """Address that the port is opened on. Other machines reach only another address than the default, such as the
    node's in a cluster."""


class ProfileConfig(ConfigSection):
    """Profiling of time and memory."""

    synchronize: bool = False
    """Wait for devices and ranks between phases, so that `time/phase/` is exact. Prints a table at the end. Slower."""
    iterations: list[PositiveInt] = []
    """Iterations of which torch's profiler writes a trace."""
    ranks: str = "0"
    """Ranks that write a trace, such as 0,8-11."""
    memory: bool = False
    """Write a memory snapshot with each trace."""

    @field_validator("ranks", mode="before")
    @classmethod
    def _single_rank_to_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value  # as YAML reads it


class Config(ConfigSection):
    """Complete configuration of a job."""

    model: ModelConfig
    """Model from which the policy and, by default, the other models start."""
    data: DataConfig
    """Prompts and the fields of their records."""
    actor: TrainableConfig = TrainableConfig()
    """Policy that is trained."""
    critic: CriticConfig = CriticConfig()
    """Value model, for recipes with a critic."""
    reward_model: CriticConfig = CriticConfig()
    """Reward model: trained by recipes/reward_model.py, frozen with `reward.from_model`."""
    process_reward: CriticConfig = CriticConfig()
    """Implicit process reward model of recipes/prime.py."""
    reference: ReferenceConfig = ReferenceConfig()
    """Frozen policy of the KL penalty, or the only teacher."""
    teachers: dict[str, TeacherConfig] = {}
    """Teachers of recipes that distill, by a name of your choice. {}: the reference is the teacher."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of samples."""
    reward: RewardConfig = RewardConfig()
    """Reward of a sample."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on `data.test`."""
    fsdp: FsdpConfig = FsdpConfig()
    """Options of the roles with `backend: fsdp`."""
    megatron: MegatronConfig = MegatronConfig()
    """Fields of megatron-core's configurations by their own names."""
    job: JobConfig = JobConfig()
    """Run folder, length and process supervision."""
    record: RecordConfig = RecordConfig()
    """Records of samples."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and exports."""
    tracking: TrackingConfig = TrackingConfig()
    """Tracking services."""
    alarm: dict[str, AlarmConfig] = {}
    """Alarms by the name of their metric, such as {reward/std: "< 0.01 for 5"}."""
    profile: ProfileConfig = ProfileConfig()
    """Profiling."""
    algorithm: Any = None
    """Section of the recipe, its class `Config`."""

    def section(self, name: str) -> Any:
        """Returns the section of a model, such as actor or teachers.NAME."""
        first, _, teacher = name.partition(".")
        return self.teachers[teacher] if teacher else getattr(self, first)

    def dtype_of(self, section: str) -> Dtype:
        """Returns the type of the weights of the role with this section, such as actor."""
        role: RoleSection = self.section(section)
        return role.dtype or self.model.dtype

    def num_updates(self, section: str) -> int:
        """Returns the optimizer steps of the whole job for the role with this section, such as actor.

        They are fewer where an iteration has fewer samples than mini-batches.
        """
        recipe = self.algorithm
        # The first iterations of PPO and its variants can train only the critic.
        waiting = getattr(recipe, "critic_warmup", 0) if section == "actor" else 0
        iterations = max(self.job.iterations - waiting, 1)
        if section not in ("actor", "critic"):
            return iterations  # reward models take one step in an iteration
        steps: int = getattr(recipe, "num_minibatches", 1) * getattr(recipe, "num_epochs", 1)
        return iterations * steps

    @property
    def sampler_top(self) -> int:
        """Number of likeliest tokens whose log-probs engines return with each token, for score centering."""
        return getattr(getattr(self.algorithm, "off_policy", None), "score_centering", None) or 0

    @property
    def ends_at_strings(self) -> bool:
        """Whether samples can end at stop strings; requests of agents may contain some."""
        of_sets = [of_set.stop for of_set in self.data.test.values()] if isinstance(self.data.test, dict) else []
        return self.rollout.has_agents or any((self.rollout.stop, self.evaluation.stop, *of_sets))

    @property
    def reference_is_unadapted_actor(self) -> bool:
        """Whether the reference is the actor without its adapters, so that it needs no memory for weights."""
        actor, reference = self.actor, self.reference
        # A role that computes with the actor's module has to have its layout, ranks and dtype.
        same = all(
            getattr(actor, name) == getattr(reference, name)
            for name in ("backend", "layout", "pipeline_layers", "ranks", "dynamic_context")
        )
        same = same and self.dtype_of("actor") == self.dtype_of("reference")
        same = same and reference.path in (None, self.model.path) and reference.refresh_every is None
        return actor.lora is not None and same


def tree_for(algorithm: type[RecipeConfig]) -> type[Config]:
    """Returns the configuration class of a recipe whose section is `algorithm`."""
    return create_model("Config", __base__=Config, algorithm=(algorithm, Field(default_factory=algorithm)))
