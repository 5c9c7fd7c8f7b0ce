"""What vLLM's samplers return, wrapped as in a worker: `python -m tests.engines.vllm.sampler_probe STEPS`, one JSON.

A step is a list of requests, fields of `SamplingParams`. The kernels of the second model runner are vLLM's own, which
Triton interprets: TRITON_INTERPRET=1, and a path on which this interpreter finds Triton.
"""

import base64
import importlib
import json
import sys
from types import SimpleNamespace as Object
from typing import Any

import numpy as np
import torch
import triton
import triton.language
import vllm.triton_utils
from vllm.sampling_params import SamplingParams
from vllm.utils import platform_utils
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from verl_mg.engines.vllm.internals import DrawRecorder

VOCAB, SLOTS, PROMPT, DRAFTS = 37, 8, 3, 2
CPU = torch.device("cpu")
SECOND = "vllm.v1.worker.gpu"
Step = list[dict[str, Any]]


def metadata(parameters: list[SamplingParams]) -> SamplingMetadata:
    """What the first model runner makes of the requests of a step."""
    config: Any = Object(scheduler_config=Object(max_num_seqs=SLOTS))
    processors = [kind(config, CPU, False) for kind in (MinPLogitsProcessor, LogitBiasLogitsProcessor)]
    added = [(index, one, [0] * PROMPT, []) for index, one in enumerate(parameters)]
    for processor in processors:
        processor.update_state(BatchUpdate(len(parameters), [], added, []))
    greedy = [one.temperature == 0 for one in parameters]
    none, top_k = torch.zeros(len(parameters)), torch.tensor([one.top_k or VOCAB for one in parameters])
    top_p = torch.tensor([one.top_p for one in parameters])
    return SamplingMetadata(
        temperature=None if all(greedy) else torch.tensor([one.temperature for one in parameters]),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=top_p if (top_p < 1).any() else None,
        top_k=top_k if (top_k < VOCAB).any() else None,
        generators={index: torch.Generator().manual_seed(index) for index in range(len(parameters))},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none + 1,
        output_token_ids=[[] for _ in parameters],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(processors),
    )


def first_runner(steps: list[Step]) -> list[dict[str, Any]]:
    """What the sampler of the first model runner returns."""
    sampler = Sampler("processed_logprobs")
    none: Any = np.zeros(SLOTS, dtype=bool)
    lengths = {"optimistic_seq_lens_cpu": torch.full((SLOTS,), PROMPT + 1), "discard_request_mask": Object(np=none)}
    runner = Object(sampler=sampler, input_batch=Object(num_prompt_tokens=[PROMPT] * SLOTS), requests={}, **lengths)
    recorder, results = DrawRecorder(runner), []
    for number, step in enumerate(steps):
        logits, parameters = logits_of(number, len(step)), [SamplingParams(**fields) for fields in step]
        runner.requests = {f"{number}.{i}-x": Object(sampling_params=one) for i, one in enumerate(parameters)}
        runner.input_batch.req_ids = [*runner.requests]
        output = sampler(logits.clone(), metadata(parameters))
        taken = [taken_of(recorder, f"{number}.{i}") for i in range(len(step))]
        results.append(result(logits, output.sampled_token_ids, output.logprobs_tensors.logprobs, taken))
    return results


def taken_of(recorder: DrawRecorder, rid: str) -> list[int] | None:
    """Candidates of the second token of a request, the only one that is drawn here; None where there are none."""
    if (wire := recorder.take(rid, 2)) is None:
        return None
    sizes, ids = (np.frombuffer(base64.b64decode(text), dtype=np.int32).tolist() for text in wire)
    assert sizes == [0, len(ids)]
    return ids


