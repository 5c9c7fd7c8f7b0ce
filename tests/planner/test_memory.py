"""Memory against numbers counted by hand, and against the shards of every rank."""

import math

import pytest

from tests.planner.tiny_inputs import DENSE, LATENT, MIXTURE, published, tiny
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.planner.inputs import GIB
from verl_mg.planner.memory import Elements, elements, kv_bytes, rollout_memory, train_memory
from verl_mg.planner.memory_phases import problem


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3_30b_a3b", 30.5),
        ("qwen3_235b_a22b", 235.1),
        ("deepseek_v3", 671.0),
        ("kimi_k2", 1026.4),
        ("llama_3_1_405b", 405.9),
        ("glm_4_5", 352.8),  # 355 with the layer that predicts a second token
        ("minimax_m2", 228.7),
        ("glm_4_7_flash", 29.9),
        ("glm_5", 743.9),
        ("moonlight_16b_a3b", 16.0),
    ],
)
def test_elements_of_published_models_equal_their_parameters(name, billions):
    assert round(published(name, 8).size.elements / 1e9, 1) == billions


@pytest.mark.parametrize(("name", "billions"), [("qwen3_30b_a3b", 3.0), ("qwen3_235b_a22b", 21.6), ("kimi_k2", 31.7)])
def test_active_elements_of_mixtures_equal_published_numbers(name, billions):
    """3.3, 22.2 and 32.9 billion are activated, of which 0.3, 0.6 and 1.2 in the input embedding."""
    assert round(published(name, 8).size.active / 1e9, 1) == billions


