"""Adapters trained through Megatron under every layout, against `transformers` with W + alpha / r * B A as weights."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.roles import megatron_runner
from tests.helpers.tiny_models import oracle, oracle_outputs, random_rows, tiny_model
from tests.megatron.training import OPTIMIZER, TEMPERATURE, token_loss, update
from verl_mg.batch import Batch
from verl_mg.checkpoint.peft import adapted_tensors, adapter_shapes, initial_adapters
from verl_mg.config import GuardConfig, LoraConfig, MegatronConfig, Recompute
from verl_mg.errors import UserError
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.models.hf_config import read_config
from verl_mg.sharding.boxes import full_box, slices
from verl_mg.sharding.megatron import Kernels
from verl_mg.sharding.weight_table import weight_table
from verl_mg.training.loss_inputs import LossInputs
from verl_mg.training.offload import CpuOffload

RANK, ALPHA, ROWS = 3, 5.0, 7
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LAYOUTS = [
    ("tp1", 1),
    ("cp2", 2),
    ("tp2-pp2", 4),
    *(pytest.param(layout, 2, marks=pytest.mark.nightly) for layout in ("tp2", "pp2", "tp1")),
]
OF_EXPERTS = [
    ("deepseek_v3", "tp2-ep2-etp1", 4),
    ("qwen3_moe", "tp2-ep2", 4),
    *(
        pytest.param(name, layout, count, marks=pytest.mark.nightly)
        for name, layout, count in (
            ("qwen3_next", "tp2-cp2-ep2", 4),
            ("deepseek_v3", "tp1", 1),
            ("deepseek_v3", "tp2-cp2-ep2", 4),
            ("deepseek_v3", "pp2-ep2", 4),
            ("deepseek_v2", "tp1", 2),
            ("deepseek_v2", "tp2-ep2", 4),
            ("qwen3_moe", "tp1", 1),
            ("qwen3_moe", "ep2", 2),
            ("qwen3_moe", "tp1-etp2", 2),
            ("mixtral", "tp2-ep2-etp1", 2),
        )
    ),
]
OF_MIXTURES = [("tp1", 1), ("ep2", 2), ("tp2-ep2-etp1", 2), ("tp2-ep2", 4)]


@dataclass(frozen=True)
class Trained:
    """After one step. adapters: (tensor of PEFT's file, box in it, values there), replicas included."""

    loss: float
    norm: float
    adapters: list[tuple[str, tuple[tuple[int, int], ...], Tensor]]
    base_is_untouched: bool


@dataclass(frozen=True)
class Expected:
    """The same of the whole model."""

    loss: float
    norm: float
    adapters: dict[str, Tensor]


def lora(folder: Path | None, targets: tuple[str, ...] | None = None, experts: bool = False) -> LoraConfig:
    targeted = list(targets) if targets else None
    return LoraConfig(rank=RANK, alpha=ALPHA, targets=targeted, path=folder, experts=experts)


def given_adapters(model: Path, folder: Path, targets: tuple[str, ...] | None = None, experts: bool = False) -> Path:
    """A folder in PEFT's format whose adapters change the model, written by hand."""
    weights = weight_table(read_config(model))
    adapted = adapted_tensors(weights, list(targets) if targets else None, experts)
    generator = torch.Generator().manual_seed(5)
    shapes = adapter_shapes(weights, adapted, RANK)
    folder.mkdir()
    values = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    save_file(values, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def rows(model: Path) -> Batch:
    return random_rows(ROWS, read_config(model).vocab)


def network_on(
    model: Path,
    layout: str,
    config: LoraConfig,
    recompute: Recompute = False,
    kernels: Kernels = "torch",
    megatron: MegatronConfig | None = None,
) -> MegatronRunner:
    options = {"recompute": recompute, "kernels": kernels, "megatron": megatron or MegatronConfig()}
    return megatron_runner(model, layout, lora=config, **options)


def step(trainer: MegatronTrainer, batch: Batch) -> dict[str, float]:
    """Two micro-batches of each data-parallel rank's share."""
    runner = trainer.runner
    own = list(range(runner.groups.coordinates.dp, len(batch), runner.layout.dp))
    return update(trainer, [batch.select(own[:-1]), batch.select(own[-1:])], batch)


def train(
    model: Path,
    layout: str,
    config: LoraConfig,
    recompute: Recompute = False,
    kernels: Kernels = "torch",
    megatron: MegatronConfig | None = None,
) -> Trained:
    runner = network_on(model, layout, config, recompute, kernels, megatron)
    before = {name: values.detach().clone() for name, values in runner.parameters().items()}
    metrics = step(MegatronTrainer(runner, OPTIMIZER), rows(model))
    untouched = all(torch.equal(before[name], values) for name, values in runner.parameters().items())
    assert runner.lora and not any(values.requires_grad for values in runner.parameters().values())
    adapters = [
        (piece.tensor, piece.source, runner.adapters()[name].detach()[slices(piece.target)].clone())
        for name, shard in runner.lora.shards.items()
        for piece in shard.pieces
    ]
    return Trained(metrics["loss"], metrics["grad_norm"], adapters, untouched)


class Adapted(torch.nn.Module):
    """The weight of a linear layer with its adapter in it."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, weight: Tensor) -> Tensor:
        return weight + ALPHA / RANK * self.b @ self.a


class AdaptedExperts(torch.nn.Module):
    """The stacked weights of a layer's experts, with the adapters of each in it; kinds are stacked along the rows."""

    def __init__(self, kinds: list[list[Adapted]]) -> None:
        super().__init__()
        self.kinds = torch.nn.ModuleList([torch.nn.ModuleList(of_kind) for of_kind in kinds])

    def forward(self, weight: Tensor) -> Tensor:
        parts = zip(weight.chunk(len(self.kinds), dim=1), self.kinds, strict=True)
        return torch.cat(
            [
                torch.stack([adapter(matrix) for matrix, adapter in zip(part, of_kind, strict=True)])
                for part, of_kind in parts
            ],
            dim=1,
        )


EXPERT_WEIGHTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
"""{stacked weight in `transformers`: its kinds by the names in the checkpoints}"""


def adapt_experts(net: torch.nn.Module, adapters: dict[str, Adapted]) -> None:
    """Installs adapters of experts, by the names of their linear layers in the checkpoint."""
    for layer in sorted({name.partition(".experts.")[0] for name in adapters}):
        of_layer = {name.partition(".experts.")[2]: x for name, x in adapters.items() if name.startswith(f"{layer}.")}
        experts = net.get_submodule(f"{layer.replace('block_sparse_moe', 'mlp')}.experts")
        count = len({name.partition(".")[0] for name in of_layer})
        for stacked, spellings in EXPERT_WEIGHTS.items():
            (kinds,) = (kinds for kinds in spellings if f"0.{kinds[0]}" in of_layer)
            found = [[of_layer[f"{expert}.{kind}"] for expert in range(count)] for kind in kinds]
            parametrize.register_parametrization(experts, stacked, AdaptedExperts(found))


def adapted_oracle(model: Path, folder: Path) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
    """`transformers` with the adapters of a folder, and these by PEFT's names."""
    net, values = copy.deepcopy(oracle(model)).requires_grad_(False), load_file(folder / "adapter_model.safetensors")
    adapters, of_experts = {}, {}
    for name in [name for name in values if name.endswith(".lora_A.weight")]:
        other = name.replace("lora_A", "lora_B")
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        adapter = Adapted(values[name], values[other])
        if ".experts." in module:
            of_experts[module] = adapter
        else:
            parametrize.register_parametrization(net.get_submodule(module), "weight", adapter)
        adapters |= {name: adapter.a, other: adapter.b}
    adapt_experts(net, of_experts)
    return net, adapters


def train_in_plain_torch(model: Path, folder: Path) -> Expected:
    net, adapters = adapted_oracle(model, folder)
    optimizer = torch.optim.AdamW(
        adapters.values(), lr=OPTIMIZER.lr, eps=OPTIMIZER.eps, betas=OPTIMIZER.betas, weight_decay=0.0
    )
    batch = rows(model)
    logprobs, entropy = oracle_outputs(net, batch, TEMPERATURE)
    scored = batch["loss_mask"] & (batch.positions > 0)
    sequences = torch.arange(len(batch)).repeat_interleave(batch.lengths)[scored]
    output = torch.stack([logprobs[scored], entropy[scored]])
    tokens = LossInputs(output, scored[scored], sequences, {"advantages": batch["advantages"][scored]})
    loss = token_loss(tokens)[0].sum() / scored.sum()
    loss.backward()
    assert all(values.grad is not None and values.grad.any() for values in adapters.values())
    norm = torch.nn.utils.clip_grad_norm_(adapters.values(), OPTIMIZER.clip_grad).item()
    optimizer.step()
    return Expected(loss.item(), norm, {name: values.detach() for name, values in adapters.items()})


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = ("llama", "qwen2", "qwen3", "gemma2", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "qwen3_next")
    models = {name: tiny_model(folder / name, name, 2) for name in names}
    models["half_moe"] = half_mixture(models["qwen3_moe"], folder / "half_moe")
    return models


def half_mixture(source: Path, folder: Path) -> Path:
    """A mixture whose first layer is a dense one: of feed-forward layers the second stage has no adapter."""
    config = AutoConfig.from_pretrained(source, mlp_only_layers=[0])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cases(models, tmp_path_factory) -> dict[str, tuple[Path, Expected]]:
    """{architecture: (a folder with adapters, what plain torch makes of them)}"""
    folder, found = tmp_path_factory.mktemp("adapters"), {}
    for name in ("llama", "qwen2", "qwen3", "gemma2", "qwen3_moe"):
        adapters = given_adapters(models[name], folder / name)
        found[name] = (adapters, train_in_plain_torch(models[name], adapters))
    return found


def compare(results: list[Trained], expected: Expected, before: Path) -> None:
    start = load_file(before / "adapter_model.safetensors")
    seen: dict[str, int] = dict.fromkeys(expected.adapters, 0)
    for result in results:
        assert result.base_is_untouched
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.norm == pytest.approx(expected.norm, rel=1e-5)
        for name, box, values in result.adapters:
            wanted = expected.adapters[name]
            moved = (wanted - start[name]).abs().max()
            assert moved > 0
            assert (values - wanted[slices(box)]).abs().max() < 1e-4 * moved + 1e-7, name
            seen[name] += values.numel()
    assert all(count >= expected.adapters[name].numel() for name, count in seen.items())


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])
def test_lora_step_equals_plain_torch_under_every_layout(ranks, models, cases, name, layout, count):
    folder, expected = cases[name]
    compare(ranks.run(count, train, models[name], layout, lora(folder)), expected, folder)


