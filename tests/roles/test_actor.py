"""One GRPO update through Megatron under every layout, against one written in plain torch over `transformers`."""

import copy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.given_experts import told
from tests.rank_pool import job_context
from tests.tiny_models import MIXTURES, TRAINED, oracle, oracle_outputs, random_rows, tiny_model
from verl_mg.config import OptimizerConfig
from verl_mg.job.recipe import load_recipe
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import read_config
from verl_mg.roles.models import Actor

GRPO = load_recipe(Path(__file__).parents[2] / "recipes" / "grpo.py")
TEMPERATURE, COUNT = 0.8, 13
# A large eps makes Adam's step proportional to small gradients, so that weights compare like gradients do.
OPTIMIZER = OptimizerConfig(lr=0.1, eps=0.1, betas=(0.9, 0.99), clip_grad=0.5, weight_decay=0.0)
LAYOUTS = [("tp1", 1), ("tp1", 2), ("tp2", 2), ("pp2", 2), ("tp2-pp2", 4), ("tp2", 4), ("pp4", 4), ("tp2-cp2", 4)]
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def settings(mode):
    return GRPO.config(kl_coefficient=0.05, aggregation=mode, clip_high=0.3)


def rows(model):
    """Every rank can make all rows; old log-probs are the policy's own, shifted, so that some ratios are clipped."""
    batch = random_rows(COUNT, read_config(model).vocab)
    with torch.no_grad():
        own, _ = oracle_outputs(oracle(model), batch, TEMPERATURE)
    batch["old_logprobs"] = own + batch["noise"]
    batch["ref_logprobs"] = own - batch["noise"]
    return batch


def actor_on(model, layout, budget, ranks=None):
    """On the given ranks, or all."""
    ranks = ranks or range(dist.get_world_size())
    return Actor(
        model,
        ParallelGroups(Placement(Layout.parse(layout).fit(len(ranks)), tuple(ranks))),
        job_context(),
        dtype=torch.float32,
        temperature=TEMPERATURE,
        tokens_per_micro_batch=budget,
        optimizer=OPTIMIZER,
    )


def update(model, layout, budget, mode, folder, minibatches=1):
    """One call of `update` on rows that lie scattered over the ranks; saves the model, tells the metrics."""
    actor = actor_on(model, layout, budget)
    mine = rows(model).select(range(dist.get_rank(), COUNT, dist.get_world_size()))
    cfg = settings(mode)
    metrics = actor.update(mine, partial(with_entropy, cfg), mode, max_length=16, num_minibatches=minibatches)
    actor.save(folder, model)
    return metrics


def with_entropy(cfg, tokens):
    """The recipe's loss with an entropy bonus, so that the entropy's gradient is compared too."""
    loss, metrics = sys.modules["recipe_grpo"].policy_loss(tokens, cfg)
    return loss - 0.01 * tokens.entropy, metrics


def oracle_update(model, mode, chunks=1):
    """The same in plain torch: serial, padded by nothing, losses by their formulas."""
    net = copy.deepcopy(oracle(model))
    decay = dict(lr=OPTIMIZER.lr, eps=OPTIMIZER.eps, betas=OPTIMIZER.betas, weight_decay=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), **decay)
    batch = rows(model)
    batch = batch.select(batch["sample_id"].argsort())
    cfg, losses, norms = settings(mode), [], []
    for part in torch.arange(len(batch)).tensor_split(chunks):
        mini = batch.select(part)
        new, entropy = oracle_outputs(net, mini, TEMPERATURE)
        total = torch.zeros(())
        sequences = sum(bool(mini.row("loss_mask", i).any()) for i in range(len(mini)))
        for i in range(len(mini)):
            mask = mini.row("loss_mask", i)
            start = int(mini.offsets[i])
            lp, h = (x[start : start + len(mask)][mask] for x in (new, entropy))
            old, ref, adv = (mini.row(n, i)[mask] for n in ("old_logprobs", "ref_logprobs", "advantages"))
            ratio = (lp - old).exp()
            policy = -torch.minimum(ratio * adv, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv)
            kl = (ref - lp).exp() - (ref - lp) - 1
            per_token = policy + cfg.kl_coefficient * kl - 0.01 * h
            if mode == "token-mean":
                total = total + per_token.sum() / mini["loss_mask"].sum()
            elif mode == "seq-mean-token-mean":
                total = total + per_token.mean() / sequences
            else:
                total = total + per_token.sum() / (sequences * 16)
        optimizer.zero_grad()
        total.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), OPTIMIZER.clip_grad).item())
        optimizer.step()
        losses.append(total.item())
    return sum(losses) / chunks, sum(norms) / chunks, {n: p.detach() for n, p in net.named_parameters()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, name) for name in (*TRAINED, *MIXTURES)}


