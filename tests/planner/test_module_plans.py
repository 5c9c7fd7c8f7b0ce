"""Plans of the FSDP backend: the command, and bytes of what ranks store and of their collectives in real runs."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.tiny_models import random_rows, tiny_model
from tests.megatron.layout_models import make_model
from tests.megatron.training import OPTIMIZER, token_loss
from tests.planner.tiny_inputs import planned, refused
from verl_mg.batch import Batch
from verl_mg.cli import main
from verl_mg.config import FsdpConfig
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.fsdp.trainer import FsdpTrainer
from verl_mg.layout import EngineLayout, Layout, Placement
from verl_mg.models.hf_config import read_config
from verl_mg.planner.cost import train_seconds
from verl_mg.planner.inputs import OPTIMIZER_STATES, PlanInputs
from verl_mg.planner.iteration_time import weight_sync
from verl_mg.planner.memory import micro_batch_bytes, sharded_module, train_memory
from verl_mg.planner.training_options import fsdp_options
from verl_mg.sharding.module_table import module_table
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.trainer import MiniBatch, Objective

CONFIG = """
model: {path: MODEL, dtype: bfloat16}
data: {train: prompts.jsonl}
actor: {backend: fsdp, layout: tp2, recompute: true}
critic: {backend: fsdp, dtype: float32, layout: cp2}
rollout: {engine: sglang, layout: tp2}
fsdp: {replicas: 2}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("m") / "model", "qwen3_moe", 2, 64)
    for file in folder.glob("*.safetensors"):  # a plan needs config.json alone
        file.unlink()
    return folder


def inputs(model: Path, ranks: int = 8, options: FsdpConfig | None = None, **fields: Any) -> PlanInputs:
    chosen = fsdp_options(options or FsdpConfig(), "bfloat16")
    return PlanInputs(module_table(model), ranks, options=chosen, **fields)


def test_plan_of_a_job_reads_backend_replicas_and_roles(capsys, model):
    file = model.parent / "job.yaml"
    file.write_text(CONFIG.replace("MODEL", str(model)))
    arguments = ("plan", "recipes/ppo.py", "--config", str(file), "--ranks", "8")
    numbers = planned(capsys, *arguments)
    assert numbers["problem"] is None and numbers["train"]["layout"] == "tp2" and numbers["train"]["dp"] == 4
    assert numbers["train"]["collectives"].keys() == {"gathered", "reduced", "replicated"}
    assert numbers["assumptions"][0].startswith("backend fsdp: float32 weights") and "in 2 copies" in str(numbers)
    assert [role["role"] for role in numbers["auxiliary_roles"]] == ["critic"]
    assert numbers["sync"]["gib"]["received by a rank"] == numbers["sync"]["gib"]["lower bound of received"]
    main(list(arguments))
    assert "GiB of collectives in an optimizer step" in capsys.readouterr().out


def test_search_finds_layouts_of_the_backend_alone(capsys, model):
    found = planned(
        capsys, "plan", "--model", str(model), "--ranks", "8", "--backend", "fsdp", "--rollout", "tp2", "--search"
    )
    layouts = {row["train"] for row in found["layouts"]}
    assert "tp2" in layouts and not any("pp" in layout or "ep" in layout for layout in layouts)
    assert {row["recompute"] for row in found["layouts"]} <= {"nothing", "whole layers"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train", "pp2"], "layout pp2-dp4: pp2 is not possible with backend: fsdp. Leave out pp2. Nearest valid"),
        (["--train", "tp8"], "tp8 * cp1 does not divide the 4 attention heads"),
        (["--train", "tp2", "--critic", "ep2"], "critic: layout ep2-dp8: ep2 is not possible with backend: fsdp"),
    ],
)
def test_plan_layout_that_a_job_would_refuse_is_one_line(capsys, model, arguments, words):
    chosen = ["--model", str(model), "--ranks", "8", "--backend", "fsdp", "--rollout", "tp2"]
    assert words in refused(capsys, "plan", *chosen, *arguments)


def test_plan_says_that_rows_are_computed_each_by_itself_and_refuses_cp(capsys, tmp_path):
    model = tiny_model(tmp_path, "qwen3_next", 2)
    chosen = ["--model", str(model), "--ranks", "4", "--backend", "fsdp", "--rollout", "tp2"]
    numbers = planned(capsys, "plan", *chosen, "--train", "tp1")
    assert any("each by itself" in line and "linear_attn" in line for line in numbers["assumptions"])
    assert "no cp with rows that are computed each by itself" in refused(capsys, "plan", *chosen, "--train", "cp2")


def test_plan_of_a_role_with_an_optimizer_of_megatron_is_refused(capsys, model):
    file = model.parent / "muon.yaml"
    file.write_text(CONFIG.replace("MODEL", str(model)))
    chosen = ["recipes/ppo.py", "--config", str(file), "--ranks", "8", "actor.optimizer.kind=muon"]
    assert "actor.optimizer.kind: muon is not possible with backend: fsdp" in refused(capsys, "plan", *chosen)


