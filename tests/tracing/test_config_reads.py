"""Fields of config.json that only `transformers` reads are recorded, also out of copies of dicts."""

import copy
import json
import math
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, Qwen3Config

from tests.helpers import warm_start
from tests.helpers.tiny_models import nightly
from tests.helpers.traces import needs_sglang, needs_vllm
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.tracing.config_reads import effects, recorded_reads, unread_fields
from verl_mg.tracing.tracer import TracedEngine

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.0}


@pytest.mark.parametrize("copied", [dict, lambda fields: {**fields}, copy.copy, copy.deepcopy])
def test_recorded_reads_of_a_dict_that_is_copied_are_the_keys_that_are_compared(copied):
    config, reads = Qwen3Config(rope_parameters={"rope_theta": 1e4, **YARN}), set()
    with recorded_reads(reads):
        assert config.hidden_size and config.num_key_value_heads
        rope = copied(config.rope_parameters)
        assert tuple(rope.items()) == tuple(config.rope_parameters.items()) and reads >= {"hidden_size"}
        known = {key: value for key, value in rope.items() if key in ("factor", "beta_fast")}
        assert known == {"factor": 4.0} and rope.get("rope_theta")
    assert {"factor", "rope_theta", "rope_parameters", "num_key_value_heads"} <= reads
    assert not {"attention_factor", "rope_type", "head_dim", "vocab_size"} & reads
    assert config.rope_parameters["attention_factor"] == 1.0 and "attention_factor" not in reads


ROPE = {"rope_theta": 1e4, **YARN}
WINDOW = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("family", "fields", "longest", "found"),
    [
        ("starcoder2", {"sliding_window": 4096}, 8192, ["sliding_window"]),
        *nightly(
            ("starcoder2", {"sliding_window": 4096}, 4096, []),
            ("mistral", {}, 8192, ["sliding_window"]),  # by default of the family, without the field in config.json
            ("qwen3", {"rope_parameters": ROPE}, 200, ["attention_factor"]),
            ("qwen3", {"rope_parameters": ROPE | {"attention_factor": 0.1 * math.log(4) + 1}}, 200, []),
            ("qwen2", WINDOW, 8192, ["sliding_window"]),
        ),
    ],
)
def test_effects_have_the_fields_without_which_log_probs_differ(family, fields, longest, found):
    names = ["dtype", "attention_dropout", "use_cache", "attention_factor", "sliding_window", "eos_token_id"]
    measured = effects(CONFIG_MAPPING[family](**fields), names, longest)
    assert list(measured) == found and all(0.05 < nats < 5 for nats in measured.values())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "engine", "found"),
    [
        pytest.param("qwen3", "sglang", ["attention_factor"], marks=needs_sglang),
        pytest.param("mistral", "sglang", ["sliding_window", "attention_factor"], marks=needs_sglang),
        pytest.param("qwen3", "vllm", [], marks=needs_vllm),
    ],
)
def test_unread_fields_of_an_engine_are_those_that_its_model_ignores(tmp_path, model, engine, found):
    folder = make_tiny_model(tmp_path / "model", "qwen3" if model == "qwen3" else "llama", rope_scaling=YARN)
    if model == "mistral":
        fields = json.loads((folder / "config.json").read_text())
        fields |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32}
        (folder / "config.json").write_text(json.dumps(fields))
    python = Path(warm_start.vllm().python) if engine == "vllm" else None
    assert list(unread_fields(folder, TracedEngine(engine, python), 128)) == found
