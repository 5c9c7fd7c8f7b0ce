"""Credit for single turns: columns of turns, runs whose first turn is rewarded, and SFT on chosen turns."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.json_lines import write_lines
from tests.helpers.tiny_jobs import RECIPES, logged, run_recipe
from tests.recipes.scripted_job import ScriptedJob
from tests.recipes.tiny_runs import Goal, placed, tiny_run
from verl_mg.algorithms.advantages import Turns
from verl_mg.batch import Batch, ColumnKind
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.recipes import gigpo, mt_grpo
from verl_mg.recipes.common.turns import anchor_states, turn_rewards

NAN = float("nan")
# Tokens of a row: of the policy if positive, else of the prompt or of a tool. The trajectory 4 has two rows.
ROWS = [
    {"tokens": [-1, 5, 6, -2, 7], "trajectory": 1, "group": 1, "reward": 1.0, "turn_1": 1.0, "turn_2": NAN},
    {"tokens": [-1, 5, -2, 7, 8], "trajectory": 2, "group": 1, "reward": 0.0, "turn_1": 1.0, "turn_2": NAN},
    {"tokens": [-1, 9], "trajectory": 3, "group": 1, "reward": 0.0, "turn_1": 0.0, "turn_2": NAN},
    {"tokens": [-1, 5], "trajectory": 4, "group": 4, "reward": 2.0, "turn_1": 0.5, "turn_2": 1.0},
    {"tokens": [-1, -5, -2, 6], "trajectory": 4, "group": 4, "reward": 2.0, "turn_1": 0.5, "turn_2": 1.0},
    {"tokens": [-1, 5, -3, 6], "trajectory": 6, "group": 4, "reward": 0.0, "turn_1": 0.0, "turn_2": 0.5},
]


def batch_here(order: list[int]) -> Batch:
    """This rank's rows; both ranks have a group."""
    mine = [ROWS[i] for i in order if dist.get_world_size() == 1 or (ROWS[i]["group"] == 4) == dist.get_rank()]
    batch = Batch.from_rows([[abs(token) for token in row["tokens"]] for row in mine])
    batch["loss_mask"] = torch.tensor([token > 0 for row in mine for token in row["tokens"]])
    batch["sample_id"] = torch.tensor([ROWS.index(row) for row in mine])
    for name in ("trajectory", "group", "reward", "turn_1", "turn_2"):
        column = f"reward.{name}" if name.startswith("turn") else name
        batch.put(column, torch.tensor([row[name] for row in mine]), ColumnKind.SEQUENCE)
    batch.put("scripted_reward", batch["reward"], ColumnKind.SEQUENCE)
    batch["prompt_length"] = torch.ones(len(mine), dtype=torch.int64)
    return batch


def columns_of_turns() -> tuple[list[list[float]], list[int], list[int]]:
    batch = batch_here(list(range(len(ROWS))))
    turns = Turns.of(batch.pad("loss_mask")[0])
    return turn_rewards(batch).nan_to_num(-1.0).tolist(), turns.line.tolist(), anchor_states(batch, turns).tolist()


def test_turns_of_a_batch_have_their_rewards_and_the_states_that_they_begin_in(ranks):
    ((rewards, lines, states),) = ranks.run(1, columns_of_turns)
    assert rewards == [[1, -1], [1, -1], [0, -1], [0.5, 1], [0, 0.5]]
    assert lines == [0, 0, 1, 1, 2, 3, 3, 4, 4]
    # All first turns of a group begin behind its prompt; tokens 2 come in front of two second turns.
    assert states == [0, 1, 0, 1, 0, 2, 3, 2, 4]


def advantages_here(name: str, order: list[int]) -> dict[tuple[int, int], float]:
    recipe = {"mt_grpo": mt_grpo, "gigpo": gigpo}[name]
    job = ScriptedJob(lambda round_: batch_here(order))
    numbers = {"turn_weight": 0.5} if name == "mt_grpo" else {"gamma": 0.5, "step_weight": 0.5}
    cfg = recipe.Config.model_validate({"normalize_by_std": False, "old_logprobs": "skip", **numbers})
    recipe.iteration(job, cfg)
    (batch,) = job.actor.batches
    places = zip(batch.expand_to_tokens(batch["sample_id"]).tolist(), batch.positions.tolist(), strict=True)
    assert not batch["advantages"][~batch["loss_mask"]].any()
    values = dict(zip(places, batch["advantages"].tolist(), strict=True))
    return dict(itertools.compress(values.items(), batch["loss_mask"].tolist()))


