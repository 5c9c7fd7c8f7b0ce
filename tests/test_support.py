"""`verl-mg models` of a model on a hub: configuration and tokenizer are fetched, weights are not."""

import json
import re
import shutil
from pathlib import Path

import pytest
from torch.distributed import HashStore

from tests.helpers.hub_server import serving
from tests.helpers.launched import finished
from tests.helpers.tiny_models import tiny_model, tiny_model_with_multi_token_layer
from tools.docs.write_models_doc import DOCUMENT
from verl_mg.config import RecipeConfig, load_config
from verl_mg.errors import UserError
from verl_mg.job.build_models import ModelRoleBuilder
from verl_mg.models.hf_families import FAMILIES
from verl_mg.models.transformers_module import read_tokenizer
from verl_mg.roles.context import JobContext
from verl_mg.support import EXIT_PROBLEMS, MEGATRON, Answer, ModelSupport, format_sizes, markdown, show_model


@pytest.mark.nightly
def test_models_of_a_name_on_a_hub_downloads_no_weights(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3")
    with serving({"a/model": {file.name: file.read_bytes() for file in model.iterdir()}}, {}) as hub:
        command = ["-m", "verl_mg", "models", "a/model"]
        printed = finished(command, warm=False, **hub.variables(tmp_path / "home")).completed().out
    assert f"{tmp_path}/home/hub/models--a--model/snapshots/" in printed and ": qwen3, 4 layers, " in printed
    assert re.search(r"\n  weights +yes: not downloaded", printed)
    assert "config.json" in hub.downloads and "model.safetensors" not in hub.downloads


def test_models_document_is_current():
    text = markdown()
    assert DOCUMENT.read_text(encoding="utf-8") == text, "run python -m tools.docs.write_models_doc"
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert rows.keys() >= FAMILIES.keys()
    assert rows["qwen3_moe"].split(" | ")[1:3] == ["tp, pp, vpp, cp, ep", "tp, cp"]
    assert rows["gemma2"].split(" | ")[1] == "tp, pp, vpp, cp" and rows["gemma2"].split(" | ")[4] == "tp"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, name) for name in ("gemma2", "deepseek_v3")}


def answers_of(model: Path, **options: bool) -> dict[str, Answer]:
    return {answer.topic: answer for answer in ModelSupport(model, **options).answers()}


def accepted(model: Path, layout: str, ranks: int) -> bool:
    config = load_config(None, [f"model.path={model}", "data.train=unread", f"actor.layout={layout}"], RecipeConfig)
    try:
        ModelRoleBuilder(config, ranks, JobContext(HashStore())).check({"actor"})
    except UserError:
        return False
    return True


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_sizes_are_those_that_jobs_accept(models, name):
    answers = answers_of(models[name])
    assert answers["backend megatron"].works and answers["weights"].text == "1 file"
    for dimension, layout in MEGATRON.items():
        possible = [size for size in range(2, 10) if accepted(models[name], layout.format(size), 2 * size)]
        answer = answers[f"megatron {dimension}"]
        assert answer.works == bool(possible) and (not possible or answer.text == format_sizes(possible))
    if name == "gemma2":
        assert answers["sglang pp"].text.startswith("rollout.layout=pp2: SGLang has no pipeline parallelism for gemma2")
        assert answers["megatron ep"].text.startswith("layout ep2: ep2 distributes experts, but the model has none")
    else:
        assert answers["sglang adp"].works and answers["experts' LoRA"].works
        assert "latent attention" in answers["adapters sent to sglang"].text


def assert_tables_answer_as_libraries(model: Path) -> None:
    by_tables, by_libraries = answers_of(model, by_tables=True), answers_of(model)
    assert len(by_tables) > 20
    del by_tables["tokenizer"]  # its files, unread
    assert by_tables == {topic: by_libraries[topic] for topic in by_tables}


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_answers_by_tables_equal_those_of_libraries(models, name, capsys):
    assert_tables_answer_as_libraries(models[name])
    assert show_model(models[name], full=False) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\n  tokenizer +yes: tokenizer.json\n", printed) and "fsdp tp" not in printed


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"gemma2", "deepseek_v3"}))
def test_answers_by_tables_of_every_family_equal_those_of_libraries(tmp_path, name):
    assert_tables_answer_as_libraries(tiny_model(tmp_path / name, name))


def test_model_of_transformers_alone_is_trained_by_no_table_of_the_project(tmp_path):
    """OLMo 2, which has no row in the table of families."""
    from transformers import Olmo2Config

    Olmo2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    ).save_pretrained(tmp_path)
    answers = answers_of(tmp_path, has_weights=False)
    assert "model_type 'olmo2' is not supported. Choose from llama, " in answers["backend megatron"].text
    assert answers["backend fsdp"].works and answers["rows on fsdp"].text == "of up to 2048 tokens: packed"
    assert answers["fsdp tp"].text == answers["fsdp cp"].text == "2 4, if ranks compute what one does"
    assert not answers["fsdp pp"].works
    assert answers["engine hf"].works and answers["engine sglang"].text.startswith("traced, if it has the architecture")
    assert not answers["tokenizer"].works and answers["LoRA"].text.startswith("q_proj ")


def test_families_that_a_backend_has_in_part_get_its_reason(tmp_path):
    answers = answers_of(tiny_model(tmp_path / "gpt_oss", "gpt_oss"))
    assert answers["backend fsdp"].works and "no plan of tensor parallelism" in answers["fsdp tp"].text
    answers = answers_of(tiny_model(tmp_path / "sparse", "glm_moe_dsa"))
    assert answers["backend megatron"].works and answers["backend fsdp"].works
    assert " tokens: each by itself, since packed: " in answers["rows on fsdp"].text
    assert answers["fsdp cp"].text.startswith("layout cp2: no cp with rows that are computed each by itself")
    assert format_sizes([2, 4, 8]) == "2 4 8" and format_sizes([2, 3, 4, 8, 9]) == "2-4 8 9"


def test_layer_of_multi_token_prediction_is_among_the_answers(models, tmp_path):
    topic = "multi-token prediction"
    assert not answers_of(models["deepseek_v3"])[topic].works
    model = tiny_model_with_multi_token_layer(tmp_path / "model", "deepseek_v3")
    answers = answers_of(model)
    assert answers[topic].works and answers["weights"].works


def test_missing_and_unknown_files_are_named_in_the_report(models, tmp_path, capsys):
    assert show_model(models["gemma2"], full=True) == 0
    assert re.search(r"\n  megatron tp +yes: 2\n", capsys.readouterr().out)
    model = shutil.copytree(models["gemma2"], tmp_path / "model")
    (model / "model.safetensors").unlink()
    (model / "tokenizer.json").unlink()
    assert show_model(model, full=True) == EXIT_PROBLEMS
    output = capsys.readouterr().out
    assert f"no: {model}: no model.safetensors and no" in output and "no readable tokenizer" in output
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))  # for which transformers makes one
    with pytest.raises(UserError, match="no tokenizer. Add tokenizer.json"):
        read_tokenizer(tmp_path)
    (model / "config.json").write_text(json.dumps({"model_type": "spiral"}))
    assert show_model(model, full=True) == EXIT_PROBLEMS
    assert "backend megatron        no: " in capsys.readouterr().out
    answers = ModelSupport(model).answers()
    assert not any(answer.works for answer in answers if answer.topic.startswith(("backend", "engine", "LoRA")))
    with pytest.raises(UserError, match="nowhere: no such model directory"):
        show_model(Path("nowhere"), full=False)
