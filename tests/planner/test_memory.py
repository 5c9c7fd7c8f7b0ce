"""Memory of a plan: activations, phases of an iteration, and the bytes of each part, counted by hand."""

import math
from dataclasses import replace

import pytest

from tests.planner.tiny_inputs import DENSE, LATENT, MIXTURE, published, tiny
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.hf_config import parse_config
from verl_mg.planner.activations import activation_bytes, chunks_in_flight, inference_bytes, kept_elements
from verl_mg.planner.command import auxiliary_role
from verl_mg.planner.inputs import GIB, AuxiliaryRole
from verl_mg.planner.memory import Elements, TrainMemory, elements, kv_bytes, rollout_memory, train_memory
from verl_mg.planner.memory_phases import awake, engine_limit, problem, syncing, training
from verl_mg.sharding.weight_table import weight_table


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        # 3.3, 22.2 and 32.9 billion are activated, of which 0.3, 0.6 and 1.2 in the input embedding.
        ("qwen3_30b_a3b", 30.5, 3.0),
        ("qwen3_235b_a22b", 235.1, 21.6),
        ("kimi_k2", 1026.4, 31.7),
        ("deepseek_v3", 671.0, None),
        ("llama_3_1_405b", 405.9, None),
        ("glm_4_5", 352.8, None),  # 355 with the layer that predicts a second token
        ("minimax_m2", 228.7, None),
        ("glm_4_7_flash", 29.9, None),
        ("glm_5", 743.9, None),
        ("moonlight_16b_a3b", 16.0, None),
    ],
)
def test_elements_of_published_models_equal_their_parameters(name, billions, active):
    size = published(name, 8).size
    assert round(size.elements / 1e9, 1) == billions and active in (None, round(size.active / 1e9, 1))


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
    assert counted.other_bytes == 3 * 8 * 4
    assert Elements(10, 20, 12).bytes(2) == 2 * 30 + 12


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
    inputs = published("qwen3_235b_a22b", 16, memory=80)
    memory = rollout_memory(inputs, EngineLayout.parse("tp8-ep8"))
    assert memory.cache_bytes == ((80 - 6) * GIB - memory.weights[0],)
    assert memory.tokens == memory.cache_bytes[0] // memory.per_token[0] == memory.tokens_per_engine
    apart = rollout_memory(inputs, EngineLayout.parse("tp8-ep8-adp8"))
    assert apart.weights > memory.weights and apart.tokens_per_engine == 8 * apart.tokens


def test_problem_too_large_names_phase_and_part():
    inputs = published("qwen3_235b_a22b", 256)
    fine, large = (train_memory(inputs, Layout.parse(text).fit(256)) for text in ("tp4-pp8-ep8", "tp4-pp4"))
    engine, heavy = (rollout_memory(inputs, EngineLayout(tp=tp)) for tp in (8, 4))
    assert problem(inputs, fine, engine) is None
    assert problem(inputs, large, engine).startswith("training: it needs")
    assert problem(inputs, fine, heavy).startswith("generation: it needs")
    assert "gradients" in problem(inputs, large, None) and "the engine's weights" in problem(inputs, None, heavy)
    both = published("qwen3_235b_a22b", 256, memory=62.0)
    assert problem(both, fine, engine).startswith("the weight sync: it needs")
    assert problem(both, fine, None) is None and problem(both, None, engine) is None


def test_kept_elements_dense_layer_equals_korthikanti():
    """His 34 h bytes a token, less 2 h of dropout masks; our gate adds an output of width 4 h."""
    h = 64
    raw = DENSE | {"hidden_size": h, "num_key_value_heads": 4, "intermediate_size": 4 * h}
    gate = 2 * 4 * h
    assert 2 * (kept_elements(parse_config(raw), False, 1).all - 2 * 4) == (34 - 2) * h + gate


def test_kept_elements_layer_with_experts_equals_hand_count():
    """Norms 4 x 32; q 32, k and v 16 each, before their norms 48, output 32, normalisers 8; router 2 x 8.

    Two copies of the hidden state, whole on each rank that cuts the expert, and three widths of 16.
    """
    c = parse_config(MIXTURE)
    assert kept_elements(c, True, 1).all == 128 + 32 + 32 + 48 + 32 + 8 + 16 + 2 * (32 + 48)
    assert kept_elements(c, True, 2).all - kept_elements(c, True, 1).all == 2 * 32


