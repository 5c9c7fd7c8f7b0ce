"""Requests and responses in SGLang's own fields, for its engine and its servers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from verl_mg.data.image_processor import ImageProcessor
from verl_mg.engines.engine import ACCEPTED, CACHED, DRAFTED, GENERATED, PROMPT, VERIFIED, observed_load
from verl_mg.images import Image

EXCLUDED = -1e4  # bias on the logits of tokens that are never drawn


def request_fields(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of SGLang's `generate` for a request."""
    parameters: dict[str, Any] = {
        "max_new_tokens": request["max_new_tokens"],
        "temperature": request["temperature"],
        "top_p": request["top_p"],
        "top_k": request["top_k"] or -1,  # SGLang's number for no limit
        "min_p": request["min_p"],
        "stop_token_ids": request["stop_token_ids"],
        # SGLang also stops at the model's end of sequence, unless it is to ignore all stop tokens.
        "ignore_eos": not request["stop_token_ids"],
        "skip_special_tokens": False,
    }
    if request["stop"]:
        # The tokens of the string are part of the response, which is trained.
        parameters |= {"stop": request["stop"], "no_stop_trim": True}
    if request["excluded_token_ids"]:
        parameters["logit_bias"] = {str(token): EXCLUDED for token in request["excluded_token_ids"]}
    if request["seed"] is not None:
        parameters["sampling_seed"] = request["seed"]
    fields: dict[str, Any] = {"input_ids": request["tokens"], "sampling_params": parameters, "return_logprob": True}
    if request["routed_experts"]:
        fields["return_routed_experts"] = True
    return fields


def image_fields(request: dict[str, Any], processor: ImageProcessor) -> dict[str, Any]:
    """Returns the arguments of a server's `generate` for the images of a request."""
    images = tuple(Image(base64.b64decode(text)) for text in request["images"])
    return {
        # SGLang expands the placeholders again, and leaves all other tokens as they are. JSON has no tensors: a server
        # gets files, an engine pixels.
        "input_ids": processor.unexpanded(request["tokens"], images),
        "image_data": [image.data_url for image in images],
    }


def parse_response(response: dict[str, Any]) -> dict[str, Any]:
    """Extracts the fields of a sample from SGLang's response to a request; see `EngineHost.generate`."""
    meta = response["meta_info"]
    return {
        "tokens": response["output_ids"],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
        "finish": meta["finish_reason"]["type"],
        "spans": meta.get("weight_versions") or [],
        "routed_experts": meta.get("routed_experts"),
        "counts": _counts(meta),
    }


def load_counts(loads: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the counts of an observation, from the load of each data-parallel scheduler; {} without any."""
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
    return observed_load(*(sum(load[name] for load in loads) for name in names)) if loads else {}


def _counts(meta: dict[str, Any]) -> dict[str, int]:
    # A request that was aborted before it started has neither.
    counts = {PROMPT: meta.get("prompt_tokens", 0), CACHED: meta.get("cached_tokens", 0)}
    if "spec_verify_ct" in meta:  # with speculative decoding
        counts[DRAFTED], counts[ACCEPTED] = meta["spec_num_proposed_drafts"], meta["spec_num_correct_drafts"]
        counts[VERIFIED], counts[GENERATED] = meta["spec_verify_ct"], meta["completion_tokens"]
    return counts
