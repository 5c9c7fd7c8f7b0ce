"""Updates by divergences from teachers, in several layouts on both backends, against `transformers` on whole logits."""

import copy

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.helpers.rank_pool import job_context
from tests.helpers.roles import build_role
from tests.helpers.tiny_models import oracle, tiny_model
from tests.roles.updates import COUNT, OPTIMIZER, TEMPERATURE, check_weights, own_rows, rows, stepper
from verl_mg.algorithms.divergence import Divergence
from verl_mg.batch import Batch
from verl_mg.errors import UserError
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.roles.models import Actor, Policy
from verl_mg.roles.role import Batching
from verl_mg.roles.teachers import Teachers
from verl_mg.training.logprobs import TeacherDivergence, TokenOutputs

STUDENT, TEACHERS = "qwen3", ("gemma2", "qwen2")
"""Gemma's logits are capped; Qwen2 is tied, and wider than it here."""
BETA, K = 0.3, 4
DIVERGENCES = [
    *(Divergence(kind=kind, beta=BETA) for kind in ("reverse", "forward", "js", "skew_forward", "skew_reverse")),
    Divergence(kind="reverse", top_k=K),
    Divergence(kind="forward", top_k=K, tail="renormalized"),
    Divergence(kind="js", beta=BETA, top_k=K),
]
SMALL_STEPS = OPTIMIZER.model_copy(update={"lr": 0.02})
LAYOUTS = [
    ("tp1", 1, "megatron"),
    ("tp2", 2, "megatron"),
    pytest.param("cp2", 2, "megatron", marks=pytest.mark.nightly),
    ("tp2", 2, "fsdp"),
    pytest.param("tp2-pp2", 4, "megatron", marks=pytest.mark.nightly),
    pytest.param("cp2-dp2", 4, "fsdp", marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    return {name: tiny_model(folder / name, name, layers=2 if name == STUDENT else 4) for name in (STUDENT, *TEACHERS)}


def teacher_number(prompt_id):
    return prompt_id % 3 // 2


def batch_of(model):
    batch = rows(model)
    batch["prompt_id"] = batch["sample_id"].clone()
    return batch


def loss(inputs):
    return inputs.divergence - 0.01 * inputs.entropy, {"divergence": inputs.divergence}


def updates(models, layout, backend, folder):
    """Metrics of one update by each divergence after another; saves the model."""
    placement = Placement.on(Layout.parse(layout), dist.get_world_size())
    context = job_context()
    groups = ParallelGroups(placement) if backend == "megatron" else MeshGroups(placement, 1)
    options = {"dtype": torch.float32, "temperature": TEMPERATURE, "tokens_per_micro_batch": 40}
    policies = {name: build_role(Policy, models[name], groups, context, name=name, **options) for name in TEACHERS}
    actor = build_role(Actor, models[STUDENT], groups, context, optimizer=SMALL_STEPS, **options)
    teachers = Teachers(policies, policies, actor, teacher_number, context)
    mine = own_rows(batch_of(models[STUDENT]))
    found = []
    for divergence in DIVERGENCES:
        batch = mine.select(range(len(mine)))
        with context.executor.concurrent():
            teachers.score(batch, divergence)
        found.append(dict(actor.update(batch, loss, "token-mean", teacher=teachers.comparison(divergence))))
    actor.save(folder, models[STUDENT])
    return found


@pytest.fixture(scope="module")
def expected(models):
    """Metrics of the same updates, and the weights after them: whole logits, in float64."""
    batch, found = batch_of(models[STUDENT]), []
    net = copy.deepcopy(oracle(models[STUDENT])).double()
    theirs = [copy.deepcopy(oracle(models[name])).double() for name in TEACHERS]
    step = stepper(net, SMALL_STEPS)
    for divergence in DIVERGENCES:
        per_token, entropies = [], []
        for row in range(COUNT):
            tokens, places = batch.row("tokens", row)[None], batch.row("loss_mask", row)[1:]
            teacher = theirs[teacher_number(int(batch["prompt_id"][row]))]
            log_q = (net(tokens).logits[0, :-1][places] / TEMPERATURE).log_softmax(-1)
            with torch.no_grad():
                log_p = (teacher(tokens).logits[0, :-1][places] / TEMPERATURE).log_softmax(-1)
            entropies.append(-(log_q.exp() * log_q).sum(-1))
            per_token.append(plain_divergence(divergence, log_p, log_q))
        value, entropy = torch.cat(per_token).mean(), torch.cat(entropies).mean()
        total = value - 0.01 * entropy
        found.append((value.item(), total.item(), step(total)))
    return found, {name: weight.detach() for name, weight in net.named_parameters()}


def plain_divergence(divergence, log_p, log_q):
    if divergence.top_k:
        chosen = log_p.topk(K).indices
        log_p, log_q = (side.gather(1, chosen) for side in (log_p, log_q))
        if divergence.tail == "bucket":
            rests = [(1 - side.exp().sum(-1, keepdim=True)).log() for side in (log_p, log_q)]
            log_p, log_q = (torch.cat([side, rest], 1) for side, rest in zip((log_p, log_q), rests, strict=True))
        log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    share = 1 - BETA if divergence.kind == "skew_reverse" else BETA
    log_m = (share * p + (1 - share) * q).log()
    return {
        "reverse": q * (log_q - log_p),
        "forward": p * (log_p - log_q),
        "js": BETA * p * (log_p - log_m) + (1 - BETA) * q * (log_q - log_m),
        "skew_forward": p * (log_p - log_m),
        "skew_reverse": q * (log_q - log_m),
    }[divergence.kind].sum(-1)


@pytest.mark.parametrize(("layout", "count", "backend"), LAYOUTS)
def test_updates_by_divergences_from_two_teachers_equal_whole_logits(
    ranks, models, expected, tmp_path, layout, count, backend
):
    results = ranks.run(count, updates, models, layout, backend, tmp_path / "saved")
    assert all(result == results[0] for result in results)
    of_updates, weights = expected
    for metrics, (value, total, norm) in zip(results[0], of_updates, strict=True):
        assert metrics["actor/divergence"] == pytest.approx(value, rel=1e-5) and value > 0.05
        assert metrics["actor/loss"] == pytest.approx(total, rel=1e-5)
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=3e-5) and norm > 0.01
    before = oracle(models[STUDENT]).state_dict()
    check_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), weights, before)


@pytest.mark.parametrize("layers", [None, []])
def test_update_by_a_divergence_in_a_batch_with_likeliest_tokens_of_the_engine_is_refused(layers):
    batch = Batch.from_rows([(5, 6)])
    batch["sampler_top"] = torch.zeros(2, 2, 3)
    outputs = TokenOutputs(teacher=TeacherDivergence(Divergence(), layers))
    assert Batching(1.0, 60).with_likeliest(outputs, batch) == outputs
    with pytest.raises(UserError, match=r"^algorithm\.off_policy\.score_centering: an update by the divergence"):
        Batching(1.0, 60, likeliest="sampler_top").with_likeliest(outputs, batch)
