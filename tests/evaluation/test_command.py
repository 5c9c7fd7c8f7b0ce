"""Evaluations of models, runs and checkpoints against a plain script, what they write, and their mistakes."""

import statistics
from pathlib import Path

import pyarrow.dataset as ds
import pytest
import torch.distributed as dist
import yaml

from tests.helpers.engines import SGLANG, VLLM
from tests.helpers.engines import overrides as of_engine
from tests.helpers.json_lines import read_lines, write_lines
from tests.helpers.rank_pool import job_store
from tests.helpers.sglang_servers import RunningServer
from tests.helpers.tiny_jobs import RECIPES, files_of, run_recipe, write_sums
from tests.helpers.tiny_models import CHARACTERS
from tests.helpers.traces import needs_sglang
from tests.oracles.plain_evaluation import greedy_responses, mean, pass_at
from verl_mg.distributed.world import World
from verl_mg.errors import UserError
from verl_mg.evaluation.command import evaluate
from verl_mg.evaluation.comparison import compare
from verl_mg.evaluation.configuration import Target, evaluation_config
from verl_mg.evaluation.results import Report, format_report
from verl_mg.import_function import load_function
from verl_mg.job.evaluation import evaluation_sets
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.view.run import Run

REWARD = """
from verl_mg.rewards import Reward

def digits(sample):
    return sum(c.isdigit() for c in sample.response) / 5

def letters(sample):
    letters = sum(c.isalpha() for c in sample.response)
    return Reward(1.0, {"letters": letters} if letters else {})
"""
TIES = 0.02  # engines may break a tie differently


def digits(response: str) -> float:
    return sum(c.isdigit() for c in response) / 5


def train(folder: Path) -> None:
    overrides = [
        *files_of(folder, folder / "run"),
        *(f"reward.function={folder / 'reward.py'}:digits", "job.iterations=2", "checkpoint.every=1"),
        *("actor.layout=tp2", "actor.optimizer.lr=1e-2", "rollout.max_new_tokens=5"),
        *("algorithm.prompts_per_iteration=6", "algorithm.group_size=4"),
    ]
    run_recipe("grpo", overrides)


def evaluated(text: str, sets: list[str], overrides: list[str], output: Path) -> Report:
    target = Target.parse(text)
    config = evaluation_config(target, None, sets, overrides, output)
    return evaluate(target, config, World(dist.get_rank(), dist.get_world_size(), job_store()))


@pytest.fixture(scope="module")
def inputs(ranks, tmp_path_factory) -> Path:
    """A model, sets, and a run whose weights differ from the model's."""
    folder = tmp_path_factory.mktemp("inputs")
    # Sizes that the engines compute with on a CPU.
    sizes = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 128, "max_positions": 64}
    make_tiny_model(folder / "model", "qwen3", characters=CHARACTERS, **sizes, init_std=0.2, perturb=True, seed=3)
    write_sums(folder)
    write_lines(folder / "letters.jsonl", ({"prompt": c * n, "answer": c} for c in "abc" for n in range(1, 4)))
    (folder / "reward.py").write_text(REWARD)
    ranks.run(2, train, folder)
    return folder


def test_evaluation_of_any_target_and_layout_equals_a_plain_script(ranks, inputs, tmp_path):
    sums, letters = inputs / "sums.jsonl", inputs / "letters.jsonl"
    sets = [f"sums={sums}", f"letters={letters}"]
    changes = ["rollout.max_new_tokens=5", "data.test.letters.max_new_tokens=3"]
    reward = f"reward.function={inputs / 'reward.py'}:digits"
    expected = {}
    for model in ("model", "run/model"):
        responses = {
            "sums": greedy_responses(inputs / model, sums, 5),
            "letters": greedy_responses(inputs / model, letters, 3),
        }
        expected[model] = {name: mean(texts, digits) for name, texts in responses.items()}
    assert expected["model"] != expected["run/model"]
    targets = {
        "model": (1, str(inputs / "model"), [reward]),
        "model at tp2": (2, str(inputs / "model"), [reward, "actor.layout=tp2"]),
        "run": (1, str(inputs / "run"), ["actor.layout=tp1"]),
        "checkpoint of tp2 at pp3": (3, f"{inputs / 'run'}@2", ["actor.layout=pp3"]),
    }
    for name, (count, text, overrides) in targets.items():
        reports = ranks.run(count, evaluated, text, sets, [*changes, *overrides], tmp_path / name)
        assert all(report == reports[0] for report in reports)
        found = {of_set: values.metrics["reward"].value for of_set, values in reports[0].sets.items()}
        assert found == pytest.approx(expected["model" if "model" in name else "run/model"]), name
    assert reports[0].iteration == 2 and reports[0].sets["letters"].prompts == 9


