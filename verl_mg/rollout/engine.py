"""What a rollout engine promises: token ids in, token ids and their log-probabilities out.

The life of an engine between two iterations, as its caller drives it:

    generate, [sleep, (training), wake,] begin_update, write parameters(), end_update(version), generate, ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from verl_mg.errors import UserError

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn; one for all the requests of a call.

    A token may be drawn if it is among the `top_k` most probable (0: no limit) and the tokens more probable
    than it hold less than `top_p` of the temperature-scaled distribution. Temperature 0 is greedy.

    Raises UserError for a value outside its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}: give at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}: give 0 for greedy, or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: give a number above 0 and up to 1, where 1 turns it off")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: give a positive number, or 0 to turn it off")


@dataclass(frozen=True)
class Request:
    """One sample to draw. Its randomness comes from `seed` alone, never from the requests beside it."""

    id: int
    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Sample:
    """The answer to one request.

    `tokens` are the response alone, a stop token included. `logprobs[t]` is that of `tokens[t]`, in nats,
    under the full distribution scaled by the temperature (by 1 for greedy): training can compute the same.
    `version` is that of the weights which wrote it.
    """

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    version: int


class RolloutEngine(Protocol):
    """One replica of the policy that writes samples."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        """One sample a request, in their order; blocks until all are done or `abort` is called."""
        ...

    def begin_update(self) -> None:
        """Open the weights for writing; no generation until `end_update`."""
        ...

    def parameters(self) -> dict[str, torch.Tensor]:
        """The tensors to write in place between `begin_update` and `end_update`, in the engine's own names.

        Ask again after `wake`: the tensors of before are gone.
        """
        ...

    def share(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use this memory for the weights of those names, for which no copy is then needed; an engine may decline.

        What the trainer writes there shows at once: to be called between `begin_update` and `end_update`.
        """
        ...

    def end_update(self, version: int) -> None:
        """Take the written tensors into use; samples report `version` from now on."""
        ...

    def sleep(self, *, weights: bool = True, kv: bool = True) -> None:
        """Give back the memory of the weights (their values are lost) and of the key-value cache."""
        ...

    def wake(self, *, weights: bool = True, kv: bool = True) -> None:
        """Take the memory again. Weights that slept have to be written by an update before generation."""
        ...

    def abort(self) -> None:
        """Cut the generation in progress, from any thread; samples come back as far as they got."""
        ...

    def health(self) -> bool:
        """Whether `generate` can be called now."""
        ...
