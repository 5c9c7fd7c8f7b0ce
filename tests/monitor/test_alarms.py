"""Alarms: conditions, when they fire, what their URL receives, and the state that follows from earlier metrics."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.json_server import JsonRequest, JsonResponse, serving
from tests.helpers.launched import finished, torchrun, train_command, write_inputs
from tests.helpers.tiny_jobs import logged
from verl_mg.config import AlarmConfig
from verl_mg.config.alarm import Condition
from verl_mg.distributed.signals import EXIT_ALARM
from verl_mg.errors import UserError
from verl_mg.monitor import alarms
from verl_mg.monitor.alarms import Alarms, check_alarms
from verl_mg.monitor.status import read_status
from verl_mg.monitor.trackers.files import JsonlTracker


class Receiver(NamedTuple):
    """A server, and the bodies that it has received."""

    url: str
    received: list[dict[str, Any]]


@pytest.fixture
def receiver(monkeypatch) -> Iterator[Receiver]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    received = []

    def respond(request: JsonRequest) -> JsonResponse:
        received.append(request.body)
        return JsonResponse({})

    with serving(respond) as url:
        yield Receiver(f"{url}/alarm", received)


def alarm(when: str, **fields: Any) -> AlarmConfig:
    return AlarmConfig.model_validate({"when": when} | fields)


def checker(folder: Path, first_step: int = 0, **configured: AlarmConfig) -> Alarms:
    return Alarms(configured, "mine", folder / "metrics.jsonl", first_step)


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("< 0.01 for 5", Condition("<", 0.01, 5)),
        (">=-1e3", Condition(">=", -1000.0, 1)),
        (" == 0  for  2 ", Condition("==", 0.0, 2)),
        ("not finite for 3", Condition(None, 0.0, 3)),
    ],
)
def test_condition_is_parsed(text, condition):
    assert Condition.parse(text) == condition


@pytest.mark.parametrize("text", ["", "0.01", "=< 2", "= 2", "< low", "< nan", "> 1 for 0", "> 1 for", "not a number"])
def test_condition_invalid_text_is_refused(text):
    with pytest.raises(ValueError, match="not a condition"):
        Condition.parse(text)


def test_condition_holds_for_values_that_are_not_finite():
    above = Condition.parse("> 2")
    assert [above.holds(value) for value in (2.0, 2.5, math.nan, -math.inf)] == [False, True, True, True]
    assert [Condition.parse("not finite").holds(value) for value in (2.0, math.nan, math.inf)] == [False, True, True]


def test_alarm_fires_once_after_iterations_in_a_row(tmp_path, caplog):
    checked = checker(tmp_path, std=alarm("< 0.5 for 2"))
    values = [0.1, 0.9, 0.1, None, math.nan, 0.1, 0.9, 0.2, 0.3]  # None: an iteration without the metric
    for step, value in enumerate(values, 1):
        assert checked.check(step, {"std": value} if value is not None else {"other": 1.0}) == ""
    fired = [record.getMessage() for record in caplog.records]
    assert fired == ["alarm: std=nan in iteration 5 (< 0.5 for 2)", "alarm: std=0.3 in iteration 9 (< 0.5 for 2)"]


def test_alarm_that_stops_fires_again_after_as_many_iterations(tmp_path):
    checked = checker(tmp_path, loss=alarm("> 1 for 2", action="stop"))
    reasons = [checked.check(step, {"loss": 2.0}) for step in range(1, 5)]
    message = "alarm: loss=2 in iteration {} (> 1 for 2)"
    assert reasons == ["", message.format(2), "", message.format(4)]


@pytest.mark.parametrize("action", ["log", "stop"])
def test_alarm_state_follows_from_the_metrics_of_an_earlier_start(tmp_path, action):
    values = [2.0, 0.5, math.inf, 2.0, 2.0, 2.0, 0.5, 2.0, 2.0, 2.0]
    whole = checker(tmp_path, loss=alarm("> 1 for 3", action=action))
    expected = [whole.check(step, {"loss": value}) for step, value in enumerate(values, 1)]
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step, value in enumerate(values, 1):
        tracker.log(step, {"loss": value})
    tracker.close()
    for first in range(2, len(values)):
        resumed = checker(tmp_path, first, loss=alarm("> 1 for 3", action=action))
        reasons = [resumed.check(step, {"loss": values[step - 1]}) for step in range(first, len(values) + 1)]
        assert reasons == expected[first - 1 :], first


def test_alarm_unknown_metric_is_reported_once(tmp_path, caplog):
    names = ("reward/sdt", "eval/reward", "eval/rewrad")
    checked = Alarms({name: alarm("> 1") for name in names}, "mine", tmp_path / "metrics.jsonl", 0)
    for step in range(1, 7):
        checked.check(step, {"reward/std": 0.5} | ({"eval/reward": 0.1} if step % 3 == 0 else {}))
    assert [record.getMessage() for record in caplog.records] == [
        "alarm.reward/sdt: iteration 1 has no metric of this name; did you mean reward/std?",
        "alarm.eval/rewrad: iteration 3 has no metric of this name; did you mean eval/reward?",
    ]


def test_alarm_is_posted_to_its_url(tmp_path, receiver, monkeypatch, caplog):
    monkeypatch.setenv("MY_ALARMS", receiver.url)
    monkeypatch.setattr(alarms, "PAUSE_SECONDS", 0.01)
    configured = {
        "a": alarm("> 1", url=receiver.url),
        "b": alarm("not finite", url="$MY_ALARMS"),
        "c": alarm("> 1", url="http://127.0.0.1:1/"),  # nothing listens there
    }
    check_alarms(configured)
    checked = checker(tmp_path, **configured)
    assert checked.check(7, {"a": 2.0, "b": math.nan, "c": 2.0}) == ""
    checked.close()
    first, second = sorted(receiver.received, key=lambda body: body["metric"])
    assert first == {
        "text": "mine: alarm: a=2 in iteration 7 (> 1)",
        "run": "mine",
        "metric": "a",
        "value": 2.0,
        "iteration": 7,
        "when": "> 1",
        "action": "log",
    }
    assert (second["metric"], second["value"]) == ("b", "nan")
    assert "alarm.c.url: not delivered (ConnectError" in caplog.text


def test_check_alarms_without_its_variable_raises(monkeypatch):
    monkeypatch.delenv("MY_ALARMS", raising=False)
    with pytest.raises(UserError, match="alarm.a.url: the environment variable MY_ALARMS is not set"):
        check_alarms({"a": alarm("> 1", url="$MY_ALARMS")})


@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_alarm_stops_a_run_with_its_exit_code_and_a_checkpoint(tmp_path, receiver, starts):
    """Two ranks under the launcher; then the same run on one rank without a launcher."""
    inputs, output = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    stop = f"alarm={{actor/loss: {{when: '> 0 for 3', action: stop, url: '{receiver.url}'}}}}"
    for start, arguments in enumerate((torchrun(2), [])[:starts], 1):
        code, _, err = finished([*arguments, *train_command(inputs, output, stop)])
        assert code == EXIT_ALARM, err
        steps, status = 3 * start, read_status(output)
        assert (status.state, status.iteration, status.checkpoint) == ("left", steps, steps)
        assert status.message.startswith("stopped by alarm: actor/loss=")
        assert status.message.endswith(f"in iteration {steps} (> 0 for 3) after iteration {steps}")
        assert f"{status.message}; the same command resumes from there" in err
        assert [line["step"] for line in logged(output)] == list(range(1, steps + 1))
        assert receiver.received[-1]["iteration"] == steps
