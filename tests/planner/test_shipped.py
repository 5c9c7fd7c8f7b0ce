"""Shipped configurations of clusters fit into memory, and a plan takes its values from the file."""

import json
from pathlib import Path

import pytest

from tests.helpers.tiny_models import daily_of
from tests.planner.tiny_inputs import planned, refused
from verl_mg.cli import main

ROOT = Path(__file__).parents[2]
SHIPPED = {
    "dapo_qwen3_30b_a3b": ("dapo", "qwen3_30b_a3b", 64, 80),
    "dapo_qwen3_235b_a22b": ("dapo", "qwen3_235b_a22b", 256, 140),
    "ppo_deepseek_v3": ("ppo", "deepseek_v3", 512, 140),
    "grpo_kimi_k2": ("grpo", "kimi_k2", 256, 140),
}
NIGHTLY = {"dapo_qwen3_235b_a22b", "grpo_kimi_k2"}
NAMES = daily_of(SHIPPED, *(SHIPPED.keys() - NIGHTLY))

SMALL = ["plan", "--model", "tools/model_configs/qwen3_30b_a3b.json"]


def config_of(name: str) -> Path:
    paper = Path("recipes/papers") / name / "config.yaml"
    return paper if (ROOT / paper).exists() else Path("recipes/configs") / f"{name}.yaml"


def command(name: str) -> list[str]:
    recipe, model, ranks, memory = SHIPPED[name]
    files = [f"recipes/{recipe}.py", "--config", str(config_of(name))]
    models = ["--model", f"tools/model_configs/{model}.json"]
    return ["plan", *files, "--ranks", str(ranks), *(["--memory", str(memory)] if memory != 80 else []), *models]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", NAMES)
def test_plan_shipped_configuration_fits_and_receives_lower_bound(capsys, name):
    numbers = planned(capsys, *command(name))
    assert numbers["problem"] is None
    moved = numbers["sync"]["gib"]
    assert moved["received by a rank"] == moved["lower bound of received"]
    assert moved["received by a rank"]["worst"] < moved["received if full tensors were gathered"]["worst"] / 5
    assert numbers["rollout"]["samples_at_once"] >= 64
    spans = [line for line in numbers["assumptions"] if line.startswith("an engine has 4 nodes")]
    assert len(spans) == (name in ("ppo_deepseek_v3", "grpo_kimi_k2"))
    assert 0 < numbers["sync"]["share_between_nodes"] < 1
    written = (ROOT / config_of(name)).read_text()
    said = written.split("#\n")[1].replace("#", "").replace("\\\n", "").split()
    assert said == ["verl-mg", *command(name)], "the command at the top of the file is the one that is tested"
    for side in ("train", "rollout"):
        assert f"  layout: {numbers[side]['layout']}\n" in written


def test_plan_file_equals_plan_of_its_options(capsys):
    """512 prompts x 16 samples x (2048 + 20480) tokens, in 16 steps."""
    numbers = planned(capsys, *command("dapo_qwen3_30b_a3b"))
    assumptions = " ".join(numbers["assumptions"])
    assert f"an iteration has {512 * 16 * 22528} tokens in samples of 22528, and 1 x 16 optimizer steps" in assumptions
    assert "a micro-batch has 22528 tokens, a layer keeps its input" in assumptions
    assert "on the host while other roles compute and engines are awake: the actor" in assumptions
    assert "engines take 0.85 of the memory that is free when they start" in assumptions
    assert numbers["auxiliary_roles"] == []
    lengths = ["--sequence", "22528", "--prompt", "2048", "--micro-batch", "22528"]
    options = [*lengths, "--tokens-per-iteration", str(512 * 16 * 22528)]
    options += ["--train", "tp2-pp8-ep2-etp1", "--rollout", "tp8-ep8-adp8", "--minibatches", "16"]
    bare = planned(capsys, *SMALL, *("--ranks", "64", "--memory-fraction", "0.85"), *options)
    assert bare == numbers


def test_plan_options_override_file(capsys):
    options = ["--train", "tp2-pp4-ep2-etp1", "--micro-batch", "45056", "--minibatches", "2", "--no-offload"]
    overrides = ["rollout.layout=tp4", "algorithm.kl.coefficient=0.1", "reference.layout=ep8"]
    numbers = planned(capsys, *command("dapo_qwen3_30b_a3b"), *options, *overrides)
    assert numbers["train"]["layout"] == "tp2-pp4-ep2-etp1" and numbers["rollout"]["layout"] == "tp4"
    assumptions = " ".join(numbers["assumptions"])
    for words in ("45056 tokens", "1 x 2 optimizer steps", "always on the device: the actor and reference"):
        assert words in assumptions
    assert [role["role"] for role in numbers["auxiliary_roles"]] == ["reference"]