# Outcomes of group 1 less their mean: 2/3, -1/3, -1/3; first turns: 1/3, 1/3, -2/3. Of group 4: 1, -1; turns ±1/4.
PLACES = [(0, 1), (0, 2), (0, 4), (1, 1), (1, 3), (1, 4), (2, 1), (3, 1), (4, 3), (5, 1), (5, 3)]
MT_GRPO = [
    *(2 / 3 + 1 / 6, 2 / 3 + 1 / 6, 2 / 3),
    *(-1 / 3 + 1 / 6, -1 / 3, -1 / 3, -1 / 3 - 1 / 3),
    *(1 + 1 / 8, 1 + 1 / 8, -1 - 1 / 8, -1 - 1 / 8),
]
# Sums of group 1: 2, 1, 0. Returns of its first turns: 1.5, 1, 0, of its second ones, behind token 2: 1, 0.
# Sums of group 4: 3.5, 0.5. Returns of its first turns: 0.5 + 3 / 2 and 0.5 / 2; the second turns are alone.
GIGPO = [
    *(1 + (1.5 - 2.5 / 3) / 2, 1 + (1.5 - 2.5 / 3) / 2, 1 + 0.25),
    *(0 + (1 - 2.5 / 3) / 2, 0 - 0.25, 0 - 0.25, -1 - 2.5 / 6),
    *(1.5 + (2 - 1.125) / 2, 1.5, -1.5 + (0.25 - 1.125) / 2, -1.5),
]


@pytest.mark.parametrize(("name", "expected"), [("mt_grpo", MT_GRPO), ("gigpo", GIGPO)])
def test_iteration_on_any_number_of_ranks_has_the_advantages_of_turns_by_hand(ranks, name, expected):
    for count, order in ((1, [0, 1, 2, 3, 4, 5]), (2, [4, 1, 5, 0, 2, 3])):
        found = {key: value for part in ranks.run(count, advantages_here, name, order) for key, value in part.items()}
        assert found == pytest.approx(dict(zip(PLACES, expected, strict=True)), abs=1e-6)


def train(recipe_name: str, text: str, output: str) -> None:
    config = Path(f"{output}-{dist.get_rank()}.yaml")
    config.write_text(text)
    run_recipe(recipe_name, [f"job.output={output}", "job.console=false", "job.save=false"], file=config)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mt_grpo", "gigpo", "grpo"])
def test_first_turn_with_a_reward_learns(ranks, tasks, tmp_path, name):
    text = (RECIPES / "configs" / f"two_digits_{'mt_grpo' if name == 'grpo' else name}.yaml").read_text()
    ranks.run(2, train, name, placed(text, tasks(0)), str(tmp_path / "run"))
    lines = logged(tmp_path / "run")
    Goal("reward/mean", (0.0, 0.25), 0.75, 0.25).check(lines)
    if name == "grpo":  # the outcome says nothing about the first turn
        assert Goal("reward/turn_1", (0, 1), 1, 1).means(lines)[1] < 0.5
    else:
        Goal("reward/turn_1", (0.0, 0.25), 0.9, 0.2).check(lines)
    assert all(line["actor/grad_norm"] > 0 for line in lines)


def conversation(chance: random.Random) -> list[dict[str, Any]]:
    """Two digits and two answers: x and the digit, which is not learned, and y and the digit, which is."""
    messages = []
    for letter, learned in (("x", False), ("y", True)):
        digit = chance.choice("0123456789")
        messages += [
            {"role": "user", "content": digit},
            {"role": "assistant", "content": letter + digit, "train": learned},
        ]
    return messages


def logprobs(model: Path, text: str) -> torch.Tensor:
    """The log-prob of each token of a text but the first, by transformers."""
    tokens = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_sft_on_flagged_turns_makes_them_alone_likelier(ranks, tmp_path, layout):
    make_tiny_model(tmp_path / "model", "qwen3", hidden=64, layers=2, ffn=128, init_std=0.06, max_positions=64)
    chance = random.Random(0)
    write_lines(tmp_path / "train.jsonl", ({"messages": conversation(chance)} for _ in range(200)))
    overrides = [f"model.path={tmp_path}/model", f"data.train={tmp_path}/train.jsonl", "data.loss_on=flagged"]
    lines = tiny_run(ranks, "sft", tmp_path, tmp_path / "run", [*overrides, f"actor.layout={layout}"])
    assert lines[-1]["actor/loss"] < 0.1 < 2 < lines[0]["actor/loss"]
    before, after = (
        logprobs(tmp_path / of / "model", "<user>3<assistant>x3<eos><user>7<assistant>y7<eos>") for of in (".", "run")
    )
    # The digit of a user gets likelier too, as any digit does, so it is not compared.
    first, last = slice(2, 5), slice(8, 11)  # x3<eos> and y7<eos>
    assert after[last].sum() > -0.5 > -6 > before[last].sum()
    assert after[first].sum() < before[first].sum()  # the policy now writes y instead of x
