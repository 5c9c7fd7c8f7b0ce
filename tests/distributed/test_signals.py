"""Stop requests by signals: recorded, agreed on by all ranks, and a second SIGTERM that ends a process at once."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import torch.distributed as dist

from verl_mg.distributed.launcher import STOP_CODE, VARIABLE, Launcher
from verl_mg.distributed.signals import REPEATED_SIGTERM_SECONDS, Signals
from verl_mg.distributed.stall_dump import innermost_user_frame, main_stack, main_waits

STUCK = """
import sys
from types import SimpleNamespace
from torch.distributed import HashStore
from verl_mg.distributed import signals

def clock():
    print("asks for the time", flush=True)
    return float(sys.stdin.readline())

signals.time = SimpleNamespace(monotonic=clock)
with signals.Signals().handled():
    print("ready", flush=True)
    HashStore().get("never set")  # no Python handler runs until it returns
"""


def test_handled_with_a_signal_records_it_and_restores_handlers():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signals = Signals()
        with signals.handled():
            assert not signals.stop_requested
            os.kill(os.getpid(), number)
            assert signals.stop_requested
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_handled_in_a_forked_worker_lets_sigterm_end_it():
    signals = Signals()
    with signals.handled():
        fork = multiprocessing.get_context("fork")
        ready = fork.Event()
        worker = fork.Process(target=lambda: (ready.set(), time.sleep(6000)), daemon=True)
        worker.start()
        assert ready.wait(600)
        worker.terminate()
        worker.join(600)
        assert worker.exitcode == -signal.SIGTERM and not signals.stop_requested
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.stop_requested


def stop_answers(path):
    answers, signals = [], Signals()
    with signals.handled():
        answers.append(signals.any_rank_stop_requested())
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.environ[VARIABLE] = path
        answers.append(signals.any_rank_stop_requested())
    os.environ.pop(VARIABLE, None)
    return answers


def test_stop_request_on_one_rank_is_seen_by_all_ranks(ranks, tmp_path):
    assert ranks.run(3, stop_answers, str(tmp_path)) == [[False, True]] * 3
    assert Launcher(tmp_path).number(STOP_CODE) == 128 + signal.SIGUSR1


def test_second_sigterm_ends_a_blocked_process():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", STUCK], **pipes, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        for seconds in (0.0, REPEATED_SIGTERM_SECONDS - 0.1, REPEATED_SIGTERM_SECONDS + 0.1):
            # It lives after the second one, which is the same request, delivered twice.
            process.terminate()
            assert process.stdout.readline() == "asks for the time\n"
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        assert process.wait(600) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def test_main_stack_lists_innermost_frame_first():
    innermost, caller, *_ = main_stack()
    assert innermost.startswith("verl_mg/distributed/stall_dump.py:") and innermost.endswith(" _main_frame")
    assert caller.endswith(" main_stack")
    assert not main_waits()


def test_innermost_user_frame_skips_libraries():
    stack = ["lib/python3.11/threading.py:9 wait", "recipes/mine.py:3 iteration", "verl_mg/run/loop.py:5 run"]
    assert innermost_user_frame(stack) == "recipes/mine.py:3 in iteration"
    assert innermost_user_frame([]) == "an unknown line"
