"""What a run writes down of its samples: all that its recipe was handed, and what the recipe made of it."""

import math
import os
from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from transformers import AutoTokenizer

from tests.helpers.tiny_jobs import write_sums
from tests.helpers.tiny_models import tiny_model
from tests.run.jobs import job, lines_of, samples_of
from verl_mg.batch import Batch, ColumnKind
from verl_mg.config import DataConfig
from verl_mg.data import PromptFeed, read_prompts
from verl_mg.images import Image
from verl_mg.monitor.run_logger import sample_table
from verl_mg.monitor.sample_reader import SampleReader
from verl_mg.monitor.sample_schema import FileMetadata, fingerprint
from verl_mg.monitor.sample_writer import ROWS_PER_TABLE, SampleWriter, other_columns
from verl_mg.roles.reward import SampleTexts
from verl_mg.rows.samples import GeneratedRows, RolloutRecord

SCHEMA = {
    **dict.fromkeys(("iteration", "trajectory", "sample_id", "group", "prompt_id", "policy_version"), "int64"),
    **dict.fromkeys(("call", "prompt_length"), "int32"),
    **dict.fromkeys(("prompt", "response", "answer", "source", "finish", "conversation"), "string"),
    "reward": "float",
    "parts": "map<string, float ('parts')>",
    "truncated": "bool",
    "tokens": "list<element: int32>",
    "pieces": "list<element: string>",
    "loss_mask": "list<element: bool>",
    "policy_versions": "list<element: int64>",
    "turns": "list<element: struct<by: string, start: int32, end: int32>>",
    **dict.fromkeys(("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages"), "list<element: float>"),
    "answer_key": "int64",
}
KL = ["algorithm.kl.coefficient=0.01"]