@pytest.mark.parametrize(("layout", "count"), OF_MIXTURES)
def test_lora_step_on_attention_of_a_mixture_equals_plain_torch(ranks, models, cases, layout, count):
    folder, expected = cases["qwen3_moe"]
    assert {name.split(".")[-3] for name in expected.adapters} == set(ATTENTION)
    compare(ranks.run(count, train, models["qwen3_moe"], layout, lora(folder)), expected, folder)


@pytest.mark.parametrize(("name", "layout", "count"), OF_EXPERTS)
def test_lora_step_on_experts_and_latent_attention_equals_plain_torch(ranks, models, tmp_path, name, layout, count):
    folder = given_adapters(models[name], tmp_path / "adapters", experts=True)
    expected = train_in_plain_torch(models[name], folder)
    assert any(".experts." in tensor for tensor in expected.adapters)
    compare(ranks.run(count, train, models[name], layout, lora(folder, experts=True)), expected, folder)


@pytest.mark.parametrize(("layout", "count"), [("tp1", 1), ("tp2-pp2", 4)])
def test_lora_step_with_recompute_equals_plain_torch(ranks, models, cases, layout, count):
    folder, expected = cases["qwen3"]
    compare(ranks.run(count, train, models["qwen3"], layout, lora(folder), True), expected, folder)


