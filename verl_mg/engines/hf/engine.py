"""Rollout engine on a `transformers` model inside the process of the rank, one replica per rank."""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from verl_mg.data.image_processor import ImageProcessor
from verl_mg.engines.engine import Finish, Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.hf.decoding import Decoder, VisionPrefill
from verl_mg.engines.hf.drawing import Row, TextEnd, uniforms
from verl_mg.engines.hf.family_forms import Form, family_form, generate
from verl_mg.engines.hf.token_step import TokenStep, implementation
from verl_mg.engines.reports import ReportRules
from verl_mg.engines.stop_strings import Decode, last_turn_start
from verl_mg.errors import UserError
from verl_mg.models.shrunk_config import LONGEST_ROW
from verl_mg.models.transformers_module import module_class, read_module_config

_Running = tuple[Request, Sampling, Row]


class _Waiting:
    """A request that has no slot yet. What each look at all waiting ones compares is computed once."""

    def __init__(self, request: Request, sampling: Sampling) -> None:
        self.request, self.sampling = request, sampling
        self.drawing, self.batching_key = _drawing(sampling), _batching_key(request, sampling)


class HFEngine(RolloutEngine):
    """Rollout engine that decodes batches with a `transformers` model.

    `model` is a directory with config.json and safetensors, or a configuration, which has no weights. Without
    `load_weights` weights are undefined until the first update. `processor` is needed for requests with images,
    `decode_text` (tokens to text) for responses that end at stop strings. Prompt and response have `longest_row` tokens
    at most; None: as many as the model has positions.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        max_running_requests: int = 256,
        load_weights: bool = True,
        processor: ImageProcessor | None = None,
        decode_text: Decode | None = None,
        longest_row: int | None = None,
    ) -> None:
        if max_running_requests < 1:
            raise UserError(f"rollout.max_running_requests={max_running_requests}: out of range. Give at least 1.")
        config = model if isinstance(model, PreTrainedConfig) else read_module_config(model)
        # None, or -1, in families without a bound.
        positions = max(0, getattr(config.get_text_config(), "max_position_embeddings", None) or 0)
        self.max_positions = positions or math.inf  # the most tokens of a prompt and its response
        longest = longest_row or positions or LONGEST_ROW
        self._family = family_form(config, longest, is_trained=longest_row is not None)
        attention = implementation(self._family.attention)
        if not load_weights:
            self.module = _allocate(config, dtype, attention)
        elif isinstance(model, PreTrainedConfig):
            raise ValueError("a configuration has no weights: pass load_weights=False or a directory")
        else:
            self.module = _load(Path(model), dtype, attention)
        nn.Module.to(self.module, device)
        self.module.eval().requires_grad_(False)
        self.module.generation_config = GenerationConfig()  # the folder's, such as penalties, is not used
        vision = VisionPrefill(self.module, processor) if processor else None
        self._decoder = Decoder(TokenStep(self.module), vision)
        self._decode_text = decode_text
        self._reports = ReportRules(engine="rollout.engine=hf", vocab=config.get_text_config().vocab_size)
        self.version = 0
        self._max_batch = max_running_requests
        self._defined = load_weights
        self._updating = False
        self._abort = threading.Event()  # set in any thread, read after each token
        self._waiting: list[_Waiting] = []
        self._running: list[_Running] = []

    def chosen(self) -> dict[str, str]:
        """Returns what the module computes with, by part."""
        attention = f"{self._family.attention} of transformers"
        return {"attention": attention, "decoding": self._family.chosen, "CUDA graphs": "off"}

    def num_free_slots(self) -> int:
        """Returns the largest number of running requests minus those that run or wait."""
        return self._max_batch - len(self._running) - len(self._waiting)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Checks and queues requests; UserError for a prompt that is empty, too long, or has unknown tokens."""
        if not self.health():
            raise RuntimeError("the engine has no weights: finish an update first")
        for request in requests:
            self._check(request, sampling)
        if not self._waiting and not self._running:  # else the abort is meant for them
            self._abort.clear()
        self._waiting += [_Waiting(request, sampling) for request in requests]

    def collect(self, timeout: float) -> list[Sample]:
        """Begins waiting requests in free slots, and decodes until some have ended; `timeout` is ignored."""
        if not self._abort.is_set():
            self._decode(self._begin())
        ended = [each for each in self._running if each[2].finish]
        self._running = [each for each in self._running if not each[2].finish]
        samples = [self._sample(*each) for each in ended]
        if self._abort.is_set():
            rest = [*self._running, *map(self._with_row, self._waiting)]
            samples += [self._sample(*each) for each in rest]
            self._running, self._waiting = [], []
            self._decoder.clear()
        return samples

    def begin_update(self) -> None:
        """Begins an update; the weights may be written until `end_update`, after which running requests continue."""
        self._updating = True
        # Keys and values of the old weights are computed again, also of the prompts.
        continued = [_Waiting(replace(each[0], partial=self._sample(*each)), each[1]) for each in self._running]
        self._running, self._waiting = [], continued + self._waiting
        self._decoder.clear()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of the module by name, persistent buffers included; a tied head is not listed."""
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if all(tensor is not other for other in tensors.values()):
                tensors[name] = tensor
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def share(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Uses the memory of these tensors for the weights of the same names where dtype and device are equal."""
        for name, parameter in self.module.named_parameters():
            tensor = tensors.get(name)
            if tensor is not None and (tensor.dtype, tensor.device) == (parameter.dtype, parameter.device):
                parameter.data = tensor

    def end_update(self, version: int) -> None:
        """Ends an update; the weights are policy version `version` from now on."""
        if not self._updating:
            raise RuntimeError("end_update without begin_update")
        self._updating, self._defined, self.version = False, True, version

    def abort(self) -> None:
        """Aborts the generation in progress after the current token."""
        self._abort.set()

    def health(self) -> bool:
        """Returns whether the weights are defined and no update is in progress."""
        return self._defined and not self._updating

    def _check(self, request: Request, sampling: Sampling) -> None:
        vocab = self.module.config.get_text_config().vocab_size
        length, limit = len(request.prompt), self.max_positions
        if request.context_images and self._family.form is not Form.PADDED:
            raise UserError(
                f"request {request.id}: rollout.engine=hf takes no images for this family, which it decodes by "
                f"{self._family.chosen}. Use another rollout.engine."
            )
        if length == 0:
            raise UserError(f"request {request.id}: the prompt is empty. Give at least one token.")
        if length + sampling.max_new_tokens > limit:
            raise UserError(
                f"request {request.id}: a prompt of {length} tokens plus {sampling.max_new_tokens} new ones "
                f"exceeds the {limit} positions of the model. Shorten the prompt or lower max_new_tokens."
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
            raise UserError(
                f"request {request.id}: a token id is outside the vocabulary of {vocab}. "
                "Encode prompts with the tokenizer of this model."
            )

    def _begin(self) -> list[Row]:
        """Moves waiting requests to the free slots, whose tokens are drawn like those that run; returns their rows."""
        num_free = self._max_batch - len(self._running)
        is_closed = bool(self._running) and not self._decoder.takes_rows
        if num_free <= 0 or is_closed or not self._waiting:
            return []
        # The oldest request decides: it does not wait for ever for those that are drawn otherwise.
        drawn = self._waiting[0].drawing
        if self._running and _drawing(self._running[0][1]) != drawn:
            return []
        # Neighbours in this order have equal prompts, which share a prefill, or little padding between them.
        alike = [i for i, each in enumerate(self._waiting) if each.drawing == drawn]
        chosen = sorted(alike, key=lambda i: self._waiting[i].batching_key)[:num_free]
        new = [self._with_row(self._waiting[i]) for i in chosen]
        taken = set(chosen)
        self._waiting = [each for i, each in enumerate(self._waiting) if i not in taken]
        self._running += new
        return [row for _, _, row in new if not row.finish]

    @torch.inference_mode()
    def _decode(self, new: Sequence[Row]) -> None:
        if not self._running:
            return
        sampling = self._running[0][1]
        if self._family.form is Form.PADDED:
            self._decoder.run(new, sampling, self._abort.is_set)
        else:
            generate(self.module, self._family.form, new, sampling, self._abort.is_set)

    def _with_row(self, waiting: _Waiting) -> _Running:
        """Returns a request with the row that continues its context."""
        request, sampling = waiting.request, waiting.sampling
        limit = max(0, request.remaining_tokens(sampling))
        # A resumed sample draws the tokens that it would have drawn without the interruption: its numbers are the last
        # ones of the whole sample.
        numbers = uniforms(request.seed, sampling.max_new_tokens)[sampling.max_new_tokens - limit :]
        text_end = None
        if sampling.stop and self._decode_text:
            partial = request.partial
            turn = partial.tokens[last_turn_start(partial) :] if partial else ()
            text_end = TextEnd(sampling.stop, self._decode_text, turn)
        finish: Finish | None = None if limit else "length"
        return (request, sampling, Row(request.context, numbers, request.context_images, text_end, finish))

    def _sample(self, request: Request, sampling: Sampling, row: Row) -> Sample:
        reported = (tuple(row.tokens), tuple(row.logprobs), (self.version,) * len(row.tokens), row.finish or "abort")
        sample = Sample(request.id, *reported, support=row.support, top=row.top)
        return request.prepend_partial(self._reports.check(request, sampling, sample, self.version))


def _drawing(sampling: Sampling) -> tuple[object, ...]:
    """Returns everything that decides how a token is drawn."""
    cuts = (sampling.top_p, sampling.top_k, sampling.min_p)
    reported = (sampling.returns_support, sampling.top_logprobs)
    return (sampling.temperature, *cuts, *reported, sampling.stop_token_ids, sampling.stop, sampling.excluded_token_ids)


def _batching_key(request: Request, sampling: Sampling) -> tuple[object, ...]:
    keys = [image.key for image in request.context_images]
    return (request.remaining_tokens(sampling), len(request.context), request.context, keys)


def _load(directory: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    # Only from safetensors, since other formats can run code.
    config = read_module_config(directory)
    try:
        loaded: Any = module_class(config).from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"{directory}: the safetensors weights cannot be read ({error}). Complete the checkpoint."
        ) from error
    module, report = loaded
    if report["missing_keys"]:
        missing = min(report["missing_keys"])
        raise UserError(f"{directory}: tensor {missing} is missing. Complete the checkpoint or correct config.json.")
    return module


def _allocate(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Builds the module with undefined weights, and ties weights, which otherwise the initialisation does."""
    with no_init_weights():
        module: PreTrainedModel = module_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
    module.tie_weights()
    return module