def test_plan_too_large_names_critic_and_reference(capsys):
    """On the actor's layout a critic is as large, but for the output layer, and a reference has its weights alone."""
    arguments = [*command("ppo_deepseek_v3"), "--memory", "60"]
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    out, err = capsys.readouterr()
    numbers = json.loads(out)
    assert numbers["problem"] in err and err.count("\n") == 1
    actor = numbers["train"]["gib"]
    critic, reference = (role["gib"] for role in numbers["auxiliary_roles"])
    for part in ("weights", "gradients", "optimizer states"):
        assert actor[part]["mean"] * 0.98 < critic[part]["mean"] < actor[part]["mean"]
    assert reference["weights"] == actor["weights"] and "gradients" not in reference
    whole = actor["total"]["worst"] + sum(critic[p]["worst"] for p in critic if p != "activations")
    assert numbers["phases"]["training"] == pytest.approx(whole + reference["weights"]["worst"], abs=0.5)
    assert "training: it needs" in err and "critic" in err and "reference" in err


def test_plan_critic_option_adds_its_memory(capsys):
    small = [*SMALL, "--ranks", "32", "--train", "tp2-pp2-ep4", "--rollout", "tp4-ep4"]
    alone = planned(capsys, *small)
    both = planned(capsys, *small, "--critic", "tp2-pp4-ep2", "--reference", "ep8")
    layouts = {role["role"]: role["layout"] for role in both["auxiliary_roles"]}
    assert layouts == {"reference": "ep8", "critic": "tp2-pp4-ep2"}
    assert both["phases"]["training"] > alone["phases"]["training"] + 10
    assert both["rollout"]["kv_tokens"] < alone["rollout"]["kv_tokens"]
    assert "GiB of that is the critic's gradients" in refused(capsys, *small, "--critic", "tp2-pp2")


def test_plan_rollout_ranks_separates_engines_from_training(capsys):
    small = [*SMALL, "--ranks", "32", "--rollout", "tp4-ep4", "--rollout-ranks", "16"]
    numbers = planned(capsys, *small, "--train", "tp2-pp2-ep4", "--reference", "tp2-pp2-ep4")
    assert numbers["train"]["dp"] == 4 and numbers["rollout"]["engines"] == 4
    assert "weight sync" not in numbers["phases"]
    assert numbers["phases"]["generation"] == numbers["rollout"]["gib"]["weights"]["worst"]


def test_plan_disjoint_roles_compute_at_the_same_time(capsys):
    both = ["algorithm.kl.coefficient=0.1", "reference.layout=tp2-pp2-ep4-etp1"]
    shared = planned(capsys, *command("dapo_qwen3_30b_a3b"), *both)
    apart = ["actor.ranks=0-31", "reference.ranks=32-63"]
    numbers = planned(capsys, *command("dapo_qwen3_30b_a3b"), *both, *apart)
    (reference,) = numbers["auxiliary_roles"]
    assert (numbers["train"]["ranks"], reference["ranks"]) == ("0-31", "32-63")
    inference = (numbers["train"]["inference_seconds"], reference["inference_seconds"])
    assert numbers["seconds"]["inference"] == max(inference) > 0
    assumptions = (shared["train"]["inference_seconds"], shared["auxiliary_roles"][0]["inference_seconds"])
    assert shared["seconds"]["inference"] == pytest.approx(sum(assumptions), abs=0.01)
    assert numbers["phases"]["training"] == pytest.approx(numbers["train"]["gib"]["total"]["worst"], abs=0.01)
    assert numbers["sync"]["gib"]["received by a rank"] == numbers["sync"]["gib"]["lower bound of received"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor.ranks=60-71"], "ranks 60-71: rank 71 is out of range. Model roles can use ranks 0-63"),
        (["algorithm.kl.coefficient=0.1", "reference.ranks=63-64"], "reference: ranks 63-64: rank 64 is out of range"),
        (["rollout.engine=hf"], "rollout.engine=hf: only engines that are separate processes"),
        (["model.dtype=float32"], "model.dtype=float32: only a bf16 actor can be planned. Set model.dtype=bfloat16"),
        (["actor.dtype=float32"], "actor.dtype=float32: only a bf16 actor can be planned. Set actor.dtype=bfloat16"),
        (["rollout.urls=[http://a:1]"], "rollout.urls: servers outside the job cannot be planned"),
        (["actor.layuot=tp2"], "Did you mean actor.layout?"),
        (["actor.layout=tp8"], "tp8-dp8: tp8 does not divide the 4 key-value heads"),
        (["algorithm.kl.coefficient=0.1", "reference.layout=tp8"], "reference: layout tp8-dp8: tp8 does not divide"),
    ],
)
def test_plan_invalid_configuration_is_one_line(capsys, overrides, words):
    assert words in refused(capsys, *command("dapo_qwen3_30b_a3b"), *overrides)


QUICKSTART, PAPER = "recipes/configs/quickstart_sft.yaml", str(config_of("dapo_qwen3_30b_a3b"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipes/dapo.py", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["recipes/dopa.py", "--config", PAPER], "recipes/dopa.py: no such recipe"),
        (["recipes/dapo.py", "--config", PAPER], "model.path: Qwen/Qwen3-30B-A3B-Base: no such model directory"),
        (["recipes/sft.py", "--config", QUICKSTART], "generates no samples"),
        ([], "Pass --model, or RECIPE and --config"),
    ],
)
def test_plan_missing_file_or_recipe_is_one_line(capsys, arguments, words):
    assert words in refused(capsys, "plan", *arguments, "--ranks", "64")