def test_a_part_of_some_samples_is_the_mean_over_these_with_their_number(ranks, inputs, tmp_path):
    output = tmp_path / "out"
    drawn = [
        "evaluation.samples=4",
        "evaluation.temperature=1",
        "rollout.max_new_tokens=1",
        "data.test.sums.prompts=12",
    ]
    reward = f"reward.function={inputs / 'reward.py'}:letters"
    report = ranks.run(2, evaluated, str(inputs / "model"), [f"sums={inputs / 'sums.jsonl'}"], [*drawn, reward], output)
    found = report[0].sets["sums"].metrics["reward/letters"]
    parts: dict[int, list[float]] = {}
    for row in ds.dataset(output / "samples", format="parquet").to_table().to_pylist():
        parts.setdefault(row["prompt_id"], []).extend(dict(row["parts"]).values())
    having = [values for values in parts.values() if values]
    assert 0 < len(having) < len(parts) == 12 and len({len(values) for values in having}) > 1
    assert (found.prompts, found.samples) == (len(having), sum(map(len, having)))
    assert found.value == pytest.approx(statistics.fmean(map(statistics.fmean, having)))
    assert f"{found.samples} of 48" in format_report(report[0]).splitlines()[2]
    (counts,) = compare(output, output).samples_with["sums"].values()
    assert (counts.first, counts.second, counts.prompts) == (found.samples, found.samples, len(having))


@pytest.mark.nightly
@pytest.mark.parametrize("engine", [SGLANG, VLLM])
def test_evaluation_on_engines_of_two_ranks_equals_a_plain_script(engine, ranks, inputs, tmp_path):
    sums = inputs / "sums.jsonl"
    changes = ["actor.layout=pp2", "rollout.layout=tp2", "data.test.sums.prompts=40", *of_engine(engine)]
    report = ranks.run(2, evaluated, f"{inputs / 'run'}@2", [f"sums={sums}"], changes, tmp_path / "out")[0]
    expected = mean(greedy_responses(inputs / "run/model", sums, 5), digits)
    assert report.sets["sums"].metrics["reward"].value == pytest.approx(expected, abs=TIES)
    assert report.engine == engine


@pytest.mark.nightly
@needs_sglang
def test_evaluation_on_a_running_server_equals_a_plain_script(ranks, inputs, tmp_path):
    server = RunningServer(inputs / "model", tmp_path / "server.log")
    try:
        server.wait_until_ready()
        changes = ["rollout.engine=sglang", f"rollout.urls=[http://127.0.0.1:{server.port}]"]
        changes += ["rollout.max_new_tokens=5", "data.test.sums.prompts=40"]
        sets = [f"sums={inputs / 'sums.jsonl'}"]
        report = ranks.run(2, evaluated, f"{inputs / 'run'}@2", sets, changes, tmp_path / "out")[0]
    finally:
        server.kill()
    expected = mean(greedy_responses(inputs / "run/model", inputs / "sums.jsonl", 5)[:40], digits)
    assert report.sets["sums"].metrics["reward"].value == pytest.approx(expected, abs=TIES)


def test_metrics_and_records_of_samples_belong_together(ranks, inputs, tmp_path):
    settings = ["evaluation.samples=5", "evaluation.temperature=1", "evaluation.pass_threshold=0.6"]
    settings += ["rollout.top_p=0.9", "rollout.max_new_tokens=5"]
    settings += ["data.test.sums.k=[1,3,5]", "data.test.sums.prompts=12"]
    settings += [f"reward.function={inputs / 'reward.py'}:digits"]
    sets = [f"sums={inputs / 'sums.jsonl'}"]
    report = ranks.run(2, evaluated, str(inputs / "model"), sets, settings, tmp_path / "out")[0]
    rows = ds.dataset(tmp_path / "out" / "samples", format="parquet").to_table().to_pylist()
    assert len(rows) == 12 * 5 and {row["source"] for row in rows} == {"sums"}
    groups: dict[str, list[float]] = {}
    for row in rows:
        assert row["reward"] == pytest.approx(digits(row["response"]))
        assert row["answer"] == str(eval(row["prompt"][:-1]))
        groups.setdefault(row["prompt"], []).append(row["reward"])
    passed = [[reward >= 0.6 - 1e-6 for reward in rewards] for rewards in groups.values()]
    metrics = report.sets["sums"].metrics
    assert set(metrics) == {"reward", "pass@1", "pass@3", "pass@5", "avg@5"}
    for k in (1, 3, 5):
        assert metrics[f"pass@{k}"].value == pytest.approx(pass_at(passed, k))
    assert 0 < metrics["pass@1"].value < metrics["pass@3"].value
    assert metrics["pass@3"].low < metrics["pass@3"].value < metrics["pass@3"].high
    stored = Report.model_validate_json((tmp_path / "out" / "evaluation.json").read_text())
    assert stored == report and stored.sets["sums"].sampling == {"temperature": 1, "top_p": 0.9, "max_new_tokens": 5}
    lines = read_lines(tmp_path / "out" / "prompts.jsonl")
    assert [sorted(line["rewards"]) for line in lines] == [sorted(rewards) for rewards in groups.values()]
    assert Run(tmp_path / "out").about()["samples"] == [[0, 0]], "verl-mg view shows the samples"