def compare(metrics, folder, model, expected):
    loss, norm, weights = expected
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > OPTIMIZER.clip_grad > 0 and metrics["actor/clip_fraction_low"] > 0
    before = oracle(model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, value in weights.items():
        moved = (value - before[name]).abs().max()
        assert moved > 0, f"{name} has no gradient"
        assert (after[name] - value).abs().max() < 1e-4 * moved + 1e-6, name


@pytest.mark.parametrize("layout,count", LAYOUTS)
@pytest.mark.parametrize("budget", [24, 4096])
def test_one_update_is_the_same_under_every_layout_and_budget(ranks, models, tmp_path, layout, count, budget):
    model, mode = models["qwen3"], "seq-mean-token-mean"
    results = ranks.run(count, update, model, layout, budget, mode, tmp_path / "saved")
    assert all(result == results[0] for result in results)
    compare(results[0], tmp_path / "saved", model, oracle_update(model, mode))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("mode", MODES)
def test_every_architecture_and_aggregation(ranks, models, tmp_path, architecture, mode):
    model = models[architecture]
    results = ranks.run(4, update, model, "tp2-pp2", 30, mode, tmp_path / "saved")
    compare(results[0], tmp_path / "saved", model, oracle_update(model, mode))


@pytest.mark.parametrize(("architecture", "layout"), [("qwen3_moe", "tp2-ep2"), ("mixtral", "pp2-ep2")])
def test_a_mixture_of_experts_is_updated_and_saved(ranks, models, tmp_path, architecture, layout):
    model, mode = models[architecture], "seq-mean-token-mean"
    results = ranks.run(4, update, model, layout, 30, mode, tmp_path / "saved")
    compare(results[0], tmp_path / "saved", model, oracle_update(model, mode))


def test_minibatches_are_cut_by_sample_id_whatever_the_layout(ranks, models, tmp_path):
    model, mode = models["qwen2"], "token-mean"
    expected = oracle_update(model, mode, chunks=3)
    for layout, count in (("tp1", 1), ("tp1", 4), ("tp2-pp2", 4)):
        results = ranks.run(count, update, model, layout, 50, mode, tmp_path / "saved", 3)
        assert results[0]["actor/loss"] == pytest.approx(expected[0], rel=3e-5)
        assert results[0]["actor/grad_norm"] == pytest.approx(expected[1], rel=3e-5)


def logprobs(model, layout, budget):
    actor = actor_on(model, layout, budget)
    # The last rank holds no rows at all.
    holders = max(dist.get_world_size() - 1, 1)
    mine = rows(model).select(range(dist.get_rank(), COUNT, holders) if dist.get_rank() < holders else [])
    return mine["sample_id"].tolist(), mine.lengths.tolist(), actor.compute_logprobs(mine)


@pytest.mark.parametrize("layout,count", LAYOUTS)
def test_log_probs_come_back_to_the_rows_they_are_of(ranks, models, layout, count):
    model = models["llama"]
    batch = rows(model)
    with torch.no_grad():
        expected, _ = oracle_outputs(oracle(model), batch, TEMPERATURE)
    expected = torch.where(batch["loss_mask"], expected, 0)
    place = {int(sample_id): i for i, sample_id in enumerate(batch["sample_id"])}
    seen = 0
    for ids, lengths, column in ranks.run(count, logprobs, model, layout, 40):
        for sample_id, part in zip(ids, column.split(lengths), strict=True):
            start, stop = batch.offsets[place[sample_id] : place[sample_id] + 2].tolist()
            assert torch.allclose(part, expected[start:stop], atol=2e-5)
            seen += 1
    assert seen == COUNT


def replayed(model, layout, given):
    """Log-probs and metrics of one update, with the given experts or, where there are none, those of the routers."""
    batch = rows(model)
    if given is not None:
        batch["routed_experts"] = given
    own = list(range(dist.get_rank(), COUNT, dist.get_world_size()))
    mine, cfg = batch.select(own), settings("token-mean")
    actor = actor_on(model, layout, 40)
    logprobs = actor.compute_logprobs(mine)
    return own, logprobs.split(mine.lengths.tolist()), actor.update(mine, partial(with_entropy, cfg), "token-mean")


def test_the_experts_of_the_rollout_are_taken_in_log_probs_and_updates(ranks, models):
    model, batch = models["qwen3_moe"], rows(models["qwen3_moe"])
    given = torch.rand(batch.total_tokens, 4, 4, generator=torch.Generator().manual_seed(2)).topk(2).indices.short()
    with torch.no_grad():
        logprobs, _ = oracle_outputs(told(model, given), batch, TEMPERATURE)
    expected = torch.where(batch["loss_mask"], logprobs, 0).split(batch.lengths.tolist())
    ((_, _, alone),) = ranks.run(1, replayed, model, "tp1", given)
    ((_, _, free),) = ranks.run(1, replayed, model, "tp1", None)
    for own, parts, metrics in ranks.run(4, replayed, model, "tp2-ep2", given):
        assert metrics == pytest.approx(alone, rel=1e-5)
        assert all(torch.allclose(part, expected[row], atol=2e-5) for row, part in zip(own, parts, strict=True))
    assert abs(free["actor/entropy"] - alone["actor/entropy"]) > 1e-2