def test_sample_file_row_has_texts_tokens_turns_and_scores(ranks, inputs, tmp_path):
    ranks.run(2, job, "grpo", inputs, tmp_path / "run", KL)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    file = tmp_path / "run" / "samples" / "000002" / "rank-1.parquet"
    assert {field.name: str(field.type) for field in parquet.read_schema(file)} == SCHEMA
    rows = samples_of(tmp_path / "run", 2)
    assert [row["sample_id"] for row in rows] == list(range(10, 20))
    assert {row["iteration"] for row in rows} == {2} and {row["call"] for row in rows} == {0}
    for row in rows:
        prompt, response = row["tokens"][: row["prompt_length"]], row["tokens"][row["prompt_length"] :]
        assert tokenizer.decode(prompt) == row["prompt"] == "".join(row["pieces"][: len(prompt)])
        written = response[:-1] if response[-1] == tokenizer.eos_token_id else response
        assert tokenizer.decode(written) == row["response"]
        a, b = row["prompt"].rstrip("=").split("+")
        assert row["answer"] == str(int(a) + int(b)) and row["source"] == ""
        assert row["truncated"] == (row["finish"] == "length")
        digits = sum(c.isdigit() for c in row["response"])
        assert row["reward"] == digits and dict(row["parts"]) == ({"odd": 0.5} if digits % 2 else {})
        assert row["loss_mask"] == [False] * len(prompt) + [True] * len(response)
        assert row["turns"] == [{"by": "policy", "start": len(prompt), "end": len(row["tokens"])}]
        assert row["policy_versions"] == [-1] * len(prompt) + [1] * len(response) and row["policy_version"] == 1
        assert row["old_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-4)
        assert row["old_logprobs"] != row["ref_logprobs"]
    mean = sum(row["reward"] for row in rows) / len(rows)
    assert mean == pytest.approx(lines_of(tmp_path / "run")[2]["reward/mean"])


def test_sample_file_contains_all_batches_without_evaluations(ranks, inputs, tmp_path):
    evaluation = [f"data.test={inputs / 'sums.jsonl'}", "evaluation.every=1", "evaluation.prompts=3"]
    ranks.run(2, job, "remax", inputs, tmp_path / "run", evaluation)
    for iteration in (1, 2, 3):
        rows = samples_of(tmp_path / "run", iteration)
        drawn, greedy = ([row for row in rows if row["call"] == call] for call in (0, 1))
        assert len(drawn) == 10 and len(greedy) == 5 and len(rows) == 15
        assert {row["prompt_id"] for row in drawn} == {row["prompt_id"] for row in greedy}
        assert all(row["advantages"] for row in drawn) and all(row["advantages"] is None for row in greedy)


def test_sample_file_has_columns_of_selected_rows(ranks, inputs, tmp_path):
    ranks.run(
        3, job, "dapo", inputs, tmp_path / "run", ["algorithm.max_sampling_rounds=3", "algorithm.overlong_buffer=2"]
    )
    rows = samples_of(tmp_path / "run", 1)
    assert {row["call"] for row in rows} > {0}
    scores: dict[int, list[float]] = {}
    for row in rows:
        scores.setdefault(row["group"], []).append(row["reward"])
    informative = sorted(group for group, values in scores.items() if len(set(values)) > 1)
    chosen = {row["group"] for row in rows if row["advantages"] is not None}
    assert chosen == set(informative[:5]) and 0 < len(chosen) < len(scores)
    for row in rows:
        if row["group"] in chosen:
            assert row["old_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-4)
            assert len(row["advantages"]) == len(row["tokens"])


def test_sample_writer_limit_and_files_of_further_ranks(ranks, inputs, tmp_path):
    stale = tmp_path / "some" / "samples" / "000001" / "rank-7.parquet"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"")
    part = stale.with_name(".123.rank-1.parquet")  # of a process that was killed
    part.write_bytes(b"PAR1")
    ranks.run(2, job, "remax", inputs, tmp_path / "some", ["record.samples_per_rank=7"])
    # The first rank has four rows and two greedy ones, the second six and three.
    assert [row["call"] for row in samples_of(tmp_path / "some", 1)] == [0] * 4 + [1] * 2 + [0] * 6 + [1]
    assert not stale.exists() and not part.exists()
    ranks.run(2, job, "grpo", inputs, tmp_path / "none", ["record.samples_per_rank=0"])
    assert not (tmp_path / "none" / "samples").exists()


def warned(inputs: Path, output: Path) -> list[str]:
    """The warnings of a run whose folder of samples is a file."""
    with pytest.MonkeyPatch.context() as patch:
        reported: list[str] = []
        patch.setattr("verl_mg.monitor.sample_writer.log.warning", lambda text, *values: reported.append(text % values))
        job("grpo", inputs, output, [])
    return reported


def test_sample_writer_on_a_failing_disk_warns_once(ranks, inputs, tmp_path):
    (tmp_path / "samples").write_text("")
    for reported in ranks.run(2, warned, inputs, tmp_path):
        assert len(reported) == 1 and "rank-" in reported[0] and "the run continues" in reported[0]
    assert list(lines_of(tmp_path)) == [1, 2, 3] and not list(tmp_path.rglob(".*"))


def with_tools(inputs: Path, folder: Path) -> None:
    """Rows of several tables: two tokens of prompt, two of the policy, one of a tool, and again two of the policy."""
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    prompts = read_prompts(DataConfig(train={"sums": {"path": inputs / "sums.jsonl"}}), "train", tokenizer)
    count, mask = 2 * ROWS_PER_TABLE + 3, [False, False, True, True, False, True, True]
    batch = Batch.from_rows([[3, 4, 5, 6, 7, 8, 9 + i % 3] for i in range(count)])
    batch["loss_mask"] = torch.tensor(mask * count)
    for name in ("group", "trajectory", "sample_id", "prompt_id", "policy_version"):
        batch[name] = torch.arange(count) % (40 if name == "prompt_id" else count)
    batch["prompt_length"], batch["truncated"] = torch.full((count,), 2), torch.arange(count) % 2 == 0
    batch["policy_versions"] = torch.where(batch["loss_mask"], 4, -1)
    batch["rollout_logprobs"] = torch.randn(batch.total_tokens)
    batch["routed_experts"] = torch.randint(-1, 60, (batch.total_tokens, 3, 2), dtype=torch.int16)
    batch["support_sizes"] = torch.randint(0, 3, (batch.total_tokens,), dtype=torch.int32)
    batch["support_ids"] = torch.randint(0, 99, (int(batch["support_sizes"].sum()),), dtype=torch.int32)
    batch["reward"] = torch.randn(count)
    batch["reward.form"] = torch.where(torch.arange(count) % 3 == 0, torch.nan, torch.randn(count))
    batch["answer"] = torch.randint(0, 2**62, (count,))
    batch.put("scores", torch.randn(count, 2), ColumnKind.SEQUENCE)
    small, large = Image(b"s"), Image(b"l" * 100)
    batch.images = [(small, large) if i % 5 == 0 else (large,) if i % 2 else () for i in range(count)]
    texts = SampleTexts(PromptFeed(prompts), tokenizer, ())
    writer = SampleWriter(folder / "samples", 0, FileMetadata("own", "m", 1), texts)
    writer.write(1, [RolloutRecord.of(GeneratedRows(rows)) for rows in (batch, batch.select([]))], [])
    back, empty = (rows.batch for rows in SampleReader(folder).batches(1))
    assert back.names() == batch.names() == empty.names() and len(empty) == 0
    assert back.images == batch.images and len({id(image) for row in back.images for image in row}) == 2
    assert sorted(file.name for file in (folder / "samples" / "images").iterdir()) == sorted([small.key, large.key])
    for name in batch.names():
        assert back.kind(name) == batch.kind(name) and back[name].dtype == batch[name].dtype
        assert torch.equal(back[name].nan_to_num(), batch[name].nan_to_num()), name


def test_sample_reader_returns_bitwise_identical_rows(ranks, inputs, tmp_path):
    ranks.run(1, with_tools, inputs, tmp_path)
    rows = samples_of(tmp_path, 1)
    assert len(rows) == 2 * ROWS_PER_TABLE + 3
    for row in rows:
        assert [(turn["by"], turn["start"], turn["end"]) for turn in row["turns"]] == [
            ("policy", 2, 4),
            ("tool", 4, 5),
            ("policy", 5, 7),
        ]
        assert row["source"] == "sums" and len(row["routed_experts"]) == 7 * 3 * 2
        assert [name for name, _ in row["parts"]] == ([] if row["sample_id"] % 3 == 0 else ["form"])


def test_other_columns_contain_changed_columns_as_received():
    batch = Batch.from_rows([[1, 2, 3], [4, 5]])
    batch["reward"], batch["loss_mask"] = torch.tensor([1.0, 2.0]), torch.tensor([False, True, True, False, True])
    batch["sample_id"] = torch.tensor([0, 1])
    handed = RolloutRecord.of(GeneratedRows(batch))
    batch["reward"] += 1
    batch["loss_mask"] = batch["loss_mask"] & False
    batch["sample_id"] = batch["sample_id"].clone()
    changed = other_columns(handed, [batch])
    assert changed.keys() == {"received.reward", "received.loss_mask"}
    assert changed["received.reward"].values.tolist() == [1, 2]


def test_other_columns_match_rows_with_new_ids_by_tokens():
    batch = Batch.from_rows([[1, 2, 3], [4, 5], [6]])
    batch["sample_id"], batch["prompt_id"] = torch.tensor([7, 8, 9]), torch.tensor([0, 1, 2])
    handed = RolloutRecord.of(GeneratedRows(batch))
    one = batch.select([2, 0])
    one["advantages"], one["weight"] = torch.tensor([6.0, 1, 2, 3]), torch.tensor([60, 10])
    two = batch.select([1])
    two["sample_id"] = torch.tensor([9])
    two["advantages"] = torch.tensor([4.0, 5])
    columns = other_columns(handed, [one, two])
    assert columns["advantages"].values.tolist() == [1, 2, 3, 0, 0, 6]
    assert columns["weight"].values.tolist() == [10, 0, 60]
    assert all(columns[name].present.tolist() == [True, False, True] for name in ("advantages", "weight"))


def test_fingerprint_depends_on_the_model_not_on_its_path(inputs, tmp_path):
    copied, changed = tmp_path / "copied", tmp_path / "changed"
    for folder in (copied, changed):
        folder.mkdir()
        for file in (inputs / "model").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    weights = next(changed.glob("*.safetensors"))
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert fingerprint(copied) == fingerprint(inputs / "model") != fingerprint(changed)


def test_sample_table_shows_samples_equally_far_apart(tmp_path):
    tiny_model(tmp_path / "model", "qwen3")
    write_sums(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    data = DataConfig(train={"sums": {"path": tmp_path / "sums.jsonl"}})
    prompts = PromptFeed(read_prompts(data, "train", tokenizer))
    count = 8
    responses = tokenizer([str(i) for i in range(count)])["input_ids"]
    contexts = [list(prompts.by_id(i // 2).tokens) for i in range(count)]  # two samples of each prompt
    batch = Batch.from_rows([context + response for context, response in zip(contexts, responses, strict=True)])
    for name in ("group", "trajectory", "sample_id"):
        batch[name] = torch.arange(count)
    batch["prompt_id"] = torch.arange(count) // 2
    batch["prompt_length"] = torch.tensor([len(context) for context in contexts])
    batch["truncated"] = torch.zeros(count, dtype=torch.bool)
    batch["reward"] = torch.arange(count) / 4
    batch["reward.form"] = torch.where(torch.arange(count) % 4 == 0, math.nan, 0.5)
    texts = SampleTexts(prompts, tokenizer, ())
    table = sample_table([batch], 4, 7, texts)
    assert table.columns == ("iteration", "prompt", "response", "answer", "reward", "form")
    assert table.rows == [
        [7.0, "0+0=", "0", "0", 0.0, None],
        [7.0, "0+1=", "2", "1", 0.5, 0.5],
        [7.0, "0+2=", "4", "2", 1.0, None],
        [7.0, "0+3=", "6", "3", 1.5, 0.5],
    ]
    whole = sample_table([batch], 100, 7, texts)
    assert whole is not None and [row[2] for row in whole.rows] == [str(i) for i in range(count)]
    assert sample_table([batch.select([])], 4, 7, texts) is None
