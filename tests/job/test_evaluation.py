"""What a job says of held-out prompts, what it learns of its own, and weights of rewards that change on the way."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.json_lines import write_lines
from tests.helpers.rank_pool import job_store
from tests.helpers.tiny_jobs import files_of, logged, run_here, write_sums
from tests.helpers.tiny_models import tiny_model
from verl_mg.config import load_config
from verl_mg.errors import UserError
from verl_mg.job.evaluation import EvaluationSet, SetResults, evaluation_sets, metrics_of
from verl_mg.job.job import RunningJob
from verl_mg.job.prompt_scores import PromptResults, prompt_scores
from verl_mg.job.recipe import load_recipe, requested_roles

GRPO = load_recipe(Path(__file__).parents[2] / "recipes" / "grpo.py")

REWARDS = """
import re

from verl_mg.rewards import Reward

def digits(sample):
    return Reward(float(sum(c.isdigit() for c in sample.response) > 1), {}, sample.response[:1] or None)

def easy_or_hard(sample):
    return float(sample.answer == "easy" or (sample.answer == "even" and len(sample.response) % 2 == 0))

def length(sample):
    return len(re.sub("<[a-z]+>", "s", sample.response))  # a special token is one character

def length_of_two(sample):
    return length(sample) - 2

def digit_at_the_end(sample):
    return float(not any(c.isdigit() for c in sample.response[:-1]) and sample.finish == "stop")

def one(sample):
    return 1.0
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_model(folder / "model", "qwen3")
    (folder / "rewards.py").write_text(REWARDS)
    write_sums(folder, 6, 3)
    write_lines(folder / "letters.jsonl", ({"prompt": c * n, "answer": c} for c in "abc" for n in range(1, 4)))
    kinds = ("easy", "even", "hard")
    write_lines(folder / "kinds.jsonl", ({"prompt": f"{i}-1=", "answer": kinds[i % 3]} for i in range(9)))
    return folder


def config_of(inputs: Path, output: Path, overrides: list[str]):
    common = [
        *files_of(inputs, output),
        f"reward.function={inputs / 'rewards.py'}:digits",
        "job.iterations=2",
        "job.save=false",
        "rollout.max_new_tokens=6",
        "algorithm.prompts_per_iteration=3",
        "algorithm.group_size=4",
    ]
    return load_config(None, common + overrides, GRPO.config)


def train(inputs: Path, output: Path, overrides: list[str]) -> None:
    run_here(GRPO, config_of(inputs, output, overrides))


def test_samples_end_at_the_stop_strings_of_their_set(ranks, inputs, tmp_path):
    sets = f"{{sums: {{path: {inputs / 'sums.jsonl'}}}, letters: {{path: {inputs / 'letters.jsonl'}, stop: []}}}}"
    overrides = ["evaluation.every=2", "evaluation.samples=4", "evaluation.temperature=0.8", "job.iterations=1"]
    digits = ["rollout.stop=['0','1','2','3','4','5','6','7','8','9']", "rollout.max_new_tokens=40"]
    rewarded = f"reward.function={inputs / 'rewards.py'}:digit_at_the_end"
    ranks.run(1, train, inputs, tmp_path, [f"data.test={sets}", rewarded, *overrides, *digits])
    before = logged(tmp_path)[0]
    assert before["eval/sums/reward"] > 0.9 > before["eval/letters/reward"]


