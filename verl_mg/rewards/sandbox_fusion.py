"""The test cases of `rewards.code`, run on a Sandbox Fusion server (github.com/bytedance/SandboxFusion)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rewards.base import Reward, Sample
from verl_mg.rewards.code_tests import read_tests, run_tests
from verl_mg.rewards.http import JsonService
from verl_mg.sandbox import Outcome

ANSWER_SECONDS = 60.0
"""Beside the seconds of a program: to wait for a free place on the server, and to get there and back."""


class SandboxFusion:
    """As `code.score`, by `POST {url}/run_code`; how well programs are confined is up to the server.

    url: without the path, such as http://sandbox:8080. Other keywords as in `code.score` and `JsonService`.
    """

    def __init__(
        self,
        url: str,
        field: str | None = None,
        seconds: float = 10.0,
        memory_mb: int = 1024,
        partial: bool = False,
        retries: int = 4,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if seconds <= 0 or memory_mb <= 0:
            raise UserError(f"seconds is {seconds}, memory_mb {memory_mb}: give positive limits")
        self._field, self._seconds, self._memory_mb, self._partial = field, seconds, memory_mb, partial
        self._service = JsonService(
            f"{url.rstrip('/')}/run_code", timeout=seconds + ANSWER_SECONDS, retries=retries, headers=headers
        )

    async def score(self, sample: Sample) -> Reward:
        """See `cases.judge`. UserError where the server fails for good."""
        return await run_tests(sample.response, read_tests(sample, self._field), self._run, self._partial)

    async def _run(self, program: str, stdin: str) -> Outcome:
        body = {
            "code": program,
            "language": "python",
            "stdin": stdin,
            "run_timeout": self._seconds,
            "memory_limit_MB": self._memory_mb,
        }
        answer = await self._service.post(body, _problem)
        result = answer.get("run_result") or {}
        stdout, stderr = str(result.get("stdout") or ""), str(result.get("stderr") or "")
        if result.get("status") == "TimeLimitExceeded":
            return Outcome(stdout, stderr, "timeout")
        finished = answer["status"] == "Success" and result.get("status") == "Finished"
        return Outcome(stdout, stderr, "ok" if finished and result.get("return_code") == 0 else "error")


def _problem(answer: Any) -> str | None:
    """Success and Failed are of the program, anything else of the server."""
    if isinstance(answer, dict) and answer.get("status") in ("Success", "Failed"):
        return None if isinstance(answer.get("run_result"), dict | None) else f"the answer {answer!r:.200}"
    return f"the answer {answer!r:.200}"
