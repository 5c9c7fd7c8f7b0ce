"""Alarms on metrics: the conditions of the configuration, checked after each iteration on rank 0.

    when: "> 5 for 3"    values  6  7  8  9  4  6
                         count   1  2  3  4  0  1      fires once, at 3

Only rank 0 decides, since metrics of time differ between ranks; the ranks agree on a stop in the reduction that follows
each iteration anyway. Checkpoints have no state of alarms: a resumed run counts again from its own metrics.jsonl.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from tenacity import Retrying, stop_after_attempt, wait_fixed

from verl_mg.config import AlarmConfig
from verl_mg.config.alarm import Condition
from verl_mg.errors import UserError
from verl_mg.jsonl import read_lines

POST_SECONDS = 10.0  # time limit of a request to the URL of an alarm
POST_ATTEMPTS = 3
PAUSE_SECONDS = 1.0  # pause between two attempts
EVALUATION = "eval/"  # prefix of the metrics that only some iterations have

log = logging.getLogger(__name__)


def check_alarms(alarms: Mapping[str, AlarmConfig]) -> None:
    """Checks that the environment variables that alarms name are set; UserError otherwise."""
    for metric, alarm in alarms.items():
        if alarm.url is not None and not _address(alarm.url):
            name = alarm.url.removeprefix("$")
            raise UserError(f"alarm.{metric}.url: the environment variable {name} is not set. Set it to the URL.")


@dataclass
class _Watch:
    config: AlarmConfig
    condition: Condition
    count: int = 0  # iterations in a row in which the condition holds
    known: bool = False  # whether the metric was seen, or reported as unknown

    def update(self, value: float) -> bool:
        """Counts an iteration; returns whether the alarm fires, once until the condition does not hold any more."""
        self.count = self.count + 1 if self.condition.holds(value) else 0
        fires = self.count == self.condition.iterations
        if fires and self.config.action == "stop":
            self.count = 0  # the user who resumes the run knows; it stops again after as many iterations
        return fires


class Alarms:
    """Checks the metrics of each iteration, logs alarms and sends them to their URLs."""

    def __init__(self, alarms: Mapping[str, AlarmConfig], run: str, metrics: Path, first_step: int) -> None:
        self._run, self._posts = run, list[threading.Thread]()
        self._watches = {name: _Watch(alarm, Condition.parse(alarm.when)) for name, alarm in alarms.items()}
        for line in read_lines(metrics) if self._watches and metrics.exists() else ():
            if line["step"] < first_step:
                # The file has null for values that are not finite, which fulfil every condition.
                self._update({name: math.nan if value is None else value for name, value in line.items()})

    def check(self, step: int, metrics: Mapping[str, float]) -> str:
        """Checks the metrics of an iteration that is done; returns why the run must stop, "" without a reason."""
        reason = ""
        for name in self._update(metrics):
            alarm = self._watches[name].config
            message = f"alarm: {name}={metrics[name]:.6g} in iteration {step} ({alarm.when})"
            log.warning("%s", message)
            if alarm.url is not None:
                self._post(name, alarm, step, metrics[name], message)
            if alarm.action == "stop":
                reason = reason or message
        self._report_unknown(step, metrics)
        return reason

    def close(self) -> None:
        """Waits for requests that are not complete, at most for their time limit."""
        for post in self._posts:
            post.join(POST_SECONDS * POST_ATTEMPTS)

    def _update(self, metrics: Mapping[str, float]) -> list[str]:
        """Counts an iteration; returns the names of the alarms that fire."""
        present = [name for name in self._watches if name in metrics]
        for name in present:
            self._watches[name].known = True
        return [name for name in present if self._watches[name].update(metrics[name])]

    def _report_unknown(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns once of each metric that does not exist, as far as this iteration shows."""
        # Step 0 is the evaluation before training, and only some iterations are evaluated.
        evaluated = any(name.startswith(EVALUATION) for name in metrics)
        for name, watch in self._watches.items():
            expected = evaluated if name.startswith(EVALUATION) else step > 0
            if not watch.known and expected:
                watch.known = True
                nearest = difflib.get_close_matches(name, metrics, 1)
                remedy = f"; did you mean {nearest[0]}?" if nearest else ""
                log.warning("alarm.%s: iteration %d has no metric of this name%s", name, step, remedy)

    def _post(self, name: str, alarm: AlarmConfig, step: int, value: float, message: str) -> None:
        """Sends an alarm to its URL from a separate thread: a slow server does not delay training."""
        assert alarm.url is not None
        body = {
            "text": f"{self._run}: {message}",
            "run": self._run,
            "metric": name,
            "value": value if math.isfinite(value) else str(value),  # JSON has no NaN
            "iteration": step,
            "when": alarm.when,
            "action": alarm.action,
        }
        post = threading.Thread(target=_send, args=(name, _address(alarm.url), body), daemon=True)
        post.start()
        self._posts = [*(thread for thread in self._posts if thread.is_alive()), post]


def _address(url: str) -> str:
    """Returns the URL, or the value of the environment variable that it names."""
    return os.environ.get(url[1:], "") if url.startswith("$") else url


def _send(name: str, url: str, body: Mapping[str, object]) -> None:
    try:
        for attempt in Retrying(stop=stop_after_attempt(POST_ATTEMPTS), wait=wait_fixed(PAUSE_SECONDS), reraise=True):
            with attempt:
                httpx.post(url, json=body, timeout=POST_SECONDS).raise_for_status()
    except Exception as error:  # whatever is wrong with the URL, training continues
        log.warning("alarm.%s.url: not delivered (%s: %s)", name, type(error).__name__, error)
