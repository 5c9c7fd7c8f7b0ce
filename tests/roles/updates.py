"""Updates of roles, of rows with shared prefixes too, and their oracles in plain torch."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.helpers.roles import build_role
from tests.helpers.tiny_models import oracle, oracle_outputs, random_rows
from tests.megatron.training import assembled, recorded_gradients, token_loss
from verl_mg.batch import Batch
from verl_mg.config import OptimizerConfig
from verl_mg.distributed.collectives import sum_over_ranks
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import read_config
from verl_mg.monitor.metrics import Throughput
from verl_mg.recipes import grpo
from verl_mg.roles.models import Actor
from verl_mg.training.loss_inputs import LossInputs

TEMPERATURE, COUNT = 0.8, 13
# A large eps makes Adam's step proportional to small gradients, so that weights compare like gradients do.
OPTIMIZER = OptimizerConfig(lr=0.1, eps=0.1, betas=(0.9, 0.99), clip_grad=0.5, weight_decay=0.0)


def settings(mode):
    return grpo.Config.model_validate({"kl": {"coefficient": 0.05}, "loss_aggregation": mode, "clip_high": 0.3})


def rows(model):
    """All rows, the same on every rank; noise in the old log-probs makes some ratios be clipped."""
    batch = random_rows(COUNT, read_config(model).vocab)
    with torch.no_grad():
        logprobs, _ = oracle_outputs(oracle(model), batch, TEMPERATURE)
    batch["old_logprobs"] = logprobs + batch["noise"]
    batch["ref_logprobs"] = logprobs - batch["noise"]
    return batch


def own_rows(batch):
    """Rows of this rank, every n-th of all, so that neighbours such as pairs are on different ranks."""
    return batch.select(range(dist.get_rank(), len(batch), dist.get_world_size()))


def actor_on(model, layout, budget, ranks=None, dynamic_cp=False):
    """An actor on the given ranks, all by default."""
    return role_on(Actor, model, layout, budget, ranks, dynamic_cp=dynamic_cp)


def role_on(kind, model, layout, budget, ranks=None, dtype=torch.float32, dynamic_cp=False, **options):
    ranks = ranks or range(dist.get_world_size())
    return build_role(
        kind,
        model,
        ParallelGroups(Placement(Layout.parse(layout).fit(len(ranks)), tuple(ranks)), dynamic_cp=dynamic_cp),
        dtype=dtype,
        temperature=TEMPERATURE,
        tokens_per_micro_batch=budget,
        optimizer=OPTIMIZER,
        **options,
    )


def with_entropy(cfg, inputs):
    """Loss of the recipe with an entropy bonus, so that the gradient of the entropy is compared too."""
    loss, metrics = grpo.policy_loss(inputs, cfg)
    return loss - 0.01 * inputs.entropy, metrics


def oracle_update(model, mode, chunks=1):
    """Loss, gradient norm and weights after the same update in plain torch, without padding."""
    net = copy.deepcopy(oracle(model))
    step, batch = stepper(net), rows(model)
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
            per_token = policy + cfg.kl.coefficient * kl - 0.01 * h
            if mode == "token-mean":
                total = total + per_token.sum() / mini["loss_mask"].sum()
            elif mode == "seq-mean-token-mean":
                total = total + per_token.mean() / sequences
            else:
                total = total + per_token.sum() / (sequences * 16)
        norms.append(step(total))
        losses.append(total.item())
    return sum(losses) / chunks, sum(norms) / chunks, {n: p.detach() for n, p in net.named_parameters()}


def compare(metrics, folder, model, expected):
    loss, norm, weights = expected
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > OPTIMIZER.clip_grad > 0 and metrics["actor/clip_fraction_low"] > 0
    check_weights(AutoModelForCausalLM.from_pretrained(folder), weights, oracle(model).state_dict())


def check_weights(saved, weights, before):
    """The saved weights are the expected ones, each of which has moved from its value before."""
    after = saved.state_dict()
    for name, value in weights.items():
        moved = (value - before[name]).abs().max()
        assert moved > 0, f"{name} has no gradient"
        assert (after[name] - value).abs().max() < 1e-4 * moved + 1e-6, name


def stepper(net, config=OPTIMIZER):
    """Makes optimizer steps in plain torch: from the loss of one to the norm of its gradient."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.lr, eps=config.eps, betas=config.betas, weight_decay=0.0)

    def step(loss: Tensor) -> float:
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), config.clip_grad).item()
        optimizer.step()
        return norm

    return step


def classifier(model: Path) -> torch.nn.Module:
    """Model of `transformers` with the initial weights of a new value head."""
    net = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    hidden = net.config.hidden_size
    with torch.no_grad():
        fresh = torch.randn(1, hidden, generator=torch.Generator().manual_seed(1)) / (hidden + 1)
        net.score.weight.copy_(fresh)
    return net


def heads(net: torch.nn.Module, batch: Batch, row: int) -> Tensor:
    """Outputs of the value head for each token of a row, (length,)."""
    return net.score(net.model(batch.row("tokens", row)[None]).last_hidden_state)[0, :, 0]


def square_loss(tokens: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    return (tokens.values - tokens["returns"]) ** 2, {}


def noise_loss(tokens: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    return tokens["noise"] * tokens.logprobs, {}


def passes(model, layout, budget, batch, shares, kind=Actor, options=()):
    """Numbers and outputs of this rank's rows, then metrics, gradients, tokens and FLOPs of an update."""
    batch = (
        batch if shares else batch.select_columns(set(batch.names()) - {"prefix_of", "prefix_length", "prompt_length"})
    )
    own = list(range(dist.get_rank(), len(batch), dist.get_world_size()))
    role, mine = role_on(kind, model, layout, budget, **dict(options)), batch.select(own)
    outputs = role.forward(mine).split(mine.lengths.tolist())
    gradients, tokens = recorded_gradients(role.trainer), []
    throughput = Throughput([role.runner])
    role.runner.chunks[0].register_forward_pre_hook(lambda _, given: tokens.append(int(given[0].packed.lengths.sum())))
    metrics = role.update(mine, token_loss, "token-mean")
    flops = sum_over_ranks([throughput.take([mine])])["flops"]
    return own, outputs, metrics, gradients[0], sum(tokens), flops


def assert_same(shared, whole, tolerance=1e-5):
    """The rows' outputs, the metrics, and every gradient of the weights; adapters' are in the metric of its norm."""
    for (own, outputs, *_), (_, expected, *_) in zip(shared, whole, strict=True):
        for row, found, wanted in zip(own, outputs, expected, strict=True):
            assert torch.allclose(found, wanted, atol=tolerance, rtol=tolerance), row
    metrics, expected = shared[0][2], whole[0][2]
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=tolerance, abs=1e-9), name
    gradients, wanted = (assembled([part for result in results for part in result[3]]) for results in (shared, whole))
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (gradients[name] - gradient).abs().max()
        assert error <= tolerance * gradient.abs().max(), f"{name}: {error / gradient.abs().max():.1e}"
