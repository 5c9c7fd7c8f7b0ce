"""The exchanges of an iteration outside models, counted exactly in a real job."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist

from tests.helpers.rank_pool import job_store
from tests.helpers.tiny_jobs import files_of
from tests.run.jobs import GRPO, make_inputs
from tools.bench.message_counter import Traffic, counted_traffic
from verl_mg.config import load_config
from verl_mg.distributed.world import World
from verl_mg.job.recipe import load_recipe
from verl_mg.run.loop import train


@dataclass(frozen=True)
class ObservedWorld(World):
    traffic: Traffic = field(default_factory=Traffic)
    seen: list[Traffic] = field(default_factory=list)

    def report_iteration(self, iteration):
        self.seen.append(self.traffic.copy())


def counted(inputs, output, recipe, overrides):
    """Calls of the last iteration, of which each ends with its report."""
    loaded = load_recipe(recipe)
    common = [*files_of(inputs, output), f"reward.function={inputs / 'reward.py'}:score", "rollout.max_new_tokens=6"]
    common += ["job.iterations=3", "job.save=false", "checkpoint.every=0", "algorithm.kl.coefficient=0.01"]
    config = load_config(None, [*common, *overrides], loaded.config)
    with counted_traffic() as traffic:
        world = ObservedWorld(dist.get_rank(), dist.get_world_size(), job_store(), traffic=traffic)
        train(loaded, config, world)
    before, after = world.seen[-2:]
    return after.since(before).outside_models.calls


@pytest.mark.parametrize(
    ("recipe", "overrides", "of_job", "transfers"),
    [
        ("grpo", GRPO, 1, 4),
        pytest.param("ppo", ["algorithm.prompts_per_iteration=24"], 2, 5, marks=pytest.mark.nightly),
    ],
)
def test_iteration_makes_one_exchange_for_each_decision_of_all_ranks(
    ranks, tmp_path, recipe, overrides, of_job, transfers
):
    """Of two ranks with an engine each: completed samples, two of scores, indices of rows before the forward passes and
    the update, sums of the recipe, metrics, and the request to stop; and rows between ranks."""
    inputs = make_inputs(tmp_path)
    for calls in ranks.run(2, counted, inputs, tmp_path / "run", recipe, overrides):
        exchanges = Counter({name: n for name, n in calls.items() if not name.startswith("weight_sync.")})
        rows = exchanges.pop("rows.dispatch")
        assert exchanges == {
            "rollout.rollout": 1,
            "roles.reward": 2,
            "rows.plan": 2,
            "job.job": of_job,
            "monitor.run_logger": 1,
            "run.loop": 1,
        }
        assert rows == 2 * transfers  # sent and received: rows before the passes and the update, values of each role
