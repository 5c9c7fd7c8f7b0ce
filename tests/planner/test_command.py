"""Command `verl-mg plan`, called with its options."""

import json

import pytest

from tests.planner.tiny_inputs import CONFIGS, planned, refused
from verl_mg.cli import main

MODEL = ["plan", "--model", str(CONFIGS / "qwen3_30b_a3b.json"), "--ranks", "16"]
GOOD = ["--train", "tp2-pp2-ep4", "--rollout", "tp4-ep4"]


def printed(capsys, *arguments):
    main([*MODEL, *arguments])
    return capsys.readouterr().out


def leaves(tree):
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(value)
    else:
        yield tree


def test_plan_json_and_table_have_the_same_numbers(capsys):
    numbers, text = json.loads(printed(capsys, *GOOD, "--json")), printed(capsys, *GOOD)
    assert numbers["problem"] is None and numbers["train"]["layout"] == "tp2-pp2-ep4"
    for side in ("train", "rollout", "sync"):
        for value in leaves(numbers[side]["gib"]):
            assert f"{value:,.3f}" in text
    for value in numbers["seconds"].values():
        assert f"{value:,.3f}" in text
    assert f"{numbers['rollout']['kv_tokens']:,} tokens" in text
    assert "30.5B parameters" in text and "fits" in text
    received = numbers["sync"]["gib"]
    assert received["received by a rank"] == received["lower bound of received"]


SHIPPED = ["plan", "recipes/dapo.py", "--config", "recipes/papers/dapo_qwen3_30b_a3b/config.yaml", *MODEL[1:3]]
CHOSEN = ["actor.layout=tp2-pp4-ep8-etp1", "actor.pipeline_layers=[11, 13, 13, 11]"]


def test_plan_of_chosen_pipeline_layers_has_memory_and_seconds_of_each_stage(capsys):
    def train(*overrides):
        return planned(capsys, *SHIPPED, "--ranks", "64", *overrides)["train"]

    even, chosen = train(CHOSEN[0]), train(*CHOSEN)
    assert [stage["layers"] for stage in even["stages"]] == [12] * 4
    assert [stage["layers"] for stage in chosen["stages"]] == [11, 13, 13, 11]
    for stage, before in zip(chosen["stages"], even["stages"], strict=True):
        for key in ("gib", "seconds"):
            assert (stage[key] > before[key]) == (stage["layers"] > 12), key
    assert max(stage["gib"] for stage in chosen["stages"]) == chosen["gib"]["total"]["worst"]
    main([*SHIPPED, "--ranks", "64", *CHOSEN])
    assert "11, 2 x 13, 11; " in capsys.readouterr().out


def test_plan_of_too_few_pipeline_layers_names_the_numbers(capsys):
    err = refused(capsys, *SHIPPED, "--ranks", "64", CHOSEN[0], "actor.pipeline_layers=[11, 13, 12, 11]")
    assert "[11, 13, 12, 11] are 47 layers, and the model has 48" in err


def test_plan_report_lists_its_assumptions(capsys):
    numbers, text = json.loads(printed(capsys, *GOOD, "--json")), printed(capsys, *GOOD, "--recompute", "none")
    assert "keeps its input" in " ".join(numbers["assumptions"]) and "keeps all activations" in text
    for words in ("bf16", "take 4 bytes", "8192 tokens", "79.2 GiB", "55 GB/s", "published figures"):
        assert words in " ".join(numbers["assumptions"]) and words in " ".join(text.split())


def test_plan_search_prints_best_layouts_first(capsys):
    small = ["--search", "--model", str(CONFIGS / "qwen3_4b.json"), "--ranks", "8"]  # the last ones of an option count
    numbers, text = json.loads(printed(capsys, *small, "--top", "2", "--json")), printed(capsys, *small)
    assert [row["seconds"] for row in numbers["layouts"]] == sorted(row["seconds"] for row in numbers["layouts"])
    assert len(numbers["layouts"]) == 2
    for row in numbers["layouts"]:
        assert row["train"] in text and f"{row['seconds']:,.3f}" in text


def test_plan_too_large_prints_report_before_error(capsys):
    with pytest.raises(SystemExit) as left:
        main([*MODEL, "--train", "tp2", "--rollout", "tp4-ep4", "--json"])
    out, err = capsys.readouterr()
    numbers = json.loads(out)
    assert left.value.code == 2 and numbers["problem"] in err and len(err.splitlines()) == 1
    assert "training: it needs" in err and "Nearest valid layouts on 16 ranks: " in err
    nearest = err.split("Nearest valid layouts on 16 ranks: ")[1].strip().rstrip(".").split(", ")
    for layout in nearest:
        assert "fits" in printed(capsys, "--train", layout, "--rollout", "tp4-ep4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train", "tp8-pp2", "--rollout", "tp4"], "tp8 does not divide the 4 key-value heads"),
        (["--train", "tp4-pp2-ep3", "--rollout", "tp4"], "layout tp4-pp2-ep3"),
        (["--train", "pp3", "--rollout", "tp4"], "requires a multiple of 3 ranks, not 16"),
        (["--train", "pp2-ep4", "--rollout", "tp3"], "tp / adp = 3 does not divide the 32 attention heads"),
        (["--train", "pp2-ep4", "--rollout", "tp32"], "requires a multiple of 32 ranks, not 16"),
    ],
)
def test_plan_invalid_layout_names_constraint_and_nearest_layouts(capsys, arguments, words):
    err = refused(capsys, *MODEL, *arguments)
    assert words in err and " Nearest valid layouts on 16 ranks: " in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train", "tp2"], "--search"),
        (["--train", "tp2-zz3", "--rollout", "tp2"], "zz3"),
        (["--search", "--top", "0"], "--top: 0 is not above 0"),
        (["--search", "--ranks", "many"], "many"),
        (["--recompute="], "unknown module ''. Use full, none, or core_attn"),
        (["--search", "--recompute", "mlp,attention"], "unknown module 'attention'. Use full, none, or core_attn"),
        (["--search", "--mean-sequence", "9000"], "--mean-sequence: 9000 is out of range"),
        (["--search", "--model", "nowhere"], "nowhere: no such model directory"),
        (["--search", "--node", "5"], "16 is not a multiple of --node 5"),
        (["--search", "--ranks", "12"], "not a multiple of --node 8. Use 8 or 16"),
        (["--search", "--ranks", "0"], "--ranks: 0"),
        (["--search", "--inter-node", "-1"], "--inter-node: -1.0"),
        (["--search", "--reserve", "80"], "below --memory 79.2"),
        (["--search", "--memory", "nan"], "--memory: nan"),
        (["--search", "tp2"], "tp2: no configuration. Add --config FILE."),
        (["--search", "--config", "recipes/configs/quickstart_grpo.yaml"], "--config: needs a recipe. Write verl-mg"),
        (["--search", "--rollout-ranks", "16"], "--rollout-ranks: 16"),
        (["--search", "--memory-fraction", "1.5"], "--memory-fraction: 1.5"),
        ([*GOOD, "--critic", "tp8"], "critic: layout tp8-dp2: tp8 does not divide the 4 key-value heads"),
    ],
)
def test_plan_invalid_option_is_one_line(capsys, arguments, words):
    assert words in refused(capsys, *MODEL, *arguments)
