"""Turns with tools on real engines: what one saw and wrote is what is trained on, and tools are not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.engines import SGLANG, VLLM_NIGHTLY, process_of
from tests.rollout.engine_jobs import engine_job
from verl_mg.agents.tool_calls import ToolCall
from verl_mg.engines.request_batch import RequestBatch
from verl_mg.recipes.tasks.calculator import make

TURNS = 3
EXPRESSION = json.dumps({"expression": "20+22"})


def iteration(folder: Path, engine_name: str) -> dict[str, object]:
    """A GRPO iteration of a random model. Its turns end soon, and each is taken for a call of the calculator."""
    job, recipe = engine_job(
        folder,
        "actor.layout=tp2",
        "rollout.layout=tp2",
        "rollout.tools=[verl_mg.agents.tools.builtin:calculator]",
        f"rollout.max_turns={TURNS}",
        "rollout.max_new_tokens=40",
        f"data.train={folder / 'data' / 'train.jsonl'}",
        f"reward.function={folder / 'reward.py'}:length",
        engine=engine_name,
    )
    select_outputs: list[tuple[str, list[int], list[int]]] = []
    rollout = job.rollout
    rollout._sampling = replace(rollout._sampling, stop_token_ids=tuple(range(10, 40)))
    conversations = rollout._engines.engine
    if conversations is not None:
        conversations._format.calls = lambda tokens, before: [ToolCall("call00000", "calculator", EXPRESSION)]
        engine = conversations._engine
        requested: dict[str, list[int]] = {}
        generate, answered = engine._generate, engine._complete

        def see(batch: RequestBatch) -> None:
            requested.update({rid: list(fields["tokens"]) for rid, fields in batch.requests().items()})
            generate(batch)

        def completed(rid: str, answer: dict[str, list[int]]) -> None:
            select_outputs.append((rid, requested[rid], list(answer["tokens"])))
            answered(rid, answer)

        engine._generate, engine._complete = see, completed
    recipe.iteration(job, job.config.algorithm)
    (batch,) = rollout.train_batches
    scored: list[torch.Tensor] = []

    def loss(tokens):
        scored.append(torch.stack([tokens["policy_versions"], tokens["sample_id"], tokens["tokens"]]).clone())
        return -tokens["advantages"] * tokens.logprobs, {}

    job.actor.update(batch, loss, "token-mean")
    process = process_of(engine) if conversations is not None else None
    rollout.close()
    return {
        "closed": process is None or not process.is_running(),
        "outputs": select_outputs,
        "rows": {
            int(batch["sample_id"][i]): {
                name: batch.row(name, i).tolist()
                for name in ("tokens", "loss_mask", "policy_versions", "advantages", "rollout_logprobs", "old_logprobs")
            }
            | {"prompt_length": int(batch["prompt_length"][i])}
            for i in range(len(batch))
        },
        "scored": torch.cat(scored, dim=1).tolist() if dist.get_rank() == 0 else [],
    }


@pytest.mark.parametrize("engine", [SGLANG, VLLM_NIGHTLY])
def test_training_receives_the_tokens_that_the_engine_used(ranks, tmp_path, engine):
    make(tmp_path)
    (tmp_path / "reward.py").write_text("def length(sample): return len(sample.response)\n")
    results = ranks.run(2, iteration, tmp_path, engine)
    rows = {i: row for result in results for i, row in result["rows"].items()}
    select_outputs = results[0]["outputs"]
    assert sorted(rows) == list(range(24))
    assert all(result["closed"] for result in results)
    turns: dict[int, list[tuple[list[int], list[int]]]] = {i: [] for i in rows}
    for rid, context, written in select_outputs:
        turns[int(rid.split(".")[0])].append((context, written))
    assert max(map(len, turns.values())) == TURNS
    scored = set()
    for i, row in rows.items():
        tokens, mask = row["tokens"], row["loss_mask"]
        expected = [False] * len(tokens)
        for context, written in turns[i]:
            assert tokens[: len(context)] == context
            assert tokens[len(context) : len(context) + len(written)] == written
            expected[len(context) : len(context) + len(written)] = [True] * len(written)
        assert mask == expected
        observed = [t for t in range(row["prompt_length"], len(tokens)) if not mask[t]]
        assert len(turns[i]) == 1 or observed
        for t, own in enumerate(mask):
            if own:
                assert row["policy_versions"][t] == 0
                assert abs(row["rollout_logprobs"][t] - row["old_logprobs"][t]) < 1e-4
                scored.add((i, tokens[t]))
            else:
                assert (row["policy_versions"][t], row["advantages"][t], row["rollout_logprobs"][t]) == (-1, 0, 0)
    assert any(any(row["advantages"]) for row in rows.values())
    versions, ids, tokens = results[0]["scored"]
    assert set(versions) == {0}
    assert set(zip(ids, tokens, strict=True)) == scored
    assert len(versions) == sum(sum(row["loss_mask"]) for row in rows.values())
