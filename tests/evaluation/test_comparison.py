"""Comparison of two evaluations whose figures are known."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from verl_mg.config import RecipeConfig, validate_config
from verl_mg.data import Prompt
from verl_mg.errors import UserError
from verl_mg.evaluation.comparison import compare, format_comparison
from verl_mg.evaluation.results import StoredEvaluation, format_report, report_of, write_results
from verl_mg.job.evaluation import SetResults, evaluation_sets
from verl_mg.job.prompt_scores import PromptResults

stats = pytest.importorskip("scipy.stats")


def stored(
    folder: Path,
    rewards: list[list[float]],
    name: str = "sums",
    first: int = 0,
    parts: Mapping[str, list[list[float | None]]] = MappingProxyType({}),
    **section: object,
) -> Path:
    folder.mkdir()
    tree = {
        "model": {"path": "x"},
        "data": {"train": "x", "test": {name: {"path": "x", "samples": len(rewards[0]), "temperature": 1, **section}}},
    }
    config = validate_config(tree, "test", RecipeConfig)
    prompts = [Prompt(i, (1,), "p", None, {"prompt": f"{first + i}+1="}, name) for i in range(len(rewards))]
    of_prompts = [{part: rows[i] for part, rows in parts.items() if rows[i]} for i in range(len(rewards))]
    results = [PromptResults(i, row, [None] * len(row), of_prompts[i]) for i, row in enumerate(rewards)]
    of_set = SetResults(evaluation_sets(config)[0], prompts, results)
    report = report_of(str(folder), None, config, [of_set])
    write_results(folder, report, [of_set])
    return folder


def test_compare_pairs_the_prompts(tmp_path):
    before = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    after = [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    found = compare(stored(tmp_path / "a", before), stored(tmp_path / "b", after, max_new_tokens=9))
    assert set(found.sets["sums"]) == {"reward", "pass@1", "pass@2", "avg@2"}
    reward = found.sets["sums"]["reward"]
    differences = [0.5, 0.5, 0.0, 0.5, 0.0]
    assert (reward.first, reward.second, reward.difference) == pytest.approx((0.4, 0.7, 0.3))
    error = stats.sem(differences)
    assert (reward.low, reward.high) == pytest.approx(stats.t.interval(0.95, 4, 0.3, error))
    assert reward.p_value == pytest.approx(2 / 8), "of the 8 assignments of signs two are as far from 0"
    assert found.sets["sums"]["pass@2"].difference == pytest.approx(2 / 5)
    text = format_comparison(found)
    assert "+0.3000" in text and "sums.sampling" in text and "'max_new_tokens': 9" in text


def test_compare_takes_the_prompts_that_have_a_part_in_both(tmp_path):
    first, second = ({"form": rows} for rows in ([[1.0, 0.0], [None, 2.0], []], [[1.0, 1.0], [], [5.0, None]]))
    rewards = [[1.0, 0.0]] * 3
    found = compare(stored(tmp_path / "a", rewards, parts=first), stored(tmp_path / "b", rewards, parts=second))
    form = found.sets["sums"]["reward/form"]
    assert (form.first, form.second, form.difference) == (0.5, 1.0, 0.5)
    assert "sums reward/form: 3 and 3 samples, 1 prompts in both" in format_comparison(found)
    assert found.sets["sums"]["reward"].difference == 0 and found.samples_with["sums"]["form"].prompts == 1


def test_compare_refuses_other_prompts_and_other_sets(tmp_path):
    a = stored(tmp_path / "a", [[1.0], [0.0]])
    with pytest.raises(UserError, match=r"set sums: .*a has 2 prompts, .*b has 3, and 2 are of the same records"):
        compare(a, stored(tmp_path / "b", [[1.0], [0.0], [0.0]]))
    with pytest.raises(UserError, match=r"0 are of the same records"):
        compare(a, stored(tmp_path / "c", [[1.0], [0.0]], first=5))
    with pytest.raises(UserError, match=r"its sets are other, .* has sums"):
        compare(a, stored(tmp_path / "d", [[1.0], [0.0]], "other"))
    (tmp_path / "a" / "prompts.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"prompts.jsonl:1: set: .* Evaluate again"):
        compare(a, a)


def test_format_report_has_an_interval_only_with_several_prompts(tmp_path):
    one, many = (stored(tmp_path / str(n), [[1.0, 0.0]] * n) for n in (1, 3))
    texts = [format_report(StoredEvaluation(folder).report) for folder in (one, many)]
    assert texts[0].splitlines()[1].split() == ["sums", "reward", "0.5000", "-", "1", "2"]
    assert texts[1].splitlines()[1].split() == ["sums", "reward", "0.5000", "0.5000", "..", "0.5000", "3", "2"]