@pytest.mark.parametrize(("layout", "count"), [("tp1", 1), ("tp2-pp2", 4)])
@pytest.mark.nightly
def test_lora_step_with_transformer_engine_equals_plain_torch(transformer_engine, models, cases, layout, count):
    folder, expected = cases["qwen3"]
    recompute = count > 1
    results = transformer_engine.run(
        count, train, models["qwen3"], layout, lora(folder), recompute, "transformer_engine"
    )
    compare(results, expected, folder)


@pytest.mark.parametrize(("name", "layout", "count"), [
    ("gemma2", "tp2", 2),
    ("deepseek_v3", "tp2-ep2", 4),
    ("deepseek_v2", "tp2-ep2-etp1", 2),
    ("qwen3_moe", "tp1", 1),
])  # fmt: skip
@pytest.mark.nightly
def test_lora_step_on_other_layers_with_transformer_engine_equals_plain_torch(
    transformer_engine, models, tmp_path, name, layout, count
):
    experts = name != "gemma2"
    folder = given_adapters(models[name], tmp_path / "adapters", experts=experts)
    expected = train_in_plain_torch(models[name], folder)
    config, unfused = lora(folder, experts=experts), MegatronConfig(transformer={"moe_permute_fusion": False})
    options = (False, "transformer_engine", unfused if experts else None)
    results = transformer_engine.run(count, train, models[name], layout, config, *options)
    compare(results, expected, folder)