def test_target_of_a_run_names_its_checkpoints(ranks, inputs, tmp_path):
    assert Target.parse(str(inputs / "model")).run is None
    assert Target.parse("Qwen/Qwen3-0.6B@v1").model == Path("Qwen/Qwen3-0.6B@v1")
    assert Target.parse(str(inputs / "run")).output == inputs / "run" / "evaluation" / "final"
    sets = [f"sums={inputs / 'sums.jsonl'}"]
    missing = "no intact checkpoint .* of iteration 7; the run has iterations 1, 2"
    with pytest.raises(AssertionError, match=f"run@7: {missing}"):
        ranks.run(1, evaluated, f"{inputs / 'run'}@7", sets, [], tmp_path / "out")
    with pytest.raises(AssertionError, match=r"--output .*run: it contains a run"):
        ranks.run(1, evaluated, str(inputs / "run"), sets, ["actor.layout=tp1"], inputs / "run")


def test_evaluation_config_takes_sets_of_the_configuration_or_of_the_command(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "model: {path: x}\nalgorithm: {group_size: 8}\nrollout: {mode: async, num_ranks: 2, engine: sglang}\n"
        "data: {train: t.jsonl, test: {a: {path: a.jsonl, samples: 4}, b: {path: b.jsonl}}}\n"
        "evaluation: {temperature: 0.5, prompts: 3}\n"
    )
    target = Target.parse("some/model")

    def of(sets: list[str], overrides: list[str]) -> dict:
        return evaluation_config(target, file, sets, overrides, tmp_path / "out").data.test

    assert list(of([], [])) == ["a", "b"] and list(of(["a"], [])) == ["a"]
    chosen = of(["a", "c=c.jsonl"], ["data.test.c.samples=2"])
    assert (chosen["a"].samples, chosen["c"].path, chosen["c"].samples) == (4, Path("c.jsonl"), 2)
    for limits, prompts in (([], [None, None]), (["evaluation.prompts=5", "data.test.b.prompts=7"], [5, 7])):
        sets = evaluation_sets(evaluation_config(target, file, [], limits, tmp_path / "out"))
        assert [of_set.prompts for of_set in sets] == prompts
    config = evaluation_config(target, None, [], ["data.test=d.jsonl"], tmp_path / "out")
    assert list(config.data.test) == ["test"] and config.model.path == Path("some/model")
    for sets, overrides, message in (
        (["d"], [], r"--set d: the configuration has no such set; it has a, b"),
        (["a.b=c"], [], r"--set a.b=c: 'a.b' is not a name"),
        ([], ["data.test=null"], r"data.test: there are no sets .* Write --set NAME=PATH"),
        ([], ["data.test.a.sample=2"], r"data.test.a.sample: unknown key. Did you mean data.test.a.samples"),
    ):
        with pytest.raises(UserError, match=message):
            of(sets, overrides)


def test_shipped_benchmarks_can_be_evaluated(tmp_path):
    shipped = RECIPES / "evaluation" / "benchmarks.yaml"
    names = list(yaml.safe_load(shipped.read_text())["data"]["test"])
    config = evaluation_config(Target.parse("m"), shipped, [*names[:-1], f"{names[-1]}=x.jsonl"], [], tmp_path)
    assert [of_set.name for of_set in evaluation_sets(config)] == names
    assert config.data.test[names[-1]].path == Path("x.jsonl") and config.data.test[names[-1]].prepare
    for of_set in config.data.test.values():
        load_function((of_set.reward or config.reward).function, "reward")
        assert of_set.prepare is None or load_function(of_set.prepare, "prepare")
