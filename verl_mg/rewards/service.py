"""Reward from a user's HTTP service that accepts and returns JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from verl_mg.errors import UserError
from verl_mg.http_client import JsonService
from verl_mg.rewards.reward import Reward, Sample


class Service:
    """Posts samples in batches to a URL.

    A request is {"samples": [{"prompt", "response", "answer", "record", "finish", "num_tokens"}, ...]}, the response
    {"rewards": [...]}: for each sample a number, or {"value": number, "parts": {name: number}, "answer": text or
    null}, where only the value is required.
    """

    def __init__(
        self,
        url: str,
        batch_size: int = 16,
        timeout: float = 60.0,
        retries: int = 4,
        requests_per_second: float = 0.0,
        headers: Mapping[str, str] | None = None,
        parallel: int = 4,
    ) -> None:
        """Checks the options; connects with the first sample.

        Args:
            url, timeout, retries, headers: see `JsonService`.
            batch_size: largest number of samples per request.
            requests_per_second: rate limit of each rank; 0 for no limit.
            parallel: requests of each rank at the same time.
        """
        if batch_size < 1 or parallel < 1:
            raise UserError(f"batch_size={batch_size}, parallel={parallel}: out of range. Give at least 1.")
        self.batch_size, self.parallel = batch_size, parallel
        self._service = JsonService(
            url, timeout=timeout, retries=retries, requests_per_second=requests_per_second, headers=headers
        )

    async def score_many(self, samples: Sequence[Sample]) -> list[Reward]:
        """Returns one reward per sample; UserError where the service fails permanently or its response is malformed."""
        response = await self._service.post({"samples": [_fields(sample) for sample in samples]})
        rewards = response.get("rewards") if isinstance(response, dict) else None
        if not isinstance(rewards, list):
            raise self._malformed(response)
        if len(rewards) != len(samples):
            raise UserError(
                f"{self._service.url}: {len(rewards)} rewards for {len(samples)} samples. Return one per sample."
            )
        return [self._reward(reward) for reward in rewards]

    def _reward(self, content: Any) -> Reward:
        fields = content if isinstance(content, dict) else {"value": content}
        value, parts, answer = fields.get("value"), fields.get("parts") or {}, fields.get("answer")
        valid = isinstance(parts, dict) and all(map(_is_number, [value, *parts.values()]))
        if not valid or not isinstance(answer, str | None):
            raise self._malformed(content)
        assert isinstance(value, int | float)
        return Reward(value, parts, answer)

    def _malformed(self, content: Any) -> UserError:
        return UserError(
            f'{self._service.url}: the response {content!r:.200} is malformed. Return {{"rewards": [...]}} with a '
            'number or {"value": number, "parts": {name: number}} per sample.'
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _fields(sample: Sample) -> dict[str, Any]:
    # Services that know no agents with names may refuse a field more.
    return {name: value for name, value in vars(sample).items() if name != "replies" or value}
