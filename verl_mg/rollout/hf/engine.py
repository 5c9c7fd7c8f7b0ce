"""The engine without a service: a `transformers` model in the process of the rank, one replica a rank."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from verl_mg.errors import UserError
from verl_mg.rollout.engine import Finish, Request, RolloutEngine, Sample, Sampling
from verl_mg.rollout.hf.decoding import Completions, decode
from verl_mg.rollout.hf.sampling import uniforms


class HFEngine(RolloutEngine):
    """Decodes in batches of at most `max_running_requests` rows.

    model: a directory with config.json and safetensors, or a configuration, which has no weights to load.
    load_weights: without it the weights are allocated and undefined until the first update.
    Raises UserError if the directory holds no loadable model.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        max_running_requests: int = 256,
        load_weights: bool = True,
    ) -> None:
        if max_running_requests < 1:
            raise UserError(f"max_running_requests is {max_running_requests}: give at least 1")
        config = model if isinstance(model, PreTrainedConfig) else _read_config(Path(model))
        if not load_weights:
            self.module = _allocate(config, dtype)
        elif isinstance(model, PreTrainedConfig):
            raise ValueError("a configuration has no weights: pass load_weights=False or a directory")
        else:
            self.module = _load(Path(model), dtype)
        nn.Module.to(self.module, device)
        self.module.eval().requires_grad_(False)
        self.version = 0
        self._max_batch = max_running_requests
        self._defined = load_weights
        self._updating = False
        self._asleep: list[torch.Size] | None = None
        self._abort = threading.Event()
        self._waiting: list[tuple[Request, Sampling]] = []

    def num_free_slots(self) -> int:
        """A batch, less what waits."""
        return self._max_batch - len(self._waiting)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See `RolloutEngine`.

        UserError if a prompt is empty, of another vocabulary, or too long with its response.
        """
        if not self.health():
            raise RuntimeError("the engine has no weights: finish an update first")
        for request in requests:
            self._check(request, sampling)
        if not self._waiting:
            self._abort.clear()
        self._waiting += [(request, sampling) for request in requests]

    def collect(self, timeout: float) -> list[Sample]:
        """Decode one batch, however long it takes; its samples."""
        if not self._waiting:
            return []
        # Neighbours in this order have equal prompts, which share a prefill, or little padding between them.
        self._waiting.sort(key=_likeness)
        first, sampling = self._waiting[0]
        alike = next(
            (
                i
                for i, (r, s) in enumerate(self._waiting)
                if s != sampling or r.remaining_tokens(s) != first.remaining_tokens(sampling)
            ),
            len(self._waiting),
        )
        size = min(alike, self._max_batch)
        batch, self._waiting = [request for request, _ in self._waiting[:size]], self._waiting[size:]
        return [r.prepend_partial(more) for r, more in zip(batch, self._decode(batch, sampling), strict=True)]

    def begin_update(self) -> None:
        """Open the weights for writing."""
        if self._asleep is not None:
            raise RuntimeError("the weights are asleep: call wake(weights=True) before an update")
        self._updating = True

    def parameters(self) -> dict[str, torch.Tensor]:
        """Name in the module -> its live tensor, buffers that are saved included; a tied head is not listed."""
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if all(tensor is not other for other in tensors.values()):
                tensors[name] = tensor
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def share(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take these tensors' memory as the weights of those names, where dtype and device are the engine's own."""
        for name, parameter in self.module.named_parameters():
            tensor = tensors.get(name)
            if tensor is not None and (tensor.dtype, tensor.device) == (parameter.dtype, parameter.device):
                parameter.data = tensor

    def end_update(self, version: int) -> None:
        """Take the written tensors into use as weights number `version`."""
        if not self._updating:
            raise RuntimeError("end_update without begin_update")
        self._updating, self._defined, self.version = False, True, version

    def sleep(self, *, weights: bool = True, kv: bool = True) -> None:
        """Free the weights. The key-value cache lives no longer than a call of `generate`."""
        if weights and self._asleep is None:
            self._asleep = [parameter.shape for parameter in self.module.parameters()]
            for parameter in self.module.parameters():
                parameter.data = parameter.new_empty(0)
            self._defined = False

    def wake(self, *, weights: bool = True, kv: bool = True) -> None:
        """Allocate the weights again; an update has to write them."""
        if weights and self._asleep is not None:
            for parameter, shape in zip(self.module.parameters(), self._asleep, strict=True):
                parameter.data = parameter.new_empty(shape)
            self._asleep = None

    def abort(self) -> None:
        """Cut the generation in progress after the token it is at; without one, nothing happens."""
        self._abort.set()

    def health(self) -> bool:
        """Whether the weights are there and no update is open."""
        return self._defined and not self._updating

    def _check(self, request: Request, sampling: Sampling) -> None:
        config = self.module.config.get_text_config()
        length, limit = len(request.prompt), config.max_position_embeddings
        if length == 0:
            raise UserError(f"the prompt of request {request.id} is empty: give at least one token")
        if length + sampling.max_new_tokens > limit:
            raise UserError(
                f"request {request.id}: a prompt of {length} tokens plus {sampling.max_new_tokens} new ones "
                f"exceeds the {limit} positions of the model: shorten the prompt or lower max_new_tokens"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < config.vocab_size:
            raise UserError(
                f"request {request.id} has a token outside the {config.vocab_size} of the model: "
                f"encode prompts with the tokenizer of this model"
            )

    @torch.inference_mode()
    def _decode(self, requests: list[Request], sampling: Sampling) -> list[Sample]:
        """What follows each context; all have the same budget."""
        budget = requests[0].remaining_tokens(sampling)
        if self._abort.is_set() or budget <= 0:
            return [Sample(request.id, (), (), (), "length" if budget <= 0 else "abort") for request in requests]
        # A sample that goes on draws what it would have drawn, had it not been cut.
        draws = torch.stack([uniforms(request.seed, sampling.max_new_tokens)[-budget:] for request in requests])
        cp_sizes = [request.context for request in requests]
        own = replace(sampling, max_new_tokens=budget)
        completions = decode(self.module, cp_sizes, draws, own, self._abort.is_set)
        return _samples(requests, completions, own, self.version)


def _likeness(waiting: tuple[Request, Sampling]) -> tuple[object, ...]:
    request, sampling = waiting
    return (
        (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop_token_ids, sampling.max_new_tokens),
        request.remaining_tokens(sampling),
        len(request.context),
        request.context,
    )


def _samples(requests: list[Request], completions: Completions, sampling: Sampling, version: int) -> list[Sample]:
    """Cut each row of the completions at its length and name the reason why it ended."""
    rows = zip(
        requests,
        completions.tokens.tolist(),
        completions.logprobs.tolist(),
        completions.lengths.tolist(),
        strict=True,
    )
    return [
        Sample(
            id=request.id,
            tokens=tuple(tokens[:length]),
            logprobs=tuple(logprobs[:length]),
            policy_versions=(version,) * length,
            finish=_finish(tokens[length - 1], length, sampling),
        )
        for request, tokens, logprobs, length in rows
    ]


def _finish(last: int, length: int, sampling: Sampling) -> Finish:
    if last in sampling.stop_token_ids:
        return "stop"
    return "length" if length == sampling.max_new_tokens else "abort"


def _read_config(directory: Path) -> PreTrainedConfig:
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} has no config.json: give the directory of a Hugging Face model")
    try:
        return AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / 'config.json'} cannot be read: {error}") from error


def _load(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Read the checkpoint, from safetensors alone, since other formats can run code."""
    attention = _attention(_read_config(directory))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{directory} has no readable safetensors weights: {error}") from error
    module, report = loaded
    if report["missing_keys"]:
        missing = min(report["missing_keys"])
        raise UserError(f"{directory} lacks tensor {missing}: complete the checkpoint or correct config.json")
    return module


def _allocate(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the module with undefined weights; ties, normally made by the initialisation, are made here."""
    with no_init_weights():
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_attention(config))
    module.tie_weights()
    return module


def _attention(config: PreTrainedConfig) -> str:
    """torch's kernel, but for Gemma 2: with it `transformers` leaves the soft cap of attention out without a word."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"
