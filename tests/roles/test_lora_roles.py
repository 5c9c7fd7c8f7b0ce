"""Roles that train adapters: what they save, in PEFT's format too, and what their engines compute with."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.helpers.rank_pool import job_context
from tests.helpers.roles import build_role
from tests.helpers.tiny_models import oracle, oracle_outputs, random_rows, tiny_model
from tests.roles.updates import classifier, heads, own_rows, square_loss
from verl_mg.batch import Batch
from verl_mg.config import Config, LoraConfig, OptimizerConfig, RecipeConfig, load_config
from verl_mg.data import Prompt, PromptFeed, PromptSet
from verl_mg.engines import Sampling
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.errors import UserError
from verl_mg.job.build_models import ModelRoleBuilder
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import read_config
from verl_mg.roles import role
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor, Critic, TrainableRole
from verl_mg.rollout.engine_group import HFEngineGroup
from verl_mg.rollout.rollout import RolloutSetup
from verl_mg.rollout.sync_rollout import SyncRollout
from verl_mg.weight_sync import transfer_plan

COUNT, LORA = 8, LoraConfig(rank=4, alpha=6.0)
# Two steps: in the first one only B has a gradient.
OPTIMIZER = OptimizerConfig(lr=0.05)
NAMES = ("qwen2", "qwen3", "gemma2", "gpt_oss", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
OF_EXPERTS = ("mixtral", "deepseek_v2", "deepseek_v3")
"""Of these the experts have adapters too."""
LATENT_ATTENTION = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, name, layers=2) for name in NAMES}


def rows(model: Path) -> Batch:
    batch = random_rows(COUNT, read_config(model).vocab)
    batch["sample_id"] = torch.arange(COUNT)
    batch["returns"] = batch["noise"] * 5
    return own_rows(batch)


def role_on(
    kind: type[TrainableRole],
    model: Path,
    layout: str,
    lora: LoraConfig,
    dtype: torch.dtype = torch.float32,
    ranks: int = 0,
) -> TrainableRole:
    """A role on the first `ranks` ranks, all by default."""
    groups = ParallelGroups(Placement.on(Layout.parse(layout), ranks or dist.get_world_size()))
    options = {"temperature": 0.9, "tokens_per_micro_batch": 60, "optimizer": OPTIMIZER}
    return build_role(kind, model, groups, dtype=dtype, lora=lora, **options)


def learn(role: TrainableRole, batch: Batch) -> None:
    loss = square_loss if isinstance(role, Critic) else policy_loss
    for _ in range(2):
        role.update(batch, loss, "token-mean")


def policy_loss(tokens) -> tuple[Tensor, dict[str, Tensor]]:
    return -tokens["advantages"] * tokens.logprobs, {}


def outputs_by_row(role: TrainableRole, batch: Batch) -> dict[int, Tensor]:
    column = role.forward(batch)
    return dict(zip(batch["sample_id"].tolist(), column.split(batch.lengths.tolist()), strict=True))


def lora_of(model: Path) -> LoraConfig:
    return LORA.model_copy(update={"experts": model.name in OF_EXPERTS})


def trained_and_saved(
    kind: type[TrainableRole], model: Path, layout: str, folder: Path, ranks: int, lora: LoraConfig | None = None
) -> dict[int, Tensor]:
    role = role_on(kind, model, layout, lora or lora_of(model), ranks=ranks)
    batch = rows(model)
    before = {name: values.detach().clone() for name, values in role.runner.parameters().items()}
    learn(role, batch)
    for name, values in role.runner.parameters().items():
        assert torch.equal(before[name], values) or name == "output_layer.weight"
    role.save(folder, model)
    assert role.runner.is_member == (dist.get_rank() < (ranks or dist.get_world_size()))
    return outputs_by_row(role, batch)


def logprobs_of_loaded_adapters(kind: type[TrainableRole], model: Path, layout: str, folder: Path) -> dict[int, Tensor]:
    lora = lora_of(model).model_copy(update={"path": folder})
    return outputs_by_row(role_on(kind, model, layout, lora), rows(model))


def together(results: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    found = {i: values for result in results for i, values in result.items()}
    assert sorted(found) == list(range(COUNT))
    return found


def assert_close(results: list[dict[int, Tensor]], expected: dict[int, Tensor]) -> None:
    for i, values in together(results).items():
        assert torch.allclose(values, expected[i], atol=2e-5)


def merged(base: dict[str, Tensor], adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    whole, count = dict(base), 0
    for name, a in adapters.items():
        if ".lora_A." in name:
            tensor = name.removeprefix("base_model.model.").replace(".lora_A", "")
            delta = LORA.alpha / LORA.rank * adapters[name.replace("lora_A", "lora_B")] @ a
            assert delta.abs().max() > 1e-3
            whole[tensor], count = base[tensor] + delta, count + 1
    assert count
    return whole


@pytest.mark.parametrize(("name", "layout", "count", "ranks_of_it", "other"), [
    ("qwen2", "tp2-pp2", 4, 4, "tp1"),
    ("qwen3", "tp1", 1, 1, "tp2"),
    ("qwen3", "tp2", 3, 2, "pp2"),
    ("qwen3_moe", "tp2-ep2", 4, 4, "ep2"),
    ("deepseek_v3", "tp2-ep2-etp1", 4, 4, "tp2-ep2-etp1"),
    pytest.param("gemma2", "tp2-pp2", 4, 4, "tp1", marks=pytest.mark.nightly),
    pytest.param("gpt_oss", "tp2-ep2", 4, 4, "tp1", marks=pytest.mark.nightly),
    pytest.param("mixtral", "tp2-ep2", 4, 4, "ep2", marks=pytest.mark.nightly),
    pytest.param("deepseek_v2", "ep2", 2, 2, "tp2", marks=pytest.mark.nightly),
])  # fmt: skip
def test_saved_model_contains_merged_weights_and_the_adapters(
    ranks, models, tmp_path, name, layout, count, ranks_of_it, other
):
    model, saved = models[name], tmp_path / "saved"
    expected = together(ranks.run(count, trained_and_saved, Actor, model, layout, saved, ranks_of_it))
    base, adapters = load_file(model / "model.safetensors"), load_file(saved / "adapter" / "adapter_model.safetensors")
    whole, found = merged(base, adapters), load_file(saved / "model.safetensors")
    assert found.keys() == base.keys()
    assert all(torch.allclose(found[name], whole[name], atol=1e-6) for name in base)
    assert all(torch.equal(found[name], base[name]) for name in base if whole[name] is base[name])
    assert_close(ranks.run(2, logprobs_of_loaded_adapters, Actor, model, other, saved / "adapter"), expected)


# PEFT 0.21 takes every gate_proj, up_proj and down_proj of DeepSeek for that of experts, so it gets attention alone.
@pytest.mark.parametrize("name", [
    "qwen2",
    "deepseek_v3",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen3", "gemma2", "gpt_oss", "qwen3_moe", "mixtral")),
])  # fmt: skip
def test_saved_adapters_loaded_by_peft_give_the_same_logits(ranks, models, tmp_path, name):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    saved = tmp_path / name
    targets = LATENT_ATTENTION if name == "deepseek_v3" else None
    lora = LORA.model_copy(update={"targets": targets, "experts": name == "mixtral"})
    ranks.run(2, trained_and_saved, Actor, models[name], "tp2", saved, 2, lora)
    net = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models[name]), saved / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(saved)
    tokens = torch.arange(1, 17)[None]
    with torch.no_grad():
        ours, theirs, before = (m(tokens).logits for m in (whole, net, oracle(models[name])))
    assert (ours - theirs).abs().max() < 1e-4 < 1e-2 < (ours - before).abs().max()


def test_adapters_saved_by_peft_give_the_same_logprobs(ranks, models, tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = models["qwen3"]
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    net = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).eval()
    net.save_pretrained(tmp_path / "peft")
    lora = LORA.model_copy(update={"path": tmp_path / "peft", "targets": ["q_proj", "down_proj"]})
    batch = random_rows(COUNT, read_config(model).vocab)
    for result in ranks.run(2, logprobs_with, model, "tp2", lora):
        for i, values in result.items():
            tokens, mask = batch.row("tokens", i), batch.row("loss_mask", i)
            with torch.no_grad():
                log_p = (net(tokens[None]).logits[0] / 0.9).log_softmax(-1)[:-1]
            wanted = log_p.gather(1, tokens[1:, None]).squeeze(1)
            assert torch.allclose(values[1:][mask[1:]], wanted[mask[1:]], atol=2e-5)


def logprobs_with(model: Path, layout: str, lora: LoraConfig) -> dict[int, Tensor]:
    return outputs_by_row(role_on(Actor, model, layout, lora), rows(model))


def test_critic_with_adapters_trains_and_saves_its_head(ranks, models, tmp_path):
    model, saved = models["qwen3"], tmp_path / "saved"
    expected = together(ranks.run(4, trained_and_saved, Critic, model, "tp2-pp2", saved, 4))
    assert_close(ranks.run(1, trained_and_saved, Critic, model, "tp1", tmp_path / "alone", 1), expected)
    assert_close(ranks.run(2, logprobs_of_loaded_adapters, Critic, model, "tp2", saved / "adapter"), expected)
    adapters = load_file(saved / "adapter" / "adapter_model.safetensors")
    found = load_file(saved / "model.safetensors")
    assert torch.equal(adapters["base_model.model.score.weight"], found["score.weight"])
    assert (found["score.weight"] - classifier(model).score.weight).abs().max() > 1e-2
    assert json.loads((saved / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == ["score"]
    nets = [AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.float32)]
    try:
        from peft import PeftModel

        base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
        nets.append(PeftModel.from_pretrained(base, saved / "adapter").base_model.model)
    except ImportError:
        pass
    batch = random_rows(COUNT, read_config(model).vocab)
    for net in nets:
        for i, values in expected.items():
            mask = batch.row("loss_mask", i)
            assert torch.allclose(values[mask], heads(net, batch, i).detach()[:-1][mask[1:]], atol=2e-5)


def synced(model: Path, layout: str, portion: int, dtype: torch.dtype) -> dict[str, object]:
    actor = role_on(Actor, model, layout, LORA, dtype)
    engine = HFEngine(model, "cpu", dtype, load_weights=False)
    context = job_context()
    # The weight sync needs no prompts.
    feed, records = PromptFeed(PromptSet([Prompt(0, (2,), "", None, {})])), []
    setup = RolloutSetup(sampling=Sampling(max_new_tokens=4), seed=5, context=context, prompts=feed, records=records)
    rollout = SyncRollout(HFEngineGroup(engine, context), setup)
    own = actor.runner.parameters()
    before = {name: values.detach().clone() for name, values in own.items()}
    with mock.patch.object(transfer_plan, "CHUNK_BYTES", portion):
        rollout.update_weights(actor)
        learn(actor, rows(model))
        rollout.update_weights(actor)
    assert rollout.metrics["weight_sync/bytes_received"] == rollout.metrics["weight_sync/bytes_lower_bound"]
    assert all(torch.equal(before[name], values) for name, values in own.items())
    storages = {name: values.untyped_storage().data_ptr() for name, values in own.items()}
    held = engine.parameters()
    shared = {name for name, values in held.items() if values.untyped_storage().data_ptr() in storages.values()}
    adapted = {storages[name] for name in actor.runner.computed_parameters}
    assert adapted and not adapted & {values.untyped_storage().data_ptr() for values in held.values()}
    actor.save(model.parent / f"synced-{model.name}-{layout}", model)
    return {"held": {name: values.clone() for name, values in held.items()}, "shared": shared}


@pytest.mark.parametrize(("layout", "count", "portion", "dtype"), [
    ("tp1", 2, 2**30, torch.float32),
    ("tp2-pp2", 4, 2**14, torch.float32),
    ("tp2", 2, 2**14, torch.bfloat16),
])  # fmt: skip
def test_engine_after_weight_transfer_has_the_merged_weights(ranks, models, layout, count, portion, dtype):
    model = models["qwen2"]
    results = ranks.run(count, synced, model, layout, portion, dtype)
    saved = AutoModelForCausalLM.from_pretrained(model.parent / f"synced-{model.name}-{layout}", dtype=dtype)
    name = "model.layers.1.mlp.down_proj.weight"
    assert (saved.state_dict()[name] - load_file(model / "model.safetensors")[name]).abs().max() > 1e-2
    for result in results:
        assert all(torch.equal(values, saved.state_dict()[name]) for name, values in result["held"].items())
        if layout == "tp1":
            assert "model.embed_tokens.weight" in result["shared"]


def test_lora_targets_that_do_not_fit_are_named_before_building(models, tmp_path):
    config = Config.model_validate({
        "model": {"path": models["qwen3_moe"]},
        "data": {"train": tmp_path},
        "actor": {"lora": {"targets": ["q_proj", "gate_proj"]}},
    })  # fmt: skip
    with pytest.raises(UserError, match=r"^actor\.lora\.targets: 'gate_proj' exists only in experts"):
        ModelRoleBuilder(config, 1, JobContext(HashStore())).check({"actor"})
    with pytest.raises(UserError, match=r"lora.alhpa: unknown key. Did you mean actor.lora.alpha"):
        load_config(None, ["model.path=m", "data.train=d", "actor.lora.alhpa=3"], type(config.algorithm))


def actor_and_reference(model: Path, reference: dict[str, str]) -> tuple[bool, list[int], list[dict[int, Tensor]]]:
    """Trains adapters; returns whether both share a model, how often rows were gathered, and the log-probs of both."""
    config = Config.model_validate({
        "model": {"path": model, "dtype": "float32"},
        "data": {"train": model},
        "actor": {"layout": "tp2", "lora": LORA, "optimizer": OPTIMIZER, "tokens_per_micro_batch": 60},
        "reference": {"tokens_per_micro_batch": 60, **reference},
        "algorithm": RecipeConfig(),
    })  # fmt: skip
    context = job_context()
    builder = ModelRoleBuilder(config, dist.get_world_size(), context)
    actor, reference_role = builder.build("actor"), builder.build("reference")
    batch, gathered = rows(model), []
    learn(actor, batch)
    with pytest.MonkeyPatch.context() as patch:
        gather = role.gather_rows
        patch.setattr(role, "gather_rows", lambda *arguments: gathered.append(1) or gather(*arguments))
        with context.executor.concurrent():
            columns = [each.compute_logprobs(batch) for each in (actor, reference_role)]
    ids, lengths = batch["sample_id"].tolist(), batch.lengths.tolist()
    found = [dict(zip(ids, column.split(lengths), strict=True)) for column in columns]
    return actor.runner is reference_role.runner, gathered, found


@pytest.mark.parametrize("reference", [{"layout": "tp2"}, {"layout": "pp2"}])
def test_reference_of_an_actor_with_adapters_is_the_model_without_them(ranks, models, reference):
    results = ranks.run(2, actor_and_reference, models["qwen3"], reference)
    is_shared = reference["layout"] == "tp2"
    assert all(result[0] == is_shared and len(result[1]) == (1 if is_shared else 2) for result in results)
    batch = random_rows(COUNT, read_config(models["qwen3"]).vocab)
    with torch.no_grad():
        column, _ = oracle_outputs(oracle(models["qwen3"]), batch, 1.0)
    expected = dict(enumerate(torch.where(batch["loss_mask"], column, 0.0).split(batch.lengths.tolist())))
    assert_close([result[2][1] for result in results], expected)
    trained = together([result[2][0] for result in results])
    assert max((trained[i] - expected[i]).abs().max() for i in expected) > 1e-3
