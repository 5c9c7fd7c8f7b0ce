"""Reward for programs that pass test cases on a Sandbox Fusion server (github.com/bytedance/SandboxFusion)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_mg.errors import UserError
from verl_mg.http_client import JsonService
from verl_mg.rewards.code import read_tests, run_tests
from verl_mg.rewards.reward import Reward, Sample
from verl_mg.sandbox import Outcome

# Added to the time limit of a program: waiting for a free worker of the server, and the network.
ANSWER_SECONDS = 60.0


class SandboxFusion:
    """Scores like `code.score`, with `POST {url}/run_code`. The server is responsible for isolating programs."""

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
        """Checks the options; connects with the first sample.

        Args:
            url: address of the server without a path, such as http://sandbox:8080.
            field, seconds, memory_mb, partial: see `code.score`.
            retries, headers: see `JsonService`.
        """
        if seconds <= 0 or memory_mb <= 0:
            raise UserError(f"seconds={seconds}, memory_mb={memory_mb}: out of range. Give positive limits.")
        self._field, self._seconds, self._memory_mb, self._partial = field, seconds, memory_mb, partial
        self._service = JsonService(
            f"{url.rstrip('/')}/run_code", timeout=seconds + ANSWER_SECONDS, retries=retries, headers=headers
        )

    async def score(self, sample: Sample) -> Reward:
        """Runs the test cases as `run_tests` does; UserError where the server fails permanently."""
        return await run_tests(sample.response, read_tests(sample, self._field), self._run, self._partial)

    async def _run(self, program: str, stdin: str) -> Outcome:
        limits = {"run_timeout": self._seconds, "memory_limit_MB": self._memory_mb}
        body = {"code": program, "language": "python", "stdin": stdin, **limits}
        response = await self._service.post(body, _problem)
        result = response.get("run_result") or {}
        stdout, stderr = str(result.get("stdout") or ""), str(result.get("stderr") or "")
        if result.get("status") == "TimeLimitExceeded":
            return Outcome(stdout, stderr, "timeout")
        finished = response["status"] == "Success" and result.get("status") == "Finished"
        return Outcome(stdout, stderr, "ok" if finished and result.get("return_code") == 0 else "error")


def _problem(response: Any) -> str | None:
    """Success and Failed describe the program; any other status is a problem of the server."""
    is_of_program = isinstance(response, dict) and response.get("status") in ("Success", "Failed")
    is_fine = is_of_program and isinstance(response.get("run_result"), dict | None)
    return None if is_fine else f"the response {response!r:.200}"
