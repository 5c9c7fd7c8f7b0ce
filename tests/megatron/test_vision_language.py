"""The language model of vision-language models on the Megatron backend: Qwen3.5 as it is published."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.helpers.json_lines import write_lines
from tests.helpers.qwen3_5_directories import published, tensors_of
from tests.helpers.rank_pool import RankError
from tests.helpers.roles import build_role
from tests.helpers.tiny_jobs import DIGITS, write_sums
from tests.helpers.tiny_models import nightly, noise_image, oracle_outputs, random_rows, rows_of_rank
from tests.megatron.training import token_loss
from tests.rollout.engine_jobs import engine_job, trained_once
from verl_mg.config import LoraConfig, OptimizerConfig
from verl_mg.models.hf_config import read_config
from verl_mg.roles.models import Actor

VISION = "model.visual."


def trained(model: Path, layout: str, folder: Path, lora: LoraConfig | None) -> list[torch.Tensor]:
    """Saves an actor before and after an update; log-probs of this rank's rows at both times."""
    actor = build_role(Actor, model, layout, optimizer=OptimizerConfig(lr=0.02), lora=lora)
    batch = rows_of_rank(rows(model))
    found = []
    for name in ("before", "after"):
        actor.save(folder / name, model)
        found.append(actor.compute_logprobs(batch))
        if name == "before":
            metrics = actor.update(batch, token_loss, "token-mean")
            assert metrics["actor/grad_norm"] > 0
    return found


def rows(model: Path):
    return random_rows(8, read_config(model).vocab - 4)  # without the tokens of images


CASES = [
    ("qwen3_5_moe", "tp2-pp2-ep2-etp1", {}, None),
    *nightly(("qwen3_5_moe", "tp2-cp2-ep2", {}, LoraConfig(rank=2, alpha=4)), ("qwen3_5", "pp2", {}, None)),
    *nightly(("qwen3_5", "tp2-pp2", {"tie_embeddings": True}, None)),
]


@pytest.mark.parametrize(("architecture", "layout", "options", "lora"), CASES)
def test_training_equals_transformers_and_exports_every_tensor(ranks, tmp_path, architecture, layout, options, lora):
    model = published(tmp_path / "model", architecture, **options)
    results = ranks.run(4, trained, model, layout, tmp_path, lora)
    given, before, after = (tensors_of(tmp_path / name) for name in ("model", "before", "after"))
    assert given.keys() == before.keys() == after.keys()
    for name, tensor in given.items():
        assert torch.equal(before[name], tensor) and before[name].dtype == tensor.dtype, name
        is_trained = not name.startswith((VISION, "mtp.")) and (lora is None or name.endswith(".q_proj.weight"))
        if is_trained or lora is None or name.startswith((VISION, "mtp.")):
            assert is_trained != torch.equal(after[name], tensor), name
    batch = rows(model)
    for number, name in enumerate(("before", "after")):
        for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
            net = kind.from_pretrained(tmp_path / name, dtype=torch.float32, attn_implementation="eager")
            assert not [n for n, p in net.named_parameters() if p.isnan().any()]
            with torch.no_grad():
                logprobs, _ = oracle_outputs(net, batch, 1.0)
            expected = (logprobs * batch["loss_mask"]).split(batch.lengths.tolist())
            for rank, found in enumerate(results):
                own = torch.cat([expected[row] for row in range(rank, len(batch), 4)])
                assert own.any()
                torch.testing.assert_close(found[number], own, atol=2e-5, rtol=0)


def grpo(folder: Path) -> list[dict[str, object]]:
    """Two iterations with the engine in the process of the rank; the answers of its module after each."""
    job, recipe = engine_job(folder, "actor.layout=tp2", "job.console=false", engine="hf")
    return [trained_once(job, recipe, folder, f"update-{number}") for number in range(2)]


def inputs(folder: Path, architecture: str) -> Path:
    published(folder / "model", architecture)
    write_sums(folder)
    (folder / "reward.py").write_text(DIGITS)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_5_moe"])
def test_engine_of_a_vision_language_model_serves_the_exported_checkpoint(ranks, tmp_path, architecture):
    results, before = ranks.run(2, grpo, inputs(tmp_path, architecture)), None
    for reported in zip(*results, strict=True):
        assert reported[0]["grad_norm"] > 0 and all(rank["mismatch"] < 1e-4 for rank in reported)
        net = AutoModelForCausalLM.from_pretrained(tmp_path / reported[0]["checkpoint"], dtype=torch.float32)
        answers = [answer for rank in reported for answer in zip(rank["rows"], rank["logprobs"], strict=True)]
        for row, logprobs in answers:
            with torch.no_grad():
                scores = net(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
            expected = scores.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
            of_answer = torch.tensor(logprobs[1:]) != 0
            assert of_answer.sum() > 1
            torch.testing.assert_close(torch.tensor(logprobs[1:])[of_answer], expected[of_answer], atol=1e-4, rtol=0)
        assert len(answers) == 5 and answers != before
        before = answers


def test_prompts_with_images_are_refused_in_one_line(ranks, tmp_path):
    folder = inputs(tmp_path, "qwen3_5")
    (folder / "image.png").write_bytes(noise_image(28, 28, seed=0).data)
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+1="}]}]
    write_lines(folder / "sums.jsonl", [{"prompt": prompt, "answer": "2", "images": ["image.png"]}])
    with pytest.raises(RankError, match=r"sums\.jsonl:1: the prompt has images.* use actor\.backend=fsdp "):
        ranks.run(2, grpo, folder)