def test_memory_of_options_moves_where_they_say(model):
    layout = Layout().fit(8)
    plain, host, copies, kept = (
        {
            part: size
            for part, (size,) in train_memory(inputs(model, options=FsdpConfig(**options)), layout).parts.items()
        }
        for options in ({}, {"cpu_offload": True}, {"replicas": 4}, {"reshard_after_forward": False})
    )
    assert host["gradients"] == host["optimizer states"] == 0 and host["gathered weights"] == plain["gathered weights"]
    assert 3 < copies["gradients"] / plain["gradients"] <= 4  # less padding
    assert kept["gradients"] == plain["gradients"] and kept["gathered weights"] >= plain["gathered weights"]
    assert copies["activations"] == plain["activations"] > 0


def test_sync_receives_lower_bound_and_slower_links_cost_seconds(model):
    layout = Layout.parse("tp2").fit(8)
    sync = weight_sync(inputs(model), layout, EngineLayout.parse("tp2"))
    assert sync.received == sync.lower_bound and min(sync.received) > 0
    slow, fast = (inputs(model, intra_node=rate) for rate in (1e-3, 1e3))
    assert train_seconds(slow, layout) > train_seconds(fast, layout)
    host = inputs(model, options=FsdpConfig(cpu_offload=True))
    assert train_seconds(host, layout) > train_seconds(inputs(model), layout)


CASES = [("dense", "dp2", FsdpConfig()), ("mixture", "dp4", FsdpConfig(replicas=2))]
NIGHTLY_CASES = [
    ("dense", "dp4", FsdpConfig(reshard_after_forward=False)),
    ("mixture", "dp2", FsdpConfig()),
    ("mixture", "dp4", FsdpConfig()),
    ("mixture", "tp2-dp2", FsdpConfig()),
    ("dense", "cp2-dp2", FsdpConfig()),
    ("tied", "dp4", FsdpConfig(replicas=2)),
    ("latent", "dp2", FsdpConfig()),
]
MICRO_BATCHES = 2


class Collectives(TorchDispatchMode):
    """Counts the bytes of collectives by name and size of their group: outputs of gathers, inputs of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_"):
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            tensors = {"_allgather_base_": args[:1], "_reduce_scatter_base_": args[1:2]}.get(name, args[0])
            self.bytes[name, group.size()] += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


@dataclass
class Run:
    """Bytes of a role's memory on this rank, and of the collectives of inference and of an update."""

    weights: int
    gradients: int
    moments: int
    inference: Counter[tuple[str, int]] = field(default_factory=Counter)
    update: Counter[tuple[str, int]] = field(default_factory=Counter)


def run(model: Path, layout: str, options: FsdpConfig, rows: Batch) -> Run:
    """Two micro-batches in bfloat16, whose weights are gathered in it."""
    groups = MeshGroups(Placement.on(Layout.parse(layout), dist.get_world_size()), options.replicas)
    runner = FsdpRunner(ModelSpec(model, torch.bfloat16, fsdp=options), groups)
    micro_batches = [rows] * MICRO_BATCHES
    with Collectives() as inference:
        runner.infer(micro_batches, 1.0)
    trainer = FsdpTrainer(runner, OPTIMIZER)
    scored = int((rows["loss_mask"] & (rows.positions > 0)).sum())
    with Collectives() as update:
        trainer.update(MiniBatch(micro_batches, None, scored, 0), Objective(token_loss, "token-mean", 1.0))
    found = (runner.weight_storages(), trainer.gradient_storages(), trainer.state_storages())
    return Run(*(sum(storage.nbytes() for storage in part) for part in found), inference.bytes, update.bytes)


@pytest.mark.parametrize(
    ("name", "layout", "options"), [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY_CASES)]
)
def test_plan_equals_bytes_of_a_run(ranks, tmp_path, name, layout, options):
    model, count = make_model(tmp_path / "model", name), 2 if layout == "dp2" else 4
    plan, fitted = inputs(model, count, options), Layout.parse(layout).fit(count)
    parts = {part: size for part, (size,) in train_memory(plan, fitted).parts.items()}
    runs = ranks.run(count, run, model, layout, options, random_rows(6, read_config(model).vocab))
    assert {found.weights for found in runs} == {parts["weights"]}
    assert {found.gradients for found in runs} == {parts["gradients"]}
    # Adam's moments have no padding: the first rank, whose parts are whole, has the most.
    assert runs[0].moments == parts[OPTIMIZER_STATES] == max(found.moments for found in runs)
    sharding, module = fitted.dp * fitted.cp // options.replicas, sharded_module(plan, fitted)
    assert module.sharding == sharding
    update, inference = micro_batch_bytes(plan, fitted), micro_batch_bytes(plan, fitted, trains=False)
    for found in runs:
        assert found.update["_allgather_base_", sharding] == MICRO_BATCHES * update.gathered
        assert found.update["_reduce_scatter_base_", sharding] == MICRO_BATCHES * update.reduced
        if options.replicas > 1:
            assert found.update["allreduce_", options.replicas] == MICRO_BATCHES * update.replicated > 0
        # What is not freed after its pass stays gathered until the last micro-batch.
        repeated = inference.gathered - 2 * sharding * module.rest.sharded if options.reshard_after_forward else 0
        assert found.inference["_allgather_base_", sharding] == inference.gathered + (MICRO_BATCHES - 1) * repeated