def test_sources_are_evaluated_one_by_one_whatever_the_ranks(ranks, inputs, tmp_path):
    sources = f"{{sums: {{path: {inputs / 'sums.jsonl'}}}, letters: {{path: {inputs / 'letters.jsonl'}}}}}"
    requested = ["evaluation.every=2", "evaluation.prompts=5", "evaluation.samples=6", "evaluation.temperature=0.8"]
    found = []
    for count in (1, 3):
        ranks.run(count, train, inputs, tmp_path / str(count), [f"data.test={sources}", *requested])
        lines = logged(tmp_path / str(count))
        assert [line["step"] for line in lines if "eval/reward" in line] == [0, 2]
        # Before any update a sample depends on its seed alone.
        found.append({name: value for name, value in lines[0].items() if name.startswith("eval/")})
    assert found[0] == found[1]
    names = ["reward", "pass@1", "pass@2", "maj@2", "pass@4", "maj@4", "pass@6", "avg@6", "maj@6"]
    assert set(found[0]) == {f"eval/{part}{name}" for part in ("", "sums/", "letters/") for name in names}
    assert 0 < found[0]["eval/pass@1"] == pytest.approx(found[0]["eval/reward"])
    assert found[0]["eval/pass@1"] < found[0]["eval/pass@2"] <= found[0]["eval/pass@6"]
    halves = (found[0]["eval/sums/reward"] + found[0]["eval/letters/reward"]) / 2
    assert found[0]["eval/reward"] == pytest.approx(halves)
    rows = (tmp_path / "1" / "evaluation.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in rows] == ["iteration", "---:", "0", "2"]
    assert f"{found[0]['eval/pass@6']:.4f}" in rows[2] and "letters/maj@4" in rows[0]


def test_each_set_has_its_samples_sampling_and_reward(ranks, inputs, tmp_path):
    letters = (
        f"{{path: {inputs / 'letters.jsonl'}, samples: 3, temperature: 1, max_new_tokens: 2, k: [1, 3], prompts: 4}}"
    )
    sums = (
        f"{{path: {inputs / 'sums.jsonl'}, reward: {{function: '{inputs / 'rewards.py'}:length'}}, max_new_tokens: 3}}"
    )
    overrides = [f"data.test={{letters: {letters}, sums: {sums}}}", "evaluation.every=2", "job.iterations=1"]
    ranks.run(
        2, train, inputs, tmp_path / "run", [*overrides, f"reward.function={inputs / 'rewards.py'}:length_of_two"]
    )
    first = {name: value for name, value in logged(tmp_path / "run")[0].items() if name.startswith("eval/")}
    assert set(first) == {"eval/reward", "eval/sums/reward"} | {
        f"eval/letters/{name}" for name in ("reward", "pass@1", "pass@3", "avg@3")
    }
    # Lengths, in characters: of letters at most 2, and scored by the job's reward, which subtracts 2.
    assert first["eval/letters/reward"] <= 0 < first["eval/sums/reward"] <= 3
    assert first["eval/reward"] == pytest.approx(
        (4 * first["eval/letters/reward"] + 18 * first["eval/sums/reward"]) / 22
    )
    with pytest.raises(UserError, match=r"data\.test\.letters\.temperature: greedy .* data\.test\.letters\.samples=1"):
        evaluation_sets(
            config_of(inputs, tmp_path, [f"data.test={{letters: {letters.replace('temperature: 1', 'top_p: 1')}}}"])
        )
    with pytest.raises(UserError, match=r"data\.test\.letters\.k: 5 tries .* 3 samples"):
        evaluation_sets(config_of(inputs, tmp_path, [f"data.test={{letters: {letters.replace('[1, 3]', '[5]')}}}"]))


def test_a_vote_counts_answers_and_a_pass_counts_rewards():
    tries = [
        PromptResults(0, [1.0, 0.0, 0.0, 1.0], ["7", "8", "8", "7"]),
        PromptResults(1, [0.0, 0.5, 0.0, 0.0], [None, "3", None, None]),
    ]
    metrics = {name: values.mean() for name, values in prompt_scores(tries, (1, 2, 4), pass_threshold=1.0).items()}
    assert metrics["reward"] == metrics["avg@4"] == pytest.approx(2.5 / 8)
    assert metrics["pass@1"] == pytest.approx(0.25)
    # Two of the first problem's four are right: both of two tries are wrong in 1 of 6 draws.
    assert metrics["pass@2"] == pytest.approx((5 / 6 + 0) / 2) and metrics["pass@4"] == pytest.approx(0.5)
    # Of equal votes the first answer wins: right, and the only one.
    assert metrics["maj@4"] == pytest.approx((1.0 + 0.5) / 2)
    assert "maj@1" not in metrics
    assert list(prompt_scores([PromptResults(0, [0.25], [None])], (), 1.0)) == ["reward"]


def test_a_part_that_only_some_samples_have_is_their_mean_and_their_number():
    def of_set(name: str, *parts: list[float | None]) -> SetResults:
        evaluated = EvaluationSet(name, None, 2, {}, (), 0.5)
        results = [
            PromptResults(i, [1.0, 0.0], [None] * 2, {"form": row} if row else {}) for i, row in enumerate(parts)
        ]
        return SetResults(evaluated, [], results)

    some = of_set("some", [0.5, None], [], [1.0, 2.0])
    found = metrics_of([some])
    assert found["eval/reward/form"] == (0.5 + 1.5) / 2 and found["eval/samples_with/form"] == 3
    found = metrics_of([some, of_set("every", [3.0, 4.0])])
    assert found["eval/reward/form"] == pytest.approx((0.5 + 1.5 + 3.5) / 3) and found["eval/samples_with/form"] == 5
    assert found["eval/some/samples_with/form"] == 3 and found["eval/every/reward/form"] == 3.5
    assert "eval/every/samples_with/form" not in found
    assert "eval/samples_with/form" not in metrics_of([of_set("every", [3.0, 4.0])])


def curriculum(inputs: Path, output: Path) -> tuple[list[list[str]], dict[str, float]]:
    """What kinds of prompts are taken, iteration by iteration."""
    overrides = [
        f"data.train={inputs / 'kinds.jsonl'}",
        "data.curriculum={low: 0.05, high: 0.95, revisit: 20}",
        f"reward.function={inputs / 'rewards.py'}:easy_or_hard",
        "algorithm.group_size=8",
        # The policy stays what it is, and so do the rates.
        "actor.optimizer.lr=1e-12",
    ]
    config = config_of(inputs, output, overrides)
    job = RunningJob(config, requested_roles(GRPO, config), job_store())
    job.start()
    taken, metrics = [], {}
    take = job.prompts.next_batch

    def seen(n: int):
        prompts = take(n)
        taken.append([prompt.answer for prompt in prompts])
        return prompts

    job.prompts.next_batch = seen
    for iteration in range(1, 8):
        job.begin(iteration)
        GRPO.iteration(job, config.algorithm)
        for batch in job.rollout.train_batches:
            metrics = job.observe(batch)
        job.rollout.train_batches.clear()
    job.close()
    return taken, metrics


def test_a_curriculum_leaves_out_what_is_always_or_never_right(ranks, inputs, tmp_path):
    results = ranks.run(2, curriculum, inputs, tmp_path)
    assert results[0] == results[1], "all ranks must take the same prompts"
    taken, metrics = results[0]
    assert sorted(kind for kinds in taken[:3] for kind in kinds) == ["easy"] * 3 + ["even"] * 3 + ["hard"] * 3
    # A turn over the set may meet a prompt of the band twice and another not at all: then the nearest fill up.
    later = [kind for kinds in taken[3:] for kind in kinds]
    assert later.count("even") >= 0.75 * len(later)
    assert metrics["curriculum/frac_observed"] == 1 and metrics["curriculum/frac_in_band"] == pytest.approx(1 / 3)


def reweighed(inputs: Path, output: Path) -> tuple[list[dict[str, float]], list[list[float]], list[str]]:
    """An iteration each with the file as it was, edited, spoilt, and taken away."""
    file = output / "weights.yaml"
    source = inputs / "rewards.py"
    parts = f"{{length: {{function: '{source}:length', weight: 0.5}}, one: {{function: '{source}:one', weight: 0}}}}"
    rewards = [f"reward={{mixture: {parts}}}", f"reward.weights_file={file}"]
    config = config_of(inputs, output, rewards)
    texts = ["{length: 0.5}", "{length: 2, one: 10}", "{length: [}", None]
    reported, errors = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = RunningJob(config, requested_roles(GRPO, config), job_store())
        job.start()
        for iteration, text in enumerate(texts, 1):
            if dist.get_rank() == 0:
                output.mkdir(exist_ok=True)
                file.unlink() if text is None else file.write_text(text)
            reported.append(job.begin(iteration))
            batch = job.rollout.generate(job.prompts.next_batch(3), num_samples=2)
            lengths = torch.tensor(
                [len(re.sub("<[a-z]+>", "s", job.reward.sample(batch, row).response)) for row in range(len(batch))]
            )
            length, one = (reported[-1][f"reward/weight/{name}"] for name in ("length", "one"))
            errors.append((job.reward.wait(batch) - (length * lengths + one)).abs().tolist())
            assert torch.equal(batch["reward.length"], lengths.float()) and (batch["reward.one"] == 1).all()
        job.close()
    return reported, errors, [str(warning.message) for warning in caught if "weights" in str(warning.message)]


def test_weights_of_rewards_can_be_changed_while_the_run_goes_on(ranks, inputs, tmp_path):
    results = ranks.run(2, reweighed, inputs, tmp_path / "run")
    for reported, errors, _ in results:
        weights = [(line["reward/weight/length"], line["reward/weight/one"]) for line in reported]
        assert weights == [(0.5, 0.0), (2.0, 10.0), (2.0, 10.0), (2.0, 10.0)]
        assert all(error < 1e-5 for row in errors for error in row) and sum(map(len, errors)) > 0
    complaints = results[0][2]
    assert len(complaints) == 2 and all("The weights remain unchanged" in line for line in complaints)
    assert not results[1][2]
