"""Decides whether the ranks of a job are started again after a loss.

exit code -9 after iterations 4, 7, 9      pauses of 0, 0 and 0 s: the job makes progress
exit code 3 three times after iteration 5  pauses of 0 and 1 s, then the job ends
exit code 2, a `UserError`                 the job ends
"""

from __future__ import annotations

from verl_mg.errors import EXIT_CODE

FIRST_PAUSE_SECONDS = 1.0
"""Pause before a restart after the same failure as the time before; it doubles each time."""
LONGEST_PAUSE_SECONDS = 60.0
MAX_SAME_FAILURES = 3
"""The job ends when the ranks have ended so often with the same code in the same iteration."""


class RestartPolicy:
    """The losses of a job so far."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._num_same = 0

    def pause(self, exit_code: int, iteration: int) -> float | None:
        """Returns the seconds to wait before a restart; None where the job ends. A negative code is minus a signal."""
        # Invalid input stays invalid, and a failure that comes again in the same iteration has a cause in the job.
        if exit_code == EXIT_CODE:
            return None
        failure = exit_code, iteration
        self._num_same = self._num_same + 1 if failure == self._last else 1
        self._last = failure
        if self._num_same >= MAX_SAME_FAILURES:
            return None
        if self._num_same == 1:
            return 0.0
        return min(FIRST_PAUSE_SECONDS * 2.0 ** (self._num_same - 2), LONGEST_PAUSE_SECONDS)