def test_kept_elements_latent_attention_equals_hand_count():
    """Low ranks 2 x 24 + 2 x 12 + 4; queries and keys 4 heads x 10, values and output 4 x 8; normalisers 8."""
    assert kept_elements(parse_config(LATENT), False, 1).all == 128 + (48 + 24 + 4) + 80 + 64 + 8 + 3 * 64


def test_activation_bytes_of_a_stage_equal_hand_count():
    """64 tokens over tp2, bf16; stage 0 of 2 has two micro-batches in flight, each of two layers."""
    inputs, layout = tiny(DENSE, recompute=False), Layout.parse("tp2-pp2").fit(8)
    each = kept_elements(inputs.weights.config, False, 2).all
    assert activation_bytes(inputs, layout, 0) == 2 * 2 * each * 64 * 2 // 2
    # Hidden states, the projection's gradient, float32 logits and their gradient in bf16.
    output = 2 * 2 * 64 * 32 + 4 * 32 * 32 + (4 + 2) * 32 * 64
    assert activation_bytes(inputs, layout, 1) == 1 * 2 * each * 64 * 2 // 2 + output


def test_inference_bytes_of_the_last_stage_equal_hand_count():
    """One layer of 64 tokens over tp2, bf16; hidden states and float32 logits of half of the vocabulary."""
    inputs, layout = tiny(DENSE), Layout.parse("tp2-pp2").fit(8)
    each = 2 * kept_elements(inputs.weights.config, False, 2).all * 64 // 2
    assert [inference_bytes(inputs, layout, stage) for stage in (0, 1)] == [each, each + 2 * 64 * 32 + 4 * 32 * 64]


def test_logits_of_long_micro_batches_are_those_of_a_chunk():
    """256 tokens of 2^20 logits are a chunk of 2^30 bytes in float32, with a gradient of half of them."""
    wide, layout = DENSE | {"vocab_size": 2**20}, Layout.parse("tp1").fit(8)
    half, one, two, four = (activation_bytes(tiny(wide, micro_batch=n), layout, 0) for n in (128, 256, 512, 1024))
    of_256_tokens = (four - two) // 2
    assert two - one == of_256_tokens and 2 * (one - half) - of_256_tokens == 1.5 * 2**30


def test_activation_bytes_with_recompute_keep_inputs_and_one_layer():
    inputs, layout = tiny(DENSE), Layout.parse("tp2-pp2").fit(8)
    each = kept_elements(inputs.weights.config, False, 2).all - 32
    assert activation_bytes(inputs, layout, 0) == (2 * 2 * 32 + each) * 64 * 2 // 2


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("vpp", [2, 3])
def test_chunks_in_flight_interleaved_equals_korthikantis_factor(pp, vpp):
    layout = Layout(pp=pp, vpp=vpp)
    assert chunks_in_flight(layout, 0, 10**6) / vpp == pytest.approx(pp * (1 + (pp - 1) / (pp * vpp)))
    assert chunks_in_flight(layout, 0, 1) == vpp


def test_chunks_in_flight_few_micro_batches_is_bounded():
    assert [chunks_in_flight(Layout(pp=4), stage, 3) for stage in range(4)] == [3, 3, 2, 1]


def test_activation_bytes_shrink_with_tp_and_cp_and_grow_with_micro_batch():
    def size(text, **options):
        return activation_bytes(tiny(MIXTURE, **options), Layout.parse(text).fit(8), 0)

    assert size("tp2-pp2") < size("pp2") > size("pp2-cp2")
    assert size("pp2", micro_batch=128) > size("pp2") > size("pp2", tokens_per_iteration=1)
    assert size("pp2", recompute=False) > size("pp2")


ACTOR = TrainMemory((), {"weights": (10, 20), "gradients": (20, 40), "optimizer states": (5, 5), "activations": (9, 1)})
ALL = tuple(range(8))
PARTS = {"weights": (1, 2, 3, 40), "activations": (7, 8, 9, 10)}
CRITIC = AuxiliaryRole("critic", Layout(pp=4), ranks=ALL, parts=PARTS)


def size(parts):
    return sum(parts.values())


def test_training_counts_stages_of_each_rank_and_one_computing_role():
    """Ranks 0 to 1, 2 to 3, ... of 8: actor's stages 0, 0, 1, 1, critic's 0, 1, 2, 3."""
    inputs = replace(tiny(DENSE), auxiliary_roles=(CRITIC,))
    assert size(training(replace(inputs, offload=False), ACTOR)) == 20 + 40 + 5 + 40 + max(1, 10)
    assert size(training(inputs, ACTOR)) == 20 + 40 + 5 + 1 + 40, "the actor is away while the critic computes"
    assert size(training(tiny(DENSE), ACTOR)) == 20 + 40 + 5 + 1


