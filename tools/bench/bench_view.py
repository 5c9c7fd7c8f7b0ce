"""Seconds of `verl-mg view` on a large run, in a real browser: first paint, lists, searches, building of the index.

    python -m tools.bench.bench_view                                        # 10,000 iterations of 1,000 samples
    python -m tools.bench.bench_view --iterations 200 --folder /tmp/run     # a smaller one, which is kept

The run is synthetic, in the format of a real one (`verl_mg.monitor.sample_schema`): words by Zipf's law, some in few
samples. It and its index are deleted at the end, unless `--folder` is given. tools/install/browser.sh installs the
browser. Times are the page's: from a key or a click until the list or the curves are drawn. Of searches the
first is until rows are listed, the second until all texts have been searched.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from verl_mg.monitor.sample_schema import PARTS, TURNS, FileMetadata, file_of, iteration_folder, schema
from verl_mg.monitor.sample_writer import ROWS_PER_TABLE
from verl_mg.view.index import FOLDER, stored_segments
from verl_mg.view.segments import Segment

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROMPT_PHRASES, RESPONSE_PHRASES, PHRASE_WORDS, PHRASES, WORDS = 2, 9, 4, 100_000, 30_000
PROMPT_WORDS, RESPONSE_WORDS = PROMPT_PHRASES * PHRASE_WORDS, RESPONSE_PHRASES * PHRASE_WORDS
GROUP = 8
METRICS = 60
RARE = "xylophone quartet"
"""Text of one sample in 40 iterations."""
PATIENCE = 600_000
"""Milliseconds."""
OTHERS = {
    **dict.fromkeys(("rollout_logprobs", "old_logprobs", "advantages"), pa.list_(pa.float32())),
}


# -- the run


def write_run(folder: Path, iterations: int, rows: int, seed: int = 0, samples: bool = True) -> None:
    """Writes a synthetic run with metrics and time lines."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"job:\n  seed: {seed}\n  output: {folder}\nalgorithm:\n  group_size: {GROUP}\n"
    )
    status = {
        "recipe": "grpo",
        "state": "running",
        "iteration": iterations,
        "iterations": iterations,
        "phase": "update",
    }
    (folder / "status.json").write_text(json.dumps(status | {"tokens_per_second": 51234.5, "eta_seconds": 0.0}))
    draw = np.random.default_rng(seed)
    phases = ("generate", "forward", "update", "weight_sync", "logging")
    names = ["reward/mean", "eval/reward", "time/iteration", *(f"time/phase/{phase}" for phase in phases)]
    names += [f"actor/metric_{number:02d}" for number in range(METRICS - len(names))]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, iterations + 1):
            values = (1 - math.exp(-4 * step / iterations)) + 0.05 * draw.standard_normal(len(names))
            values[3 : 3 + len(phases)] *= 0.9 / len(phases)
            file.write(json.dumps({"step": step} | dict(zip(names, values.tolist(), strict=True))) + "\n")
    (folder / "timeline").mkdir()
    with (folder / "timeline" / "rank-0.jsonl").open("w") as file:
        for step in range(1, iterations + 1):
            spans = [[phase, float(place), place + 0.9] for place, phase in enumerate(phases)]
            file.write(json.dumps({"iteration": step, "start": 1.0e9 + 5.0 * step, "spans": spans}) + "\n")
    if samples:
        with ProcessPoolExecutor(2) as pool:
            list(
                pool.map(
                    partial(_write_iterations, folder / "samples", rows), np.array_split(range(1, iterations + 1), 16)
                )
            )


def vocabulary() -> list[str]:
    """Returns words of syllables, the frequent ones short."""
    draw = random.Random(0)
    consonants, vowels = "b c d f g h j k l m n p r s t v w z st tr ch th".split(), "a e i o u ai ea".split()  # noqa: SIM905
    syllables = [consonant + vowel for consonant in consonants for vowel in vowels]
    words: set[str] = set()
    while len(words) < WORDS:
        words.add(
            "".join(draw.choices(syllables, k=draw.choice((1, 2, 2, 3, 3, 4)))) + draw.choice(("", "n", "s", "ng"))
        )
    return sorted(words, key=lambda word: (len(word), word))


