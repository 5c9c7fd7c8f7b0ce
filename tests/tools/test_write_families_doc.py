"""The sweep over the families of `transformers`: what it measures, and the form of its document."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.helpers.tiny_models import nightly
from tools.docs.family_checks import compare_rows, make_model
from tools.docs.write_families_doc import DOCUMENT, Line, markdown, sweep
from verl_mg.errors import UserError

OUTCOMES = {"works", "packed", "unpacked", "refused", "-"}
"""What a cell of the document says: nothing crashes, and nothing differs."""


FAMILIES = [("cohere", "packed"), ("bloom", "unpacked"), ("electra", "later ones")]
FAMILIES += nightly(("qwen3_5", "unpacked"), ("gemma3", "packed"), ("xmod", "has a bias"))  # with images, and fields


def test_document_has_every_family_with_an_outcome_of_each_check() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([^`]+)` \|(.+)\|$", text, re.MULTILINE))
    not_built = re.findall(r"^- `([^`]+)` \(", text.partition("## Not built")[2], re.MULTILINE)
    assert sorted([*rows, *not_built]) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    table = [[cell.strip() for cell in cells.split("|")] for cells in rows.values()]
    assert {cell for cells in table for cell in cells} <= OUTCOMES
    assert all(trained == "works" or resumed == "-" for _, _, trained, resumed, *_ in table)
    assert re.search(r"^Measured on CPUs with transformers [\d.]+, torch \S+, \d{4}-\d\d-\d\d\.$", text, re.MULTILINE)


@pytest.mark.parametrize("family, form", FAMILIES)
def test_outcome_of_a_family_is_its_form_or_a_refusal(tmp_path: Path, ranks, family: str, form: str) -> None:
    assert make_model(family, tmp_path / family).outcome == "works"
    ((outcome, detail),) = ranks.run(1, outcome_of_rows, tmp_path / family)
    assert outcome == (form if form in OUTCOMES else "refused")
    assert form in OUTCOMES or form in detail


def outcome_of_rows(model: Path) -> tuple[str, str]:
    """The outcome, or that of the error that refuses the family."""
    try:
        found = compare_rows(model)
    except UserError as error:
        return "refused", str(error)
    return found.outcome, found.detail


def test_reasons_that_several_families_have_are_one_line() -> None:
    def line(family: str, check: str, outcome: str, detail: str = "") -> Line:
        return {"family": family, "check": check, "outcome": outcome, "detail": detail, "seconds": 1.0}

    families = ("one", "two")
    lines = [line(name, "build", "works") for name in families]
    lines += [line(name, "rows", "unpacked", "1e-7 nats; packed: conv differs") for name in families]
    lines += [line("two", "train", "works"), line("two", "resume", "works"), line("two", "train", "refused", "why")]
    lines += [line("two", "rows", "packed"), line("three", "build", "unbuildable", "no layers")]
    text = markdown(lines, "about")
    assert "| `one` | unpacked | - | - | - |" in text and "| `two` | packed | - | refused | - |" in text
    assert "| vLLM |" not in text and "| vLLM |" in markdown([*lines, line("one", "vllm", "works")], "about")
    assert "- rows, `one`: unpacked, since packed: conv differs" in text and "- `three` (no layers)" in text


@pytest.mark.nightly
@pytest.mark.parametrize("family, check", [("qwen3", "sglang2"), ("gpt_oss", "vllm2")])
def test_family_works_on_an_engine_of_two_ranks(tmp_path: Path, family: str, check: str) -> None:
    sweep([family], [check], tmp_path / "results", set())
    lines = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert [(line["check"], line["outcome"]) for line in lines] == [("build", "works"), (check, "works")]


@pytest.mark.nightly
def test_every_family_works_or_is_refused_in_one_line(tmp_path: Path) -> None:
    results = tmp_path / "results"
    sweep(list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), ["rows", "tp2", "train", "resume"], results, set())
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert {line["family"] for line in lines} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert [line for line in lines if line["outcome"] not in OUTCOMES | {"unbuildable"}] == []
