"""Does the program of a response pass the test cases of the record? Run in the sandbox of this machine."""

from verl_mg.rewards.base import Reward, Sample
from verl_mg.rewards.code_tests import read_tests, run_tests
from verl_mg.sandbox import Outcome, run_python_async

OUTPUT_BYTES = 1 << 20


async def score(
    sample: Sample, field: str | None = None, seconds: float = 10.0, memory_mb: int = 1024, partial: bool = False
) -> Reward:
    """1.0 where the last fenced Python block of the response passes all test cases, else 0.0; see `cases.judge`.

    What a program must write is compared out here, where it cannot reach it; so are results of functions and both
    sides of `assert f(x) == literal`. Within its reach are only tests that are more than that (HumanEval's `check`,
    `assert isinstance(f(x), list)`): they are made in its own process, and a program that searches that process for
    the marker of the run could report that it passes them.

    The cases of a sample run one after another, so that a rank runs as many programs at once as it has workers.

    Args:
        sample: with its test cases in the record, in one of the forms of `rewards.cases`.
        field: of the record, where they are; None: the first of the usual ones.
        seconds: for each run, the start of the interpreter included: one a stdin case, one for all calls together.
        memory_mb: for each run.
        partial: the share of the cases that pass, in place of all or nothing.

    Raises:
        UserError: no test cases, or a limit that is not positive.
    """

    async def run(program: str, stdin: str) -> Outcome:
        return await run_python_async(
            program, stdin=stdin, seconds=seconds, memory_mb=memory_mb, output_bytes=OUTPUT_BYTES
        )

    return await run_tests(sample.response, read_tests(sample, field), run, partial)
