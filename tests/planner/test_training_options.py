"""Options of training: read from a configuration, and their bytes against megatron-core's own definitions."""

import inspect

import pytest
import torch

import verl_mg.megatron  # noqa: F401  # else torch compiles functions of megatron-core in the ranks of all tests

# isort: split
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from tests.planner.tiny_inputs import DENSE, LATENT, MIXTURE, published, request, tiny
from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.models.flops import orthogonalization_flops
from verl_mg.planner.activations import DISCARDED, INPUTS, kept_elements
from verl_mg.planner.cost import optimizer_seconds, train_seconds
from verl_mg.planner.memory import train_memory
from verl_mg.planner.training_options import OFFLOADABLE, RECOMPUTABLE, TrainingOptions, recompute, training_options
from verl_mg.sharding.megatron import VOCABULARY

PRECISION_AWARE = {"use_precision_aware_optimizer": True}
BF16_MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
LAYOUT = Layout.parse("tp2").fit(8)


def options(**parts) -> TrainingOptions:
    return training_options("auto", parts, cpu_offload=False)


def test_options_read_fields_that_megatron_core_has():
    """A field that megatron-core renames would be ignored without a word."""
    read = {
        TransformerConfig: (
            *("fp8", "moe_token_dispatcher_type", "moe_enable_deepep", "moe_shared_expert_overlap"),
            *("overlap_moe_expert_parallel_comm", "tp_comm_overlap", "offload_modules"),
            *("fine_grained_activation_offloading", "cp_comm_type"),
        ),
        OptimizerConfig: (
            *("use_precision_aware_optimizer", "main_params_dtype", "main_grads_dtype", "exp_avg_dtype"),
            *("exp_avg_sq_dtype", "store_param_remainders", "optimizer", "optimizer_cpu_offload"),
            "optimizer_offload_fraction",
        ),
        DistributedDataParallelConfig: ("grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather"),
    }
    for config, names in read.items():
        missing = [name for name in names if name not in config.__dataclass_fields__]
        assert missing in ([], ["fine_grained_activation_offloading", "offload_modules"]), config


def test_plan_request_reads_options_of_the_configuration():
    given = ["megatron.transformer={fp8: hybrid, moe_token_dispatcher_type: flex}", "model.kernels=torch"]
    given += ["megatron.ddp={overlap_grad_reduce: true, grad_reduce_in_fp32: false}"]
    plan = request(*given, "actor.optimizer.cpu_offload=true", "critic.optimizer.kind=muon")
    actor = plan.fields["options"]
    assert (actor.fp8, actor.flex_dispatch, actor.fused, actor.overlap_gradients) == (True, True, False, True)
    assert (actor.gradient_bytes, actor.state_bytes) == (2, 16) and actor.offloaded_states == 8 / 16
    (critic,) = (role for role in plan.roles if role.name == "critic")
    assert critic.options.fp8 and critic.options.offloaded_states == 0
    assert critic.options.muon and not actor.muon


@pytest.mark.parametrize(
    ("optimizer", "ddp", "state_bytes"),
    [
        ({}, {}, 4 + 4 + 4),
        ({}, {"grad_reduce_in_fp32": False}, 4 + 4 + 4 + 4),
        (PRECISION_AWARE, {}, 2 + 4 + 4),
        (PRECISION_AWARE | BF16_MOMENTS, {}, 2 + 2 + 2),
        (PRECISION_AWARE | BF16_MOMENTS | {"store_param_remainders": False}, {}, 4 + 2 + 2),
        (PRECISION_AWARE | {"main_grads_dtype": "bf16"}, {"grad_reduce_in_fp32": False}, 2 + 4 + 4),
        (PRECISION_AWARE | {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float32}, {}, 2 + 2 + 4),
        ({"optimizer": "muon"}, {}, 4 + 4),
    ],
)
def test_training_options_state_bytes_equal_hand_count(optimizer, ddp, state_bytes):
    """Main weight, first and second moment, and a copy of the gradient where its buffer has another type."""
    assert options(optimizer=optimizer, ddp=ddp).state_bytes == state_bytes