def test_train_memory_dense_model_equals_hand_count():
    """A layer on one of two ranks: two norms 64, qkv (32 + 16 + 16) x 32 / 2, out 32 x 32 / 2, gate, up, down."""
    memory = train_memory(tiny(DENSE), Layout.parse("tp2-pp2").fit(8))
    layer = 64 + 1024 + 512 + 3 * 64 * 32 // 2
    stages = (2 * layer + 64 * 32 // 2, 2 * layer + 64 * 32 // 2 + 32)
    assert memory.parts["weights"] == tuple(2 * n for n in stages)
    assert memory.parts["gradients"] == tuple(4 * n for n in stages)
    assert memory.parts["optimizer states"] == tuple(12 * n // 2 for n in stages)
    assert memory.totals == tuple(map(sum, zip(*memory.parts.values(), strict=True)))


def test_train_memory_shards_experts_optimizer_states_over_edp():
    """tp2-ep2-etp1 on 8 ranks: dense parameters over dp 4, experts over edp 4; with etp2 over edp 2."""
    for layout, local, edp in (("tp2-ep2-etp1", 4, 4), ("tp2-ep2", 2, 2)):
        fitted = Layout.parse(layout).fit(8)
        memory = train_memory(tiny(MIXTURE), fitted)
        (counted,) = memory.elements
        experts = 4 * local * 3 * 16 * 32
        assert counted.experts == experts and fitted.edp == edp
        assert memory.parts["optimizer states"] == (12 * (math.ceil(counted.dense / 4) + experts // edp),)


def test_train_memory_router_bias_is_float32_without_gradient():
    (counted,) = train_memory(tiny(LATENT), Layout().fit(8)).elements
    assert counted.float32 == 3 * 8
    assert Elements(10, 20, 3).bytes(2) == 2 * 30 + 4 * 3


@pytest.mark.parametrize("raw", [DENSE, MIXTURE, LATENT], ids=["dense", "mixture", "latent"])
@pytest.mark.parametrize("layout", ["tp1", "tp2-pp2", "tp2-pp2-vpp2", "pp4-cp2"])
def test_elements_are_equal_on_all_ranks_of_a_stage(raw, layout):
    inputs, fitted = tiny(raw), Layout.parse(layout).fit(8)
    shard_map = inputs.weights.shard_map_megatron(Placement.on(fitted, 8))
    memory = train_memory(inputs, fitted)
    for rank in range(8):
        assert elements(inputs.weights, shard_map, rank) == memory.elements[fitted.coordinates(rank).pp]


@pytest.mark.parametrize("layout", ["tp1", "tp4-ep2", "tp2-pp2", "tp4-ep4-adp2"])
def test_elements_are_equal_on_all_ranks_of_an_engine(layout):
    inputs, engine = tiny(MIXTURE), EngineLayout.parse(layout)
    placement = EnginePlacement(engine, tuple(range(8)))
    shard_map, memory = inputs.weights.shard_map_engine(placement), rollout_memory(inputs, engine)
    for rank in range(8):
        assert elements(inputs.weights, shard_map, rank) == memory.elements[placement.coordinates(rank).pp]


def test_elements_include_vocabulary_padding():
    """65 rows on two ranks, padded to multiples of 8 each: 40 rows a rank."""
    plain, odd = (train_memory(tiny(DENSE | {"vocab_size": n}), Layout.parse("tp2").fit(8)) for n in (64, 65))
    assert odd.elements[0].dense - plain.elements[0].dense == 2 * (40 - 32) * 32


def test_kv_bytes_equal_hand_count():
    qwen, deepseek = published("qwen3_235b_a22b", 8).weights, published("deepseek_v3", 8).weights
    assert kv_bytes(qwen, EngineLayout(tp=2), 0) == 94 * 2 * 2 * 128 * 2
    assert kv_bytes(qwen, EngineLayout(tp=4), 0) == 94 * 2 * 1 * 128 * 2
    assert kv_bytes(qwen, EngineLayout(tp=8), 0) == kv_bytes(qwen, EngineLayout(tp=4), 0)  # two ranks share a head
    assert kv_bytes(qwen, EngineLayout(tp=8, adp=8), 0) == 94 * 2 * 4 * 128 * 2
    assert kv_bytes(deepseek, EngineLayout(tp=8), 0) == 61 * (512 + 64) * 2
    assert sum(kv_bytes(deepseek, EngineLayout(tp=4, pp=2), stage) for stage in (0, 1)) == 61 * (512 + 64) * 2


def test_cache_bytes_are_limit_minus_weights():
    inputs = published("qwen3_235b_a22b", 16)
    memory = rollout_memory(inputs, EngineLayout.parse("tp8-ep8"))
    assert memory.cache_bytes == ((80 - 6) * GIB - memory.weights[0],)
    assert memory.tokens == memory.cache_bytes[0] // memory.per_token[0] == memory.tokens_per_engine
    apart = rollout_memory(inputs, EngineLayout.parse("tp8-ep8-adp8"))
    assert apart.weights > memory.weights and apart.tokens_per_engine == 8 * apart.tokens


def test_train_memory_shrinks_with_parallelism():
    inputs = published("qwen3_30b_a3b", 64)
    for less, more in (("tp1", "tp2"), ("pp2", "pp4"), ("ep2", "ep4"), ("tp2-ep2-etp1", "tp2-ep2")):
        small, large = (train_memory(inputs, Layout.parse(text).fit(64)) for text in (more, less))
        for part in ("weights", "gradients"):
            assert max(small.parts[part]) < max(large.parts[part])
    few, many = (train_memory(published("qwen3_30b_a3b", n), Layout().fit(n)) for n in (16, 64))
    assert many.parts["optimizer states"][0] * 4 == few.parts["optimizer states"][0]


def test_problem_too_large_names_phase_and_part():
    inputs = published("qwen3_235b_a22b", 256)
    fine, large = (train_memory(inputs, Layout.parse(text).fit(256)) for text in ("tp4-pp8-ep8", "tp4-pp4"))
    engine, heavy = (rollout_memory(inputs, EngineLayout(tp=tp)) for tp in (8, 4))
    assert problem(inputs, fine, engine) is None
    assert problem(inputs, large, engine).startswith("training: it needs") and "gradients" in problem(
        inputs, large, None
    )
    assert problem(inputs, fine, heavy).startswith("generation: it needs") and "the engine's weights" in problem(
        inputs, None, heavy
    )
    both = published("qwen3_235b_a22b", 256, memory=62.0)
    assert problem(both, fine, engine).startswith("the weight sync: it needs")
    assert problem(both, fine, None) is None and problem(both, None, engine) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "--ranks: 0"),
        ({"ranks": 12}, "not a multiple of --node 8. Use 8 or 16"),
        ({"ranks": 8, "inter_node": -1.0}, "--inter-node: -1.0"),
        ({"ranks": 8, "reserve": 80.0}, "below --memory 80"),
        ({"ranks": 8, "memory": float("nan")}, "--memory: nan"),
    ],
)
def test_plan_inputs_invalid_option_raises(options, words):
    with pytest.raises(UserError, match=words):
        tiny(DENSE, **options)
