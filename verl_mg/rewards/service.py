"""A reward from a service of the user's: JSON over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rewards.base import Reward, Sample
from verl_mg.rewards.http import JsonService


class Service:
    """Posts samples to `url`, up to `batch_size` at a time and `parallel` requests at once.

    It is sent {"samples": [{"prompt", "response", "answer", "record", "finish"}, ...]} and answers {"rewards": [...]},
    for each sample a number, or {"value": number, "parts": {name: number}, "answer": text or null}, of which only the
    value is needed. Keywords as in `JsonService`; the limit of requests holds for each rank.
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
        if batch_size < 1 or parallel < 1:
            raise UserError(f"batch_size is {batch_size}, parallel {parallel}: give at least 1")
        self.batch_size, self.parallel = batch_size, parallel
        self._service = JsonService(
            url, timeout=timeout, retries=retries, requests_per_second=requests_per_second, headers=headers
        )

    async def score_many(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward a sample. UserError naming the URL where the service fails for good, or answers rubbish."""
        answer = await self._service.post({"samples": [vars(sample) for sample in samples]})
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            raise self._rubbish(answer)
        if len(rewards) != len(samples):
            raise UserError(
                f"{self._service.url}: {len(rewards)} rewards for {len(samples)} samples; answer one for each"
            )
        return [self._reward(reward) for reward in rewards]

    def _reward(self, content: Any) -> Reward:
        fields = content if isinstance(content, dict) else {"value": content}
        value, parts, answer = fields.get("value"), fields.get("parts") or {}, fields.get("answer")
        sound = isinstance(parts, dict) and all(map(_is_number, [value, *parts.values()]))
        if not sound or not isinstance(answer, str | None):
            raise self._rubbish(content)
        assert isinstance(value, int | float)
        return Reward(value, parts, answer)

    def _rubbish(self, content: Any) -> UserError:
        return UserError(
            f'{self._service.url}: answered {content!r:.200}; answer {{"rewards": [...]}} with a number, or '
            '{"value": number, "parts": {name: number}}, for each sample'
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