def test_training_options_read_the_moments_of_a_role():
    """bf16 moments take 4 bytes; on the host they leave the main weight on the device, and all steps are there."""
    away = training_options("auto", {}, cpu_offload=True, moments_dtype="bfloat16")
    assert (away.state_bytes, away.offloaded_states, away.host_steps) == (4 + 2 + 2, 4 / 8, 1.0)
    half = options(optimizer={"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5})
    assert (half.state_bytes, half.offloaded_states, half.host_steps) == (12, 0.5, 0.5)


def test_train_seconds_exchange_of_keys():
    """Four heads' keys are fewer than all heads' states at cp2; around a ring attention hides them."""
    heads, keys, ring = (
        train_seconds(
            published("qwen2_5_7b", 16, node=4, options=options(transformer={"cp_comm_type": kind})),
            Layout.parse("tp4-cp2").fit(16),
        )
        for kind in ("a2a", "all_gather", "p2p")
    )
    assert ring < keys < heads


def test_train_memory_follows_options():
    plain, half, away, muon = (
        train_memory(tiny(DENSE, options=chosen), LAYOUT).parts
        for chosen in (
            options(),
            options(optimizer=PRECISION_AWARE | BF16_MOMENTS, ddp={"grad_reduce_in_fp32": False}),
            training_options("auto", {}, cpu_offload=True),
            options(optimizer={"optimizer": "muon"}),
        )
    )
    states, gradients = plain["optimizer states"][0], plain["gradients"][0]
    assert half["gradients"][0] == gradients // 2
    assert half["optimizer states"][0] == pytest.approx(states * (2 + 2 + 2 + 4) / 12, abs=1)
    assert away["optimizer states"][0] == pytest.approx(states / 3, abs=1)
    assert muon["optimizer states"][0] == states // 12 * 8 * LAYOUT.dp, "all ranks have all states"


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_train_memory_with_muon_has_one_moment_outside_of_the_vocabulary(dtype, size):
    chosen = training_options("auto", {}, moments_dtype=dtype, kind="muon")
    inputs = tiny(DENSE, options=chosen)
    memory, ranks = train_memory(inputs, LAYOUT), LAYOUT.dp * LAYOUT.cp
    model = inputs.weights.model
    rows = VOCABULARY.padded(inputs.weights.config.vocab, LAYOUT.tp) // LAYOUT.tp
    vocabulary = len({model.embedding.name, model.output.name}) * rows * inputs.weights.config.hidden
    expected = ((4 + size) * memory.elements[0].dense + size * vocabulary) / ranks
    assert memory.parts["optimizer states"][0] == pytest.approx(expected, abs=16)
    adam = tiny(DENSE, options=training_options("auto", {}, moments_dtype=dtype))
    saved = 2 * size * inputs.size.elements / LAYOUT.ranks / (inputs.memory_bandwidth * 1e9)
    products = orthogonalization_flops(inputs.weights.tensor_index) / LAYOUT.ranks / (inputs.flops * 1e12)
    difference = optimizer_seconds(inputs, LAYOUT) - optimizer_seconds(adam, LAYOUT)
    assert difference == pytest.approx(products - saved, rel=1e-3)


def test_offloaded_states_move_over_the_host_link():
    """28 bytes of Adam, the gradient and the weight for each parameter, instead of reading states in device memory."""
    inputs, away = (
        tiny(DENSE, options=chosen, host=1e-3)
        for chosen in (options(), options(optimizer={"optimizer_cpu_offload": True}))
    )
    elements = inputs.size.elements / LAYOUT.tp / LAYOUT.dp
    difference = optimizer_seconds(away, LAYOUT) - optimizer_seconds(inputs, LAYOUT)
    assert difference == pytest.approx(elements * (28 + 4 + 2) / 1e6, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "faster", "slower"),
    [
        ("qwen3_30b_a3b", options(transformer={"fp8": "hybrid"}), options()),
        ("qwen3_30b_a3b", options(transformer={"tp_comm_overlap": True}), options()),
        ("qwen3_30b_a3b", options(transformer={"overlap_moe_expert_parallel_comm": True}), options()),
        ("qwen3_30b_a3b", options(transformer={"moe_token_dispatcher_type": "flex"}), options()),
        ("qwen3_30b_a3b", options(ddp={"overlap_grad_reduce": True}), options()),
        ("qwen3_30b_a3b", options(ddp={"overlap_param_gather": True}), options()),
        ("deepseek_v3", TrainingOptions(shared_expert_overlap=True), TrainingOptions()),
        ("qwen3_30b_a3b", options(), training_options("torch", {})),
    ],
    ids=range(8),
)
def test_train_seconds_option_makes_training_faster(model, faster, slower):
    layout = Layout.parse("tp4-ep16-etp1").fit(16)
    seconds = [train_seconds(published(model, 16, options=chosen), layout) for chosen in (faster, slower)]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize("raw", [DENSE, MIXTURE, LATENT], ids=["dense", "mixture", "latent"])
def test_train_seconds_recomputed_module_takes_between_nothing_and_the_layer(raw):
    def seconds(modules):
        return train_seconds(tiny(raw, recompute=modules), LAYOUT)

    for module in RECOMPUTABLE:
        assert seconds(False) <= seconds((module,)) <= seconds(True)
    assert seconds(("core_attn",)) > seconds(False)


def test_recomputable_modules_are_those_of_megatron_core():
    words = inspect.getsource(inspect.getmodule(TransformerConfig))
    assert all(f'"{module}"' in words for module in (*RECOMPUTABLE, *OFFLOADABLE[:4]))
    assert set(DISCARDED) == set(RECOMPUTABLE) and set(INPUTS) == set(OFFLOADABLE)


@pytest.mark.parametrize(
    ("modules", "elements"),
    [
        (("layernorm",), 2 * 32),
        (("mlp",), 0),
        (("moe",), 2 * 8 + 2 * 32 + 2 * 3 * 16),
        (("moe_act",), 2 * 16),
        (("moe", "moe_act"), 2 * 8 + 2 * 32 + 2 * 3 * 16),
        (("core_attn",), 2 * 4),
        (True, 128 + 32 + 32 + 48 + 32 + 8 + 16 + 2 * (32 + 48) - 32),
        (False, 0),
    ],
)
def test_recomputed_elements_of_a_mixture_equal_hand_count(modules, elements):
    """Hidden size 32, 4 heads, 8 experts of width 16, of which a token has 2; whole layers keep their input."""
    c = tiny(MIXTURE).weights.config
    assert kept_elements(c, True, 1).recomputed(modules) == elements


def test_recompute_of_modules_does_not_depend_on_their_order():
    assert recompute(["mlp", "layernorm"]) == recompute(("layernorm", "mlp", "mlp")) == ("layernorm", "mlp")


def test_training_options_unknown_offloaded_module_raises():
    with pytest.raises(UserError, match="offload_modules: 'mlp' cannot be planned. Use attn_norm"):
        options(transformer={"fine_grained_activation_offloading": True, "offload_modules": ["mlp"]})


def test_offloaded_modules_leave_the_device():
    chosen = {"fine_grained_activation_offloading": True, "offload_modules": ["expert_fc1", "core_attn"]}
    plain, away = (
        train_memory(tiny(MIXTURE, recompute=False, options=found), LAYOUT).parts["activations"][0]
        for found in (options(), options(transformer=chosen))
    )
    layer = kept_elements(tiny(MIXTURE).weights.config, True, 2)
    assert plain - away == 4 * (layer.parts["dispatched"] + layer.parts["heads"]) * 64 * 2 // 2


def test_fp8_halves_inputs_of_linear_layers_and_copies_weights():
    """Outputs of both norms and of attention, 32 each, two copies of 32, two products of 16; less without norms."""
    fp8 = options(transformer={"fp8": "hybrid"})
    c = tiny(MIXTURE).weights.config
    layer = kept_elements(c, True, 1)
    assert layer.on_device(False, (), False) - layer.on_device(False, (), True) == (3 * 32 + 2 * 32 + 2 * 16) / 2
    half = layer.on_device(("layernorm",), (), False) - layer.on_device(("layernorm",), (), True)
    assert half == (32 + 2 * 32 + 2 * 16) / 2
    assert layer.on_device(True, (), True) == 32
    plain, quantized = (train_memory(tiny(MIXTURE, options=chosen), LAYOUT) for chosen in (options(), fp8))
    assert quantized.parts["FP8 weights"][0] == 2 * plain.elements[0].trained and "FP8 weights" not in plain.parts


def test_plan_of_a_float32_critic_counts_its_bytes():
    """Weight, gradient and two moments of 4 bytes each: the optimizer updates the weights themselves."""
    plan = request("critic.dtype=float32", "reference.dtype=float32", "algorithm.kl.coefficient=0.1")
    roles = {role.name: role.options for role in plan.roles}
    assert [line.partition(":")[0] for line in plan.notes] == ["critic.dtype", "reference.dtype"]
    assert roles["reference"].weight_bytes == 4 and plan.fields["options"].weight_bytes == 2
    half, full = (train_memory(tiny(DENSE, options=chosen), LAYOUT) for chosen in (options(), roles["critic"]))
    (counted,) = half.elements
    weights, moments = 4 * counted.trained, 8 * counted.trained // (LAYOUT.dp * LAYOUT.cp)
    found = [full.parts[part][0] for part in ("weights", "gradients", "optimizer states")]
    assert found == [weights, weights, pytest.approx(moments, abs=8)]
    small, large = (memory.parts["activations"][0] for memory in (half, full))
    assert small < large < 2 * small, "float32 logits are the same in both"
