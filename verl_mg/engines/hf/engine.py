"""Rollout engine on a `transformers` model inside the process of the rank, one replica per rank."""

import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from verl_mg.data.image_processor import ImageProcessor
from verl_mg.engines.engine import Finish, Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.hf.decoding import TextEnd, VisionPrefill, decode, uniforms
from verl_mg.engines.hf.family_forms import Form, family_form, generate
from verl_mg.engines.reports import ReportRules
from verl_mg.engines.stop_strings import Decode, last_turn_start
from verl_mg.errors import UserError
from verl_mg.models.shrunk_config import LONGEST_ROW
from verl_mg.models.transformers_module import module_class, read_module_config


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
        if not load_weights:
            self.module = _allocate(config, dtype, self._family.attention)
        elif isinstance(model, PreTrainedConfig):
            raise ValueError("a configuration has no weights: pass load_weights=False or a directory")
        else:
            self.module = _load(Path(model), dtype, self._family.attention)
        nn.Module.to(self.module, device)
        self.module.eval().requires_grad_(False)
        self.module.generation_config = GenerationConfig()  # the folder's, such as penalties, is not used
        self._vision = VisionPrefill(self.module, processor) if processor else None
        self._decode_text = decode_text
        self._reports = ReportRules(engine="rollout.engine=hf", vocab=config.get_text_config().vocab_size)
        self.version = 0
        self._max_batch = max_running_requests
        self._defined = load_weights
        self._updating = False
        self._abort = threading.Event()  # set in any thread, read after each token
        self._waiting: list[tuple[Request, Sampling]] = []

    def chosen(self) -> dict[str, str]:
        """Returns what the module computes with, by part."""
        attention = f"{self._family.attention} of transformers"
        return {"attention": attention, "decoding": self._family.chosen, "CUDA graphs": "off"}

    def num_free_slots(self) -> int:
        """Returns the size of a batch minus the waiting requests."""
        return self._max_batch - len(self._waiting)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Checks and queues requests; UserError for a prompt that is empty, too long, or has unknown tokens."""
        if not self.health():
            raise RuntimeError("the engine has no weights: finish an update first")
        for request in requests:
            self._check(request, sampling)
        if not self._waiting:  # else the abort is meant for requests that still wait
            self._abort.clear()
        self._waiting += [(request, sampling) for request in requests]

    def collect(self, timeout: float) -> list[Sample]:
        """Decodes a batch of requests whose tokens are drawn in the same way to its end; `timeout` is ignored."""
        if not self._waiting:
            return []
        # Neighbours in this order have equal prompts, which share a prefill, or little padding between them.
        self._waiting.sort(key=_batching_key)
        drawn = _drawing(self._waiting[0][1])
        num_equal = next((i for i, (_, s) in enumerate(self._waiting) if _drawing(s) != drawn), len(self._waiting))
        size = min(num_equal, self._max_batch)
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        return [
            request.prepend_partial(self._reports.check(request, sampling, more, self.version))
            for (request, sampling), more in zip(batch, self._decode(batch), strict=True)
        ]

    def begin_update(self) -> None:
        """Begins an update; the weights may be written until `end_update`."""
        self._updating = True

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

    @torch.inference_mode()
    def _decode(self, batch: Sequence[tuple[Request, Sampling]]) -> list[Sample]:
        """Continues each context; all tokens are drawn in the same way."""
        limits = [request.remaining_tokens(sampling) for request, sampling in batch]
        running = [i for i, limit in enumerate(limits) if limit > 0 and not self._abort.is_set()]
        samples = [
            Sample(request.id, (), (), (), "length" if limit <= 0 else "abort")
            for (request, _), limit in zip(batch, limits, strict=True)
        ]
        if not running:
            return samples
        draws = torch.zeros(len(running), max(limits[i] for i in running))
        for row, i in enumerate(running):
            request, sampling = batch[i]
            # A resumed sample draws the tokens that it would have drawn without the interruption: its numbers are the
            # last ones of the whole sample.
            draws[row, : limits[i]] = uniforms(request.seed, sampling.max_new_tokens)[-limits[i] :]
        text_end = self._text_end([batch[i] for i in running])
        contexts, counts = [batch[i][0].context for i in running], [limits[i] for i in running]
        drawing = (draws, counts, batch[0][1], self._abort.is_set)
        if self._family.form is Form.PADDED:
            images = [batch[i][0].context_images for i in running]
            completions = decode(self.module, contexts, *drawing, images, self._vision, text_end)
        else:
            completions = generate(self.module, self._family.form, contexts, *drawing, text_end)
        for row, (i, (tokens, logprobs, support, top)) in enumerate(zip(running, completions, strict=True)):
            stopped = (text_end and row in text_end.ended) or tokens[-1] in batch[i][1].stop_token_ids
            finish: Finish = "stop" if stopped else "length" if len(tokens) == limits[i] else "abort"
            versions = (self.version,) * len(tokens)
            reported = (tuple(tokens), tuple(logprobs), versions, finish)
            samples[i] = Sample(batch[i][0].id, *reported, support=support, top=top)
        return samples

    def _text_end(self, batch: Sequence[tuple[Request, Sampling]]) -> TextEnd | None:
        stop = batch[0][1].stop
        if not stop or self._decode_text is None:
            return None
        partials = [request.partial for request, _ in batch]
        turns = [partial.tokens[last_turn_start(partial) :] if partial else () for partial in partials]
        return TextEnd(stop, self._decode_text, turns)


def _drawing(sampling: Sampling) -> tuple[object, ...]:
    """Returns everything that decides how a token is drawn."""
    cuts = (sampling.top_p, sampling.top_k, sampling.min_p)
    reported = (sampling.returns_support, sampling.top_logprobs)
    return (sampling.temperature, *cuts, *reported, sampling.stop_token_ids, sampling.stop, sampling.excluded_token_ids)


def _batching_key(waiting: tuple[Request, Sampling]) -> tuple[object, ...]:
    request, sampling = waiting
    keys = [image.key for image in request.context_images]
    return (_drawing(sampling), request.remaining_tokens(sampling), len(request.context), request.context, keys)


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
