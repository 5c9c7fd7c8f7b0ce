"""A real SGLang engine on the device: weights that are brought to it, and its memory while it sleeps."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gpu.served_jobs import served_model
from tests.helpers.engines import bring_weights, requests
from tests.helpers.machine import free_memory
from verl_mg import device
from verl_mg.engines.engine import Sample, Sampling
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.kinds import SGLANG
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.layout import EngineLayout

START_S = 400
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
SHARE = 0.3  # share of the device's memory for weights and key-value cache


@dataclass
class Served:
    """Results on the rank.

    answers: of the first model, of the second one, and of the second one after the engine has slept; free: bytes of the
    device that nobody has while the engine is awake and asleep, and in all; 0 on the CPU.
    """

    answers: list[list[Sample]]
    free: list[int]


def served(models: list[Path], folder: Path) -> Served:
    """Two updates; then the engine sleeps, training takes the memory and returns it, and the engine wakes."""
    on_gpu = device.current_device().type == "cuda"
    settings = EngineOptions(
        layout=EngineLayout(),
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        max_running=16,
        max_positions=128,
        memory_fraction=SHARE,
        first_gpu=device.current_device().index or 0,
    )
    with closing(ProcessEngine(SGLANG, models[0], settings, folder / "0.log")) as engine:
        answers = []
        for version, model in enumerate(models, start=1):
            bring_weights(engine, model, version)
            answers.append(engine.generate(requests(), GREEDY))
        free = [free_memory()]
        engine.sleep()
        free += [free_memory(), device.total_memory() or 0]
        if on_gpu:
            torch.empty(int(0.9 * free[1]), dtype=torch.uint8, device="cuda").fill_(1)
            device.release_unused_memory()
        engine.wake(weights=True, kv=False)
        bring_weights(engine, models[-1], len(models) + 1)
        engine.wake(weights=False, kv=True)
        answers.append(engine.generate(requests(), GREEDY))
        return Served(answers, free)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [served_model(folder / str(seed), seed) for seed in range(2)]


@pytest.mark.needs(sglang=True)
@pytest.mark.timeout(START_S)
def test_engine_serves_the_last_weights_and_sleeps_without_memory(ranks, machine, tmp_path, models):
    (found,) = ranks.run(1, served, models, tmp_path)
    for model, samples in zip([*models, models[-1]], found.answers, strict=True):
        assert_from(model, samples, half=bool(machine.gpus))
    assert [sample.tokens for sample in found.answers[0]] != [sample.tokens for sample in found.answers[1]]
    assert [sample.tokens for sample in found.answers[1]] == [sample.tokens for sample in found.answers[2]]
    if machine.gpus:
        awake, asleep, total = found.free
        assert asleep - awake > 0.8 * SHARE * total


def assert_from(model: Path, samples: list[Sample], half: bool) -> None:
    """Log-probs are those of `transformers` with float32 weights, and so are greedy answers in float32."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    errors = []
    for request, sample in zip(requests(), samples, strict=True):
        scores = whole(torch.tensor([[*request.prompt, *sample.tokens]])).logits[0].log_softmax(-1)
        scores = scores[len(request.prompt) - 1 : -1]
        own = scores.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        errors.append((torch.tensor(sample.logprobs) - own).abs())
        assert half or sample.tokens == tuple(scores.argmax(-1).tolist())
    error = torch.cat(errors)
    assert error.mean() < (0.05 if half else 1e-4) and error.max() < (0.5 if half else 1e-3)
