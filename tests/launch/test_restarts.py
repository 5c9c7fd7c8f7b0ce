"""The decision about a restart."""

from verl_mg.launch.agent import MAX_SAME_FAILURES, RestartPolicy

KILLED, LOST, INVALID = -9, 3, 2


def test_pause_with_progress_between_losses_is_none():
    policy = RestartPolicy()
    assert [policy.pause(KILLED, iteration) for iteration in range(8)] == [0.0] * 8


def test_pause_without_progress_grows_and_the_job_ends():
    policy = RestartPolicy()
    pauses = [policy.pause(LOST, 5) for _ in range(MAX_SAME_FAILURES)]
    assert pauses == [0.0, 1.0, None]


def test_pause_of_another_failure_in_the_same_iteration_starts_again():
    policy = RestartPolicy()
    assert [policy.pause(code, 5) for code in (LOST, LOST, KILLED)] == [0.0, 1.0, 0.0]


def test_pause_of_invalid_input_ends_the_job():
    assert RestartPolicy().pause(INVALID, 1) is None