class SecondRunner:
    """The sampler of the second model runner, and the one that verifies drafts."""

    def __init__(self) -> None:
        vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
        platform_utils.is_uva_available = lambda: False  # it would ask for pinned memory
        for name in [name for name in sys.modules if name.startswith(f"{SECOND}.")]:
            del sys.modules[name]  # it was imported without Triton
        states = importlib.import_module(f"{SECOND}.states")
        sampling = importlib.import_module(f"{SECOND}.sample.sampler")
        rejection = importlib.import_module(f"{SECOND}.spec_decode.rejection_sampler")
        self._states = states.RequestState(SLOTS, 64, 64, DRAFTS, VOCAB, CPU)
        config = Object(reasoning_config=None, speculative_config=None)
        self._sampler = sampling.Sampler(config, SLOTS, VOCAB, CPU, self._states, "processed_logprobs", DRAFTS + 1)
        fields = {"enable_adaptive_verification": False, "rejection_sample_method": "standard"}
        drafts = Object(num_speculative_tokens=DRAFTS, **fields)
        self._verifier = rejection.RejectionSampler(self._sampler, drafts, CPU)
        runner = Object(sampler=self._sampler, rejection_sampler=self._verifier, req_states=self._states)
        self._recorder = DrawRecorder(runner)

    def results(self, steps: list[Step]) -> list[dict[str, Any]]:
        """What it returns for each step, with drafts in every second one: rows of tokens that were not drawn are -1."""
        return [self._step(number, step, DRAFTS * (number % 2)) for number, step in enumerate(steps)]

    def _step(self, number: int, step: Step, drafts: int) -> dict[str, Any]:
        slots = []
        for index, fields in enumerate(step):
            self._states.add_request(f"{index}-x", PROMPT, [0] * PROMPT, PROMPT, 8)
            slots.append(self._states.req_id_to_index[f"{index}-x"])
            self._sampler.add_request(slots[-1], SamplingParams(seed=index, **fields))
        self._states.apply_staged_writes()
        self._sampler.apply_staged_writes()
        rows = 1 + drafts
        logits = logits_of(number, len(step) * rows)
        call = self._verifier if drafts else self._sampler
        output = call(logits.clone(), batch(torch.tensor(slots, dtype=torch.int32), rows, logits))
        for index in range(len(step)):
            self._states.remove_request(f"{index}-x")
        drawn = torch.arange(rows) < output.num_sampled[:, None]
        tokens = output.sampled_token_ids.where(drawn, -1)
        taken = [taken_of(self._recorder, str(index)) for index in range(len(step))]
        return result(logits, tokens.view(-1, 1), output.logprobs_tensors.logprobs, taken)


def batch(slots: torch.Tensor, rows: int, logits: torch.Tensor) -> Any:
    """The fields of a batch that samplers read; drafts are the likeliest tokens."""
    count = len(slots)
    starts = torch.arange(count + 1, dtype=torch.int32) * rows
    local = torch.arange(rows, dtype=torch.int32).repeat(count)
    likeliest = logits.argmax(-1).to(torch.int32)
    return Object(
        num_reqs=count,
        idx_mapping=slots,
        idx_mapping_np=slots.numpy(),
        expanded_idx_mapping=slots.repeat_interleave(rows),
        expanded_local_pos=local,
        cu_num_logits=starts,
        cu_num_logits_np=starts.numpy(),
        logits_indices=torch.arange(count * rows),
        positions=PROMPT + local.to(torch.int64),
        input_ids=torch.cat([likeliest[:1], likeliest[:-1]]),
        seq_lens=torch.full((count,), PROMPT + rows, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((count,), PROMPT + rows, dtype=torch.int32),
    )


def logits_of(step: int, rows: int) -> torch.Tensor:
    """Logits of the rows of a step."""
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(step))


def result(
    logits: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, taken: list[list[int] | None]
) -> dict[str, Any]:
    """The logits, drawn tokens and their log-probabilities of the rows of a step, and candidates of its requests."""
    values = {"logits": logits.tolist(), "tokens": tokens[:, 0].tolist(), "logprobs": logprobs[:, 0].tolist()}
    return values | {"candidates": taken}


def main() -> None:
    """Prints the results of both runners for the steps that are given as JSON."""
    steps = [[fields | {"logprobs": 0} for fields in step] for step in json.loads(sys.argv[1])]
    for step in steps:
        for fields in step:
            fields["logit_bias"] = {int(token): bias for token, bias in fields.get("logit_bias", {}).items()} or None
    np.random.seed(0)
    print(json.dumps({"first": first_runner(steps), "second": SecondRunner().results(steps)}))


if __name__ == "__main__":
    main()