def _write_iterations(samples: Path, rows: int, iterations: np.ndarray) -> None:
    words = vocabulary()
    draw = np.random.default_rng(0)
    numbers = (len(words) ** draw.random((PHRASES, PHRASE_WORDS)) - 1).astype(np.int32)  # Zipf's law
    phrases = pa.array([" ".join(words[number] for number in phrase) for phrase in numbers.tolist()])
    # Token columns are not searched: they are the same in all iterations.
    length = PROMPT_WORDS + RESPONSE_WORDS
    tokens = _lists(pa.array(numbers[: rows * length // PHRASE_WORDS].reshape(-1), pa.int32()), rows, length)
    pieces = _lists(pa.array(words).take(tokens.values), rows, length)
    mask = np.tile(np.arange(length) >= PROMPT_WORDS, rows)
    floats = _lists(
        pa.array(np.where(mask, draw.standard_normal(rows * length), 0).round(1), pa.float32()), rows, length
    )
    fixed = {"tokens": tokens, "pieces": pieces, "loss_mask": _lists(pa.array(mask), rows, length)}
    fixed |= dict.fromkeys(OTHERS, floats)
    fixed["turns"] = pa.array([[{"by": "policy", "start": PROMPT_WORDS, "end": length}]] * rows, TURNS)
    fixed["parts"] = pa.array([[("exact", 1.0)]] * rows, PARTS)
    fixed["source"] = pa.array(["sums" if number % 3 else "carry" for number in range(rows)])
    fixed["finish"] = pa.array(["length" if number % 20 == 7 else "stop" for number in range(rows)])
    for iteration in iterations.tolist():
        _write_iteration(samples, iteration, rows, phrases, fixed)


def _write_iteration(samples: Path, iteration: int, rows: int, phrases: pa.Array, fixed: dict[str, pa.Array]) -> None:
    draw = np.random.default_rng(iteration)
    prompts = np.repeat(draw.integers(0, PHRASES, (-(-rows // GROUP), PROMPT_PHRASES)), GROUP, 0)[:rows]
    responses = draw.integers(0, PHRASES, (rows, RESPONSE_PHRASES))
    texts = {name: _texts(phrases, places) for name, places in (("prompt", prompts), ("response", responses))}
    if iteration % 40 == 1:
        spoken = texts["response"].to_pylist()
        spoken[iteration % rows] += f" {RARE} {iteration}"
        texts["response"] = pa.array(spoken)
    ids = np.arange(rows) + (iteration - 1) * rows
    rewards = draw.binomial(1, 0.5, rows).astype(np.float32) + 0.1 * draw.integers(0, 3, rows).astype(np.float32)
    length = PROMPT_WORDS + RESPONSE_WORDS
    same: dict[str, object] = {
        "iteration": iteration,
        "call": 0,
        "policy_version": iteration - 1,
        "prompt_length": PROMPT_WORDS,
    }
    same |= {"truncated": False, "answer": "42", "conversation": None}
    metadata = FileMetadata("grpo", "synthetic", 1, rows, ({},))
    file_schema = schema(OTHERS, metadata)
    columns: dict[str, pa.Array] = fixed | texts
    columns |= {name: pa.repeat(pa.scalar(value, file_schema.field(name).type), rows) for name, value in same.items()}
    columns |= {"sample_id": pa.array(ids), "trajectory": pa.array(ids), "group": pa.array(ids // GROUP)}
    columns |= {"prompt_id": pa.array(ids // GROUP % 5000), "reward": pa.array(rewards)}
    columns["policy_versions"] = _lists(pa.array(np.full(rows * length, iteration - 1)), rows, length)
    table = pa.table([columns[name].cast(file_schema.field(name).type) for name in file_schema.names], file_schema)
    file = file_of(iteration_folder(samples, iteration), 0)
    file.parent.mkdir(parents=True)
    with parquet.ParquetWriter(file, file_schema, compression="zstd") as writer:
        for begin in range(0, rows, ROWS_PER_TABLE):
            writer.write_table(table.slice(begin, ROWS_PER_TABLE))


def _lists(values: pa.Array, rows: int, length: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1) * length, pa.int32()), values)


def _texts(phrases: pa.Array, places: np.ndarray) -> pa.Array:
    return pc.binary_join(_lists(phrases.take(pa.array(places.reshape(-1))), *places.shape), " ")


# -- the browser


@contextmanager
def viewing(*folders: Path) -> Iterator[tuple[str, int]]:
    """Starts `verl-mg view` over folders; gives its address and the id of its process."""
    command = [sys.executable, "-m", "verl_mg", "view", *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().split()[1], process.pid
        finally:
            process.terminate()


@contextmanager
def browsing() -> Iterator[Callable[[], Page]]:
    """Starts a browser; gives a function that opens a page."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium does not put root in its sandbox
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)

        def open_page() -> Page:
            page = browser.new_page(viewport={"width": 1360, "height": 900})
            page.set_default_timeout(PATIENCE)
            return page

        yield open_page
        browser.close()


class Measurement:
    """Seconds of what a person does on a page, each in a line."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._count = page.locator("#view-samples .count").first

    def first_paint(self, url: str, what: str) -> None:
        """Opens the page, until its first contents and until its curves are drawn."""
        started = time.perf_counter()
        self._page.goto(url, wait_until="commit")
        self._page.locator("article path.line").first.wait_for()
        drawn = time.perf_counter() - started
        entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
        show(f"{what}: first paint", self._page.evaluate(entry))
        show(f"{what}: curves drawn", drawn)

    def listed(self, what: str, action: Callable[[], object], whole: bool = True) -> None:
        """Performs an action, until rows are listed, and until all are known."""
        self._count.evaluate("node => { node.textContent = ''; node.className = 'count' }")
        started = time.perf_counter()
        action()
        filled = "node => node.textContent !== ''"
        self._wait(filled)
        seconds = [time.perf_counter() - started]
        if whole and self._count.evaluate("node => node.classList.contains('busy')"):
            self._wait(f"node => ({filled})(node) && !node.classList.contains('busy')")
            seconds.append(time.perf_counter() - started)
        show(f"{what}: {self._count.inner_text()}", *seconds)

    def _wait(self, condition: str) -> None:
        node = self._count.element_handle()
        self._page.wait_for_function(condition, arg=node, polling="raf")


def show(what: str, *seconds: float) -> None:
    """Prints a line of the report."""
    print(f"{what:96} " + "  ".join(f"{value:7.2f} s" for value in seconds), flush=True)


def peak_gib(pid: int) -> float:
    """Returns the largest memory that a process has had, in GiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 2**20


def wait_for_index(run: Path, pid: int) -> None:
    """Waits until all settled iterations are in the index, and prints its figures."""
    started = time.perf_counter()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    segments: dict[str, Segment] = {}
    iterations = sum(1 for _ in (run / "samples").iterdir())
    while sum(len(segment.versions) for segment in segments.values()) < iterations:
        time.sleep(1.0)
        segments = stored_segments(run / FOLDER, segments)
    seconds = time.perf_counter() - started
    times = Path(f"/proc/{children[0]}/stat").read_text().rsplit(")", 1)[1].split()
    processor = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
    text = sum(segment.text_bytes() for segment in segments.values()) / 1e9
    size = sum(file.stat().st_size for file in (run / FOLDER).rglob("*") if file.is_file()) / 1e9
    show(
        f"index of {text:.2f} GB of text, {size:.2f} GB on disk, {peak_gib(int(children[0])):.2f} GiB of memory",
        seconds,
    )
    show(f"  processor time, {1000 * text / processor:.1f} MB/s", processor)


def measure_samples(measure: Measurement, page: Page, rows: int) -> None:
    """Measures lists and searches of samples."""
    form = page.locator("#view-samples")
    text = form.get_by_label("Search prompts and responses")
    select = form.get_by_label("Iteration", exact=True)
    measure.listed("samples of the newest iteration", lambda: page.get_by_role("link", name="Samples").click())
    measure.listed("samples of all iterations", lambda: select.select_option("all"))
    for column in ("reward", "tokens"):
        measure.listed(f"sorted by {column}", form.get_by_role("button", name=column).click)
    measure.listed("reward from 1.1", lambda: form.get_by_label("reward from").fill("1.1"))
    measure.listed("source sums", lambda: form.get_by_label("Source").select_option("sums"))
    measure.listed("in no order again", form.get_by_role("button", name="Clear filters").click)
    measure.listed("samples of all iterations", lambda: select.select_option("all"))
    form.get_by_label("Page", exact=True).fill("100000")
    measure.listed("page 100,000", lambda: page.keyboard.press("Enter"))
    for query in (
        RARE,
        "XYLOPHONE",
        f"quartet {rows}",
        "no sample contains this",
        "phone qua",
        "stugain hagu",
    ):
        measure.listed(f"search '{query}'", partial(text.fill, query))
    measure.listed("  all words", lambda: form.get_by_label("Find").select_option("true"))
    measure.listed("search all words 'quartet xylophone'", lambda: text.fill("quartet xylophone"))
    measure.listed("  sorted by reward", form.get_by_role("button", name="reward").click)
    measure.listed("  with reward from 1.1", lambda: form.get_by_label("reward from").fill("1.1"))
    form.get_by_role("button", name="Clear filters").click()
    measure.listed("samples of all iterations", lambda: select.select_option("all"))
    measure.listed("search 'the', first samples", lambda: text.fill("the"), whole=False)


def main() -> None:
    """Writes the run and prints all times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=1000, help="samples of an iteration")
    parser.add_argument("--runs", type=int, default=4, help="runs whose curves are shown together")
    parser.add_argument(
        "--folder", type=Path, help="folder of the runs and their index, kept, and used again where it exists"
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="verl-mg-bench-view-"))
    runs = [folder / f"run{number}" for number in range(options.runs)]
    try:
        started = time.perf_counter()
        for number, run in enumerate(runs):
            if not run.exists():
                write_run(run, options.iterations, options.rows, number, samples=number == 0)
        show(f"wrote {options.iterations:,} iterations of {options.rows:,} samples", time.perf_counter() - started)
        indexed = any((runs[0] / FOLDER).glob("0*"))
        with browsing() as open_page:
            if not indexed:
                with viewing(runs[0]) as (url, pid):
                    page = open_page()
                    measure = Measurement(page)
                    measure.first_paint(url, "without an index")
                    measure.listed("samples of the newest iteration", page.get_by_role("link", name="Samples").click)
                    wait_for_index(runs[0], pid)
            started = time.perf_counter()
            with viewing(runs[0]) as (url, pid):
                show("start of verl-mg view", time.perf_counter() - started)
                page = open_page()
                measure = Measurement(page)
                measure.first_paint(url, "one run")
                measure_samples(measure, page, options.rows)
                print(f"memory of the server: {peak_gib(pid):.2f} GiB, mapped files of the index included")
            with viewing(*runs) as (url, _):
                Measurement(open_page()).first_paint(url, f"{len(runs)} runs, mean and band")
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
