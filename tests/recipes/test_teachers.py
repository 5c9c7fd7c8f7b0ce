"""Teachers of recipes that distill: several by source, on a server, the policy itself, one with another tokenizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.json_lines import write_lines
from tests.helpers.json_server import JsonRequest, JsonResponse, serving
from tests.recipes.tiny_runs import TEACHER_OF, Goal, comparable, tiny_run
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.recipes.tasks.repeat_digit import DIGITS, LENGTH
from verl_mg.stores.records import MODEL

FIRST = ["job.iterations=1", "job.save=false", "algorithm.prompts_per_iteration=9", "algorithm.group_size=2"]
LEARNED = Goal("reward/mean", (-1.0, -0.75), 0.1, 0.4)
NEAR = Goal("actor/divergence", (2.0, 5.5), 0.2, 0.8)


@pytest.fixture(scope="module")
def task(ranks, tasks) -> Path:
    """The task with the teacher that SFT makes."""
    folder = tasks(0)
    if not (folder / TEACHER_OF["gkd"] / MODEL).exists():
        tiny_run(ranks, "sft", folder, folder / "sft")
    return folder


@pytest.mark.parametrize(
    ("recipe", "protocol"),
    [
        ("gkd", "sglang"),
        ("distillation", "openai"),
        pytest.param("gkd", "openai", marks=pytest.mark.nightly),
        pytest.param("distillation", "sglang", marks=pytest.mark.nightly),
    ],
)
def test_teacher_on_a_server_gives_the_metrics_of_the_model_on_ranks(ranks, tasks, tmp_path, protocol, recipe):
    teacher = tasks(0) / "mixture"  # any other model can teach
    few = [*FIRST, f"reference.path={teacher}"]
    few += ["algorithm.divergence={kind: js, top_k: 4}"] if recipe == "gkd" else []
    (expected,) = comparable(tiny_run(ranks, recipe, tasks(0), tmp_path / "ranks", few))
    with scoring(teacher) as url:
        server = f"teachers={{far: {{url: {url}, protocol: {protocol}, served_model: teacher}}}}"
        (found,) = comparable(tiny_run(ranks, recipe, tasks(0), tmp_path / "server", [*few, server]))
    assert found == pytest.approx(expected, rel=1e-4, abs=2e-6)
    assert found["actor/grad_norm"] > 0.01


def two_teachers(task: Path, folder: Path) -> list[str]:
    """Overrides: half of the data is taught by the model of SFT, the other half by a model of random weights."""
    lines = (task / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("odd", lines[1::2]), ("even", lines[::2])):
        (folder / f"{name}.jsonl").write_text("".join(part))
    sources = ", ".join(f"{name}: {{path: {folder / name}.jsonl}}" for name in ("odd", "even"))
    taught = f"able: {{path: {task / 'sft' / MODEL}, sources: [odd]}}, random: {{path: {task / 'mixture'}}}"
    return [f"data.train={{{sources}}}", f"teachers={{{taught}}}"]


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["gkd", "distillation"])
def test_iteration_with_two_teachers_is_unchanged_by_ranks(ranks, task, tmp_path, recipe):
    overrides = [*FIRST, *two_teachers(task, tmp_path)]
    (alone,) = comparable(tiny_run(ranks, recipe, task, tmp_path / "alone", overrides, count=1))
    small = ["actor.tokens_per_micro_batch=40", "teachers.able.layout=tp2", "teachers.random.ranks=2-3"]
    (found,) = comparable(tiny_run(ranks, recipe, task, tmp_path / "four", [*overrides, *small], count=4))
    assert found == pytest.approx(alone, rel=1e-4, abs=2e-6)


@pytest.mark.nightly
def test_policy_learns_from_the_teacher_of_each_source(ranks, task, tmp_path):
    overrides = [*two_teachers(task, tmp_path), "job.save=false", "algorithm.divergence={kind: reverse, top_k: 6}"]
    lines = tiny_run(ranks, "gkd", task, tmp_path / "run", overrides)
    assert lines[-1]["actor/divergence"] < 0.6 * lines[0]["actor/divergence"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        ["algorithm.divergence={kind: js, beta: 0.7}"],
        ["algorithm.divergence={kind: skew_reverse, beta: 0.1}"],
        ["algorithm.divergence={kind: reverse, top_k: 4}"],
        ["algorithm.divergence={kind: forward, top_k: 4, tail: renormalized}", "algorithm.data_fraction=0.5"],
        ["algorithm.divergence={kind: forward}", "algorithm.data_fraction=0.5"],
    ],
)
def test_gkd_with_options_learns(ranks, task, tmp_path, options):
    lines = tiny_run(ranks, "gkd", task, tmp_path / "run", ["job.save=false", *options])
    LEARNED.check(lines)


@pytest.mark.nightly
def test_gkd_on_given_answers_alone_learns_without_engines(ranks, task, tmp_path):
    options = ["job.save=false", "algorithm.data_fraction=1", "algorithm.divergence={kind: forward}"]
    lines = tiny_run(ranks, "gkd", task, tmp_path / "run", options)
    NEAR.check(lines)
    assert "reward/mean" not in lines[0]


@pytest.fixture
def repeating(ranks, tasks, tmp_path) -> Path:
    """A model that repeats an answer that it is given, and that has never seen a prompt of the task."""
    data = write_lines(tmp_path / "given.jsonl", ({"prompt": f"{d * LENGTH}=", "answer": d * LENGTH} for d in DIGITS))
    tiny_run(ranks, "sft", tasks(0), tmp_path / "sft", [f"data.train={data}", "job.iterations=40"])
    return tmp_path / "sft" / MODEL


@pytest.mark.nightly
def test_policy_learns_from_its_beginning_with_the_answer_in_the_prompt(ranks, tasks, tmp_path, repeating):
    knows = ['teachers={self: {prompt: "{answer}="}}', "algorithm.divergence={kind: forward}"]
    options = [f"model.path={repeating}", *knows, "job.save=false"]
    lines = tiny_run(ranks, "gkd", tasks(0), tmp_path / "run", options)
    Goal("reward/mean", (-1.0, 0.2), 0.9, 0.4).check(lines)


@pytest.mark.nightly
@pytest.mark.parametrize("weights", ["actor", "reference"])
def test_policy_nears_itself_with_the_answer_in_the_prompt(ranks, tasks, tmp_path, repeating, weights):
    # Its objective: this tiny model, in large steps, takes the teacher along with it.
    knows = f'teachers={{self: {{prompt: "{{answer}}=", weights: {weights}}}}}'
    options = [f"model.path={repeating}", knows, "algorithm.divergence={kind: forward, top_k: 6}"]
    refreshed = ["reference.path=null", "reference.refresh_every=8"] if weights == "reference" else []
    lines = tiny_run(ranks, "gkd", tasks(0), tmp_path / "run", [*options, *refreshed, "job.iterations=24"])
    NEAR.check(lines)


@pytest.mark.nightly
def test_policy_with_longer_tokens_learns_from_a_teacher_of_single_digits(ranks, task, tmp_path):
    size = {"hidden": 64, "layers": 2, "ffn": 128, "max_positions": 64, "init_std": 0.06}
    pairs = [digit * 2 for digit in DIGITS]  # one token each, whose text the teacher reads in two
    student = make_tiny_model(tmp_path / "model", "qwen3", characters="=" + DIGITS[::-1], words=pairs, seed=1, **size)
    taught = f"teachers={{other: {{path: {task / 'sft' / MODEL}, tokenizer: {task / 'sft' / MODEL}}}}}"
    options = [f"model.path={student}", taught, "job.save=false"]
    lines = tiny_run(ranks, "distillation", task, tmp_path / "run", options)
    Goal("distillation/reverse_kl", (3.0, 9.0), 0.5, 1.5).check(lines)
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"] + 0.3


@pytest.mark.nightly
def test_gkd_refuses_a_teacher_with_another_tokenizer(ranks, task, tmp_path):
    taught = f"teachers={{other: {{path: {task / 'mixture'}, tokenizer: {task / 'mixture'}}}}}"
    with pytest.raises(Exception, match="teachers.other.tokenizer: distributions over two vocabularies cannot be"):
        tiny_run(ranks, "gkd", task, tmp_path / "run", [taught, *FIRST])


@contextmanager
def scoring(model: Path) -> Iterator[str]:
    """Runs a server of a model directory, and yields its URL."""
    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logprobs(tokens: list[int]) -> Tensor:
        with torch.no_grad():
            scores: Tensor = net(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return scores

    def respond(request: JsonRequest) -> JsonResponse:
        body = request.body
        if request.path == "/generate":
            return JsonResponse(_sglang(body, logprobs(body["input_ids"])))
        if request.path == "/v1/completions" and body["model"] == "teacher":
            return JsonResponse(_vllm(body, logprobs(body["prompt"])))
        return JsonResponse({"error": {"message": "no such model"}}, 404)

    with serving(respond) as url:
        yield url


def _sglang(body: dict[str, Any], scores: Tensor) -> dict[str, Any]:
    tokens, first = body["input_ids"], body["logprob_start_len"]
    places = range(max(first, 1), len(tokens))
    given: list[Any] = [[scores[place - 1, tokens[place]].item(), tokens[place], None] for place in places]
    likeliest: list[Any] = []
    for place in places:
        best = scores[place - 1].topk(body["top_logprobs_num"])
        likeliest.append([[value, token, None] for value, token in zip(*map(Tensor.tolist, best), strict=True)])
    unknown = first == 0  # the first token of a sequence has no log-prob
    return {
        "text": "",
        "meta_info": {
            "input_token_logprobs": [[None, tokens[0], None]] * unknown + given,
            "input_top_logprobs": [None] * unknown + likeliest,
        },
    }


def _vllm(body: dict[str, Any], scores: Tensor) -> dict[str, Any]:
    tokens, entries = body["prompt"], [None]
    for place in range(1, len(tokens)):
        best = scores[place - 1].topk(body["prompt_logprobs"]).indices.tolist()
        chosen = dict.fromkeys([tokens[place], *best])
        entries.append({str(token): {"logprob": scores[place - 1, token].item(), "rank": 1} for token in chosen})
    return {"choices": [{"text": "", "prompt_logprobs": entries}]}