OVERLAP = MegatronConfig(transformer={"moe_shared_expert_overlap": True})


@pytest.mark.parametrize(("recompute", "megatron"), [
    (True, None),
    (["moe_act", "mla_up_proj"], None),
    (False, OVERLAP),
])  # fmt: skip
@pytest.mark.nightly
def test_lora_step_on_experts_with_options_of_their_layer_equals_plain_torch(
    ranks, models, tmp_path, recompute, megatron
):
    folder = given_adapters(models["deepseek_v3"], tmp_path / "adapters", experts=True)
    expected = train_in_plain_torch(models["deepseek_v3"], folder)
    config = lora(folder, experts=True)
    results = ranks.run(4, train, models["deepseek_v3"], "tp2-ep2-etp1", config, recompute, "torch", megatron)
    compare(results, expected, folder)


@pytest.mark.parametrize(("name", "targets", "layout", "count"), [
    ("qwen3", ("v_proj", "up_proj"), "tp2", 2),
    ("qwen2", ("o_proj",), "tp2-pp2", 4),
    ("half_moe", ("gate_proj", "down_proj"), "pp2", 2),
    ("half_moe", ("gate_proj", "down_proj"), "pp2", 4),
])  # fmt: skip
def test_lora_step_on_some_layers_equals_plain_torch(ranks, models, tmp_path, name, targets, layout, count):
    """Also where a fused parameter has adapters in a part of its rows, and a stage nothing to train."""
    folder = given_adapters(models[name], tmp_path / "adapters", targets)
    expected = train_in_plain_torch(models[name], folder)
    assert {name.split(".")[-3] for name in expected.adapters} == set(targets)
    compare(ranks.run(count, train, models[name], layout, lora(folder, targets)), expected, folder)


def fresh(model: Path, layout: str) -> list[tuple[str, tuple[tuple[int, int], ...], Tensor]]:
    runner = network_on(model, layout, lora(None))
    assert runner.lora
    return [
        (piece.tensor, piece.source, runner.adapters()[name].detach()[slices(piece.target)].clone())
        for name, shard in runner.lora.shards.items()
        for piece in shard.pieces
    ]


def test_lora_initialization_is_equal_under_every_layout(ranks, models):
    weights = weight_table(read_config(models["qwen3"]))
    shapes = adapter_shapes(weights, adapted_tensors(weights, None), RANK)
    read = initial_adapters(shapes, seed=0)
    whole = {name: read(name, full_box(shape)) for name, shape in shapes.items()}
    for layout, count in (("tp1", 1), ("tp2-pp2", 4)):
        for result in ranks.run(count, fresh, models["qwen3"], layout):
            assert result and all(torch.equal(values, whole[name][slices(box)]) for name, box, values in result)
    for name, values in whole.items():
        bound = values.shape[1] ** -0.5 if ".lora_A." in name else 0
        assert values.abs().max() <= bound and bool(values.any()) == bool(bound)
    assert len({float(values[0, 0]) for name, values in whole.items() if ".lora_A." in name}) == len(whole) / 2


