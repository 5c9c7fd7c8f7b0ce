"""A signal is noted and agreed upon; a second SIGTERM ends a process in whatever it is doing."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import torch.distributed as dist

from verl_mg.distributed.signals import LEFT, REPEATED_AFTER, Signals

STUCK = """
from torch.distributed import HashStore
from verl_mg.distributed.signals import Signals
with Signals().heeded():
    print("ready", flush=True)
    HashStore().get("never set")  # lets no handler of Python run until it returns
"""


def test_a_signal_is_noted_and_handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signals = Signals()
        with signals.heeded():
            assert not signals.asked
            os.kill(os.getpid(), number)
            assert signals.asked
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_forked_worker_can_be_terminated():
    signals = Signals()
    with signals.heeded():
        fork = multiprocessing.get_context("fork")
        ready = fork.Event()
        worker = fork.Process(target=lambda: (ready.set(), time.sleep(60)), daemon=True)
        worker.start()
        assert ready.wait(30)
        worker.terminate()
        worker.join(30)
        assert worker.exitcode == -signal.SIGTERM and not signals.asked
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.asked


def agreed(path):
    answers, signals = [], Signals()
    with signals.heeded():
        answers.append(signals.asked_to_leave())
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.environ[LEFT] = path
        answers.append(signals.asked_to_leave())
    os.environ.pop(LEFT, None)
    return answers


def test_one_rank_is_asked_and_all_leave(ranks, tmp_path):
    assert ranks.run(3, agreed, str(tmp_path / "left")) == [[False, True]] * 3
    assert (tmp_path / "left").read_text() == str(int(signal.SIGUSR1))


def test_the_second_sigterm_ends_at_once():
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        process.terminate()  # the same order, by two ways
        time.sleep(REPEATED_AFTER + 0.5)
        assert process.poll() is None
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
