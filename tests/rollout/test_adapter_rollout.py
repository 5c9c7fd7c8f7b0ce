"""GRPO of adapters over Megatron and real engines that receive A and B alone."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from tests.helpers.engines import SGLANG, VLLM
from tests.rollout.engine_jobs import checked_answers, checked_steps, engine_job, inputs, trained_once

ITEMSIZE = 4
UPDATES = 2
ROW_PARALLEL = ("o_proj", "down_proj")


def train(folder: Path, overrides: list[str], engine: str, kills: bool = False) -> list[dict[str, object]]:
    """Iterations, after each a checkpoint and the engine's greedy answers; `kills` the first engine once."""
    job, recipe = engine_job(folder, "rollout.adapters=true", "actor.optimizer.lr=3e-2", *overrides, engine=engine)
    first = (job.rollout.metrics["weight_sync/bytes_received"], job.rollout.metrics["weight_sync/bytes_lower_bound"])
    reported = [{"first": first}]
    for update in range(UPDATES + kills):
        if kills and update == 1 and dist.get_rank() == 0:
            os.killpg(job.rollout._engines.engine.pid, signal.SIGKILL)
        reported.append(trained_once(job, recipe, folder, f"update-{update}"))
    return reported


def missing_bytes(adapters: Path, layout: str) -> int:
    """Bytes of A and B that the leaders of engines do not have.

    A rank without the actor has nothing of them, one of two tensor-parallel ranks not half of each factor that is cut.
    """
    tensors = load_file(adapters)
    cut = [name for name in tensors if (".lora_A." in name) == (name.split(".")[-3] in ROW_PARALLEL)]
    halves = sum(tensors[name].numel() * ITEMSIZE // 2 for name in cut)
    whole = sum(values.numel() * ITEMSIZE for values in tensors.values())
    return {"apart": whole, "tp1": 2 * halves}.get(layout, halves)


def case(engine, *values: object, nightly: bool = True):
    marks = [*engine.marks, *([pytest.mark.nightly] if nightly else [])]
    return pytest.param(*engine.values, *values, marks=marks)


@pytest.mark.parametrize(("engine", "architecture", "layout", "targets"), [
    case(SGLANG, "qwen3", "apart", None, nightly=False),
    case(SGLANG, "qwen3", "tp1", None),
    case(SGLANG, "qwen3", "tp2", None),
    case(SGLANG, "llama", "tp2", ["q_proj", "up_proj", "down_proj"]),
    case(SGLANG, "qwen3", "pp2", None),
    case(SGLANG, "qwen3_moe", "tp2", None),
    case(VLLM, "qwen3", "tp1", None),
    case(VLLM, "llama", "tp2", ["q_proj", "up_proj", "down_proj"]),
    case(VLLM, "gemma2", "tp2", None),
    case(VLLM, "qwen3", "pp2", None),
])  # fmt: skip
def test_engine_with_adapters_alone_serves_the_merged_checkpoint(
    ranks, tmp_path, engine, architecture, layout, targets
):
    folder = inputs(tmp_path, architecture, tie_embeddings=architecture == "gemma2")
    lora = json.dumps({"rank": 4, "alpha": 8, "targets": targets})
    placed = ["actor.layout=tp2", f"rollout.layout={layout}"] if layout != "apart" else ["rollout.num_ranks=1"]
    arguments = [f"actor.lora={lora}", *placed]
    results = ranks.run(2, train, folder, arguments, engine)
    first, bytes_received = results[0][0], []
    for step, reported in enumerate(checked_steps(folder, [reports[1:] for reports in results])):
        assert {v for rank in reported for v in rank["versions"]} == {step}
        received, bound = reported[0]["sync"]
        assert received == bound
        bytes_received.append(received)
    adapters = missing_bytes(folder / f"update-{UPDATES - 1}" / "adapter" / "adapter_model.safetensors", layout)
    assert bytes_received == [adapters] * UPDATES
    assert first["first"][0] == first["first"][1] > adapters  # the weights too, once


@pytest.mark.parametrize("engine", [SGLANG, VLLM])
@pytest.mark.nightly
def test_restarted_engine_receives_weights_and_adapters(ranks, tmp_path, engine):
    folder = inputs(tmp_path, "qwen3")
    arguments = ["actor.lora={rank: 4, alpha: 8}", "actor.layout=tp2", "rollout.layout=tp1"]
    _, *reports = zip(*ranks.run(2, train, folder, arguments, engine, True), strict=True)
    for step, reported in enumerate(reports):
        assert len(checked_answers(folder, reported)) == 5
        assert {v for rank in reported for v in rank["versions"]} == {step}