def moved_away(model: Path, folder: Path, away: bool) -> tuple[list[Tensor], list[Tensor], int]:
    runner = network_on(model, "tp2", lora(folder))
    trainer = MegatronTrainer(runner, OPTIMIZER, GuardConfig())
    copied, saved = CpuOffload(runner, trainer), trainer.snapshot()
    step(trainer, rows(model))
    if away:
        saved.take()
        kept = [values.detach().clone() for values in runner.adapters().values()]
        step(trainer, rows(model))
        assert not all(map(torch.equal, kept, runner.adapters().values()))
        saved.restore()
        assert all(map(torch.equal, kept, runner.adapters().values()))
        copied.to_host()
        tensors = (*runner.parameters().values(), *runner.adapters().values())
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        copied.to_device()
    step(trainer, rows(model))
    optimizer = sum(
        value.nbytes
        for inner in trainer.inner_optimizers
        for state in inner.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim()
    )
    parts = (runner.adapters(), runner.parameters())
    adapters, weights = ([values.detach().clone() for values in part.values()] for part in parts)
    return adapters, weights, optimizer


def test_lora_snapshot_and_offload_cover_only_adapters(ranks, models, cases):
    folder, _ = cases["qwen3"]
    stayed, went = (ranks.run(2, moved_away, models["qwen3"], folder, away) for away in (False, True))
    for (adapters, weights, size), (others, _, _) in zip(stayed, went, strict=True):
        assert all(map(torch.equal, adapters, others))
        # Two averages of fp32 numbers, and what the buffers of the distributed optimizer are padded with.
        assert size <= 2 * sum(values.nbytes for values in adapters) + 8192
        assert size < sum(values.nbytes for values in weights)


def bad(model: Path, config: LoraConfig) -> str:
    with pytest.raises(UserError) as error:
        network_on(model, "tp1", config)
    return str(error.value)


def test_adapted_tensors_unsupported_target_raises(models):
    mixture, dense = (weight_table(read_config(models[name])) for name in ("qwen3_moe", "llama"))
    with pytest.raises(
        UserError, match="'up_proj' exists only in experts. Write lora.experts=true, or choose from q_proj, k_proj"
    ):
        adapted_tensors(mixture, ["q_proj", "up_proj"])
    with pytest.raises(UserError, match=r"no linear layer 'lm_head'. Choose from q_proj.*down_proj\.$"):
        adapted_tensors(dense, ["lm_head"])
    with pytest.raises(UserError, match=r"lora\.experts: a llama model has no experts\. Leave it out"):
        adapted_tensors(dense, None, experts=True)


def test_lora_folder_with_other_adapters_raises(ranks, models, cases, tmp_path):
    model, (folder, _) = models["llama"], cases["llama"]

    def said(config: LoraConfig) -> str:
        return ranks.run(1, bad, model, config)[0]

    assert said(lora(folder).model_copy(update={"rank": 4})).endswith("r is 3. Write lora.rank=3.")
    assert said(lora(folder).model_copy(update={"alpha": 4.0})).endswith("lora_alpha is 5.0. Write lora.alpha=5.0.")
    assert "which lora.targets require" in said(lora(given_adapters(model, tmp_path / "q", ("q_proj",))))
    assert "lora.targets do not include the tensor" in said(lora(folder, ("q_proj",)))
    assert "adapter_config.json: not readable" in said(lora(tmp_path))
    config, name = folder / "adapter_config.json", "adapter_config.json"
    for field, value in (("use_dora", True), ("rank_pattern", {"q_proj": 4}), ("bias", "all"), ("peft_type", "IA3")):
        changed = tmp_path / field
        changed.mkdir()
        (changed / name).write_text(json.dumps(json.loads(config.read_text()) | {field: value}))
        assert f"{name}: {field} is " in said(lora(changed))
    (changed / name).write_text(config.read_text())
    (changed / "adapter_model.safetensors").write_text("{")
    assert "not a readable safetensors file" in said(lora(changed))
    other = ranks.run(1, bad, models["qwen3"], lora(folder))[0]
    assert "q_proj.lora_B.weight' has shape (32, 3), but model and lora.rank require (48, 3)" in other