def test_awake_excludes_only_offloaded_actor():
    inputs = replace(tiny(DENSE), auxiliary_roles=(CRITIC,))
    assert size(awake(inputs, ACTOR)) == 40
    assert size(awake(replace(inputs, offload=False), ACTOR)) == 105
    assert size(awake(replace(inputs, offload=False, rollout_ranks=4), ACTOR)) == 0


def test_engine_limit_is_fraction_of_free_memory_at_start():
    """The actor has left then; with offload=false it stays, with its optimizer states."""
    inputs = replace(tiny(DENSE), auxiliary_roles=(CRITIC,))
    assert engine_limit(inputs, ACTOR) == 74 * GIB - 40
    assert engine_limit(replace(inputs, memory_fraction=0.5), ACTOR) == 0.5 * (80 * GIB - 40)
    assert engine_limit(replace(inputs, memory_fraction=0.5, offload=False), ACTOR) == 0.5 * (80 * GIB - 105)
    assert engine_limit(replace(inputs, memory_fraction=0.5, rollout_ranks=4), ACTOR) == 0.5 * 80 * GIB
    assert engine_limit(replace(inputs, memory_fraction=0.99), ACTOR) == 74 * GIB - 40


def test_problem_engines_without_sleep_add_to_training():
    inputs, layout = tiny(DENSE, memory_fraction=0.95, reserve=1.0), Layout.parse("tp2").fit(8)
    train, engine = train_memory(inputs, layout), rollout_memory(inputs, EngineLayout())
    assert problem(inputs, train, engine) is None
    message = problem(replace(inputs, sleep=False, memory=1.5), train, engine)
    assert message.startswith("training: it needs") and "the engine's weights and cache" in message


def test_problem_memory_fraction_too_small_is_named():
    inputs = tiny(DENSE, memory_fraction=1e-6)
    message = problem(inputs, None, rollout_memory(inputs, EngineLayout()))
    assert message.endswith("engines take 1e-06 of the memory that is free when they start")


def test_auxiliary_role_trained_and_frozen_parts():
    inputs, layout = tiny(DENSE), Layout.parse("tp2-pp2").fit(8)
    actor = train_memory(inputs, layout)
    value = weight_table(inputs.weights.config, "value")
    critic = auxiliary_role(inputs, AuxiliaryRole("critic", Layout.parse("tp2-pp2"), True, 64), value)
    reference = auxiliary_role(inputs, AuxiliaryRole("reference", Layout.parse("tp2-pp2"), False, 64), inputs.weights)
    # The output layer's 32 of 64 rows of 32 elements, against one row of 32.
    assert actor.parts["weights"][1] - critic.parts["weights"][1] == 2 * (32 * 32 - 32)
    assert critic.parts["weights"][0] == actor.parts["weights"][0] == reference.parts["weights"][0]
    assert set(reference.parts) == {"weights", "activations"} and critic.update_seconds > 0 == reference.update_seconds
    assert max(reference.parts["activations"]) < max(actor.parts["activations"])
    with pytest.raises(UserError, match="^critic: layout pp3"):
        auxiliary_role(inputs, AuxiliaryRole("critic", Layout.parse("pp3"), True, 64), value)


def test_training_roles_on_disjoint_ranks_do_not_add_up():
    """The critic is on ranks 4 to 7, the actor on 0 to 3."""
    inputs = replace(
        tiny(DENSE), auxiliary_roles=(replace(CRITIC, ranks=(4, 5, 6, 7)),), role_ranks=(0, 1, 2, 3), offload=False
    )
    assert size(training(inputs, ACTOR)) == 20 + 40 + 5 + 1
    assert size(awake(replace(inputs, offload=True), ACTOR)) == 40, "the fullest rank is the critic's last"
    half = replace(inputs, auxiliary_roles=(replace(CRITIC, ranks=(2, 3, 4, 5)),))
    assert size(training(half, ACTOR)) == 20 + 40 + 5 + 2 + 8, "its second stage shares ranks with the actor's second"


def test_training_offloaded_roles_share_a_rank_in_turns():
    inputs = replace(tiny(DENSE), auxiliary_roles=(replace(CRITIC, offload=True),))
    assert size(training(inputs, ACTOR)) == 20 + 40 + 5 + 1, "the critic waits on the host"
    assert size(awake(inputs, ACTOR)) == 0
    assert size(syncing(inputs, ACTOR)) == 20, "weights alone move to the engines"
    assert size(syncing(replace(inputs, offload=False), ACTOR)) == 65
