"""Families without a table of the project are decoded in the fastest form that is right for them."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.helpers.tiny_models import nightly, noise_image, tiny_model
from tools.docs.family_checks import make_model
from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.hf import decoding, family_forms
from verl_mg.engines.hf.decoding import decode
from verl_mg.engines.hf.drawing import Row, TextEnd, draw_tokens
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.engines.hf.family_forms import Form, family_form, generate
from verl_mg.errors import UserError
from verl_mg.models.shrunk_config import shrink

LONGEST = 200
PADDED, EQUAL, WHOLE = Form
# What each stands for: states, caches of a family, biases of positions, windows of layers, fields that differ by layer.
FAMILIES = (
    ("mamba", EQUAL),
    *nightly(("minimax", EQUAL), ("bloom", PADDED), ("granite_swa", PADDED)),
    *nightly(("lfm2", PADDED), ("falcon_h1", PADDED), ("gemma4_text", PADDED), ("mimo_v2_flash", PADDED)),
    *nightly(
        ("hy_v4", PADDED), ("deepseek_v4", EQUAL), ("granitemoehybrid", WHOLE)
    ),  # keys that are selected; no cache
)


def made(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = shrink(CONFIG_MAPPING[name](), LONGEST).config
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=max(parameter.shape[1:]) ** -0.5)
    module.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "form"), FAMILIES)
def test_engine_of_a_family_without_a_table_has_the_logprobs_of_whole_rows(name, form, tmp_path):
    engine = HFEngine(made(name, tmp_path), "cpu", torch.float32, longest_row=LONGEST)
    assert engine.chosen()["decoding"].startswith(form.value)
    source = random.Random(0)
    prompts = [tuple(source.randrange(4, 200) for _ in range(length)) for length in (5, 21, 21, 34)]
    requests = [Request(i, prompts[i % 4], seed=i) for i in range(8)]
    sampling = Sampling(max_new_tokens=9, temperature=0.7, stop_token_ids=tuple(range(4, 60)))
    samples = engine.generate(requests, sampling)
    assert len({len(sample.tokens) for sample in samples}) > 1, "rows should end at different tokens"
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    for request, sample in zip(requests, samples, strict=True):
        with torch.no_grad():
            ids = torch.tensor([request.prompt + sample.tokens])
            logits = whole(ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
        scores = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(sample.logprobs), scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", [EQUAL, WHOLE])
def test_generate_in_another_form_draws_the_tokens_of_padded_rows(form, tmp_path):
    module = HFEngine(tiny_model(tmp_path, "qwen3"), "cpu", torch.float32).module
    prompts = [(5, 6, 7), (8, 9), (5, 6, 7), (10,)]
    uniforms, limits = torch.rand(4, 12, generator=torch.Generator().manual_seed(0)), [12, 7, 12, 1]
    reports: dict[str, Any] = {"returns_support": True, "top_logprobs": 3}
    sampling = Sampling(max_new_tokens=12, top_k=20, stop_token_ids=(3, 20, 21), **reports)

    def drawn(decoded, *forms):
        rows = [
            Row(prompt, numbers[:limit], text_end=TextEnd(["12"], lambda tokens: "".join(map(str, tokens)), ()))
            for prompt, numbers, limit in zip(prompts, uniforms, limits, strict=True)
        ]
        with torch.inference_mode():
            decoded(module, *forms, rows, sampling)
        return rows

    expected, found = drawn(decode), drawn(generate, form)
    assert [(row.tokens, row.finish) for row in found] == [(row.tokens, row.finish) for row in expected]
    assert {row.finish for row in found} == {"stop", "length"}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert ours.support.sizes.tolist() == [20] * len(ours.tokens) and len(ours.top) == len(ours.tokens)
        assert torch.equal(ours.support.ids, theirs.support.ids)
        torch.testing.assert_close(ours.top, theirs.top, atol=1e-5, rtol=0)


def test_abort_of_a_form_of_the_family_returns_the_tokens_so_far(tmp_path):
    module = HFEngine(tiny_model(tmp_path, "qwen3"), "cpu", torch.float32).module
    aborts, row = iter([False, False, True]), Row((5, 6), torch.rand(9))
    generate(module, EQUAL, [row], Sampling(max_new_tokens=9), lambda: next(aborts))
    assert len(row.tokens) == 3 and row.finish is None


def test_family_that_decodes_otherwise_than_it_computes_is_refused_for_training(monkeypatch):
    def planted(*arguments):
        """Draws with log-probs that are too low."""
        draws = draw_tokens(*arguments)
        return draws._replace(logprobs=draws.logprobs - 0.3)

    for module in (decoding, family_forms):
        monkeypatch.setattr(module, "draw_tokens", planted)
    words = r"rollout\.engine=hf: a narrow copy of 'phi3' .*: with one row after another .* log-probs differ by 0\.3\."
    with pytest.raises(UserError, match=words):
        family_form(CONFIG_MAPPING["phi3"](), LONGEST, is_trained=True)
    assert family_form(CONFIG_MAPPING["phi3"](), LONGEST, is_trained=False).form is WHOLE


@pytest.mark.nightly
def test_engine_of_a_family_that_is_not_decoded_padded_takes_no_images(tmp_path):
    """Its text is right, without padding."""
    make_model("qwen4_exp", tmp_path)
    engine = HFEngine(tmp_path, "cpu", torch.float32, longest_row=LONGEST)
    request, sampling = Request(0, (5, 6, 7), seed=0), Sampling(max_new_tokens=3)
    assert engine.chosen()["decoding"].startswith(EQUAL.value) and engine.generate([request], sampling)
    with pytest.raises(UserError, match="takes no images for this family, which it decodes by rows of equal length"):
        engine.submit([replace(request, images=(noise_image(28, 28, 0),))], sampling)


def test_faster_form_with_eager_attention_is_before_a_slower_one_with_sdpa(monkeypatch):
    right = {(PADDED, "eager"), (EQUAL, "sdpa"), (EQUAL, "eager")}
    monkeypatch.setattr(
        family_forms, "_failure", lambda n, attention, form, p: "" if (form, attention) in right else "x"
    )
    assert family_form(CONFIG_MAPPING["phi3"](), LONGEST, is_trained=True) == (PADDED, "eager", "")
    right.remove((PADDED, "eager"))
    assert family_form(CONFIG_MAPPING["phi3"](), LONGEST, is_trained=True)[:2] == (EQUAL, "sdpa")


def test_family_whose_whole_rows_do_not_run_is_refused_for_training_with_the_reason(monkeypatch):
    def fails(*_):
        raise ValueError("no\nrows.")

    monkeypatch.setattr(family_forms, "row_logprobs", fails)
    with pytest.raises(UserError, match=r"does not run over whole rows \(ValueError: no rows\)\. Use shorter"):
        family_form(CONFIG_MAPPING["phi3"](), LONGEST, is_trained=True)
