"""What a rank that trains imports and reads, in a new interpreter."""

import json

import pytest

from tests.helpers.launched import finished
from tests.run.jobs import make_inputs

HEAVY = {
    *("accelerate", "datasets", "pandas", "scipy", "sglang", "sklearn", "vllm", "wandb"),
    *("torch._dynamo", "torch._inductor"),
    *("torchvision.datasets", "torchvision.models", "transformers.models.auto.image_processing_auto"),
}
"""Packages that cost tenths of a second, or tens of MiB, and that no rank needs to train."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    words = [
        *("train", "grpo", f"model.path={inputs / 'model'}", f"data.train={inputs / 'sums.jsonl'}"),
        *("job.iterations=3", "job.save=false", "checkpoint.every=0", "rollout.max_new_tokens=56"),
        *("algorithm.prompts_per_iteration=2", "algorithm.group_size=2", "reward.function=verl_mg.rewards.exact:score"),
        *(f"job.output={tmp_path_factory.mktemp('run') / 'run'}", "job.console=false"),
    ]
    ended = finished(["-m", "tests.run.recorded_job", str(inputs), *words], warm=False).completed()
    return json.loads(ended.out.splitlines()[-1])


def test_rank_that_trains_has_imported_no_package_that_it_does_not_use(recorded):
    assert HEAVY & set(recorded["modules"]) == set()
    assert {"megatron.core", "transformers"} <= set(recorded["modules"])


def test_rank_reads_data_tokenizer_and_configuration_of_the_model_once(recorded):
    opened = recorded["opened"]
    assert opened["sums.jsonl"] == opened["model/tokenizer.json"] == opened["model/chat_template.jinja"] == 1
    # Once for this project, once by transformers, and once for the digest in the records of samples.
    assert opened["model/config.json"] == 3
