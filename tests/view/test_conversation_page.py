"""Conversations of agents in a real browser."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.view.agent_runs import (
    AGENT_SCHEMA,
    COMMAND,
    ERROR,
    FAILED,
    FORKED,
    LOG,
    MAX_SEGMENTS,
    TRAJECTORIES,
    conversation,
    write_agent_run,
)
from tests.view.runs import HOSTILE

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright; tools/install/browser.sh installs it")
from tests.view.pages import tooltip, turn_to  # noqa: E402 - needs playwright

expect = sync_api.expect


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_agent_run(tmp_path_factory.mktemp("runs") / "agents", iterations=1)


def open_sample(page, number):
    turn_to(page, "Samples")
    page.get_by_role("button", name=f"Open sample {number}", exact=True).click()
    return page.get_by_role("dialog")


@pytest.mark.nightly
def test_sample_list_filters_agents(visit, run):
    page = visit(run, tab="Samples")
    rows, count = page.locator("table.samples tbody tr"), page.locator("#view-samples .count")
    expect(count).to_have_text(f"1 to {TRAJECTORIES + 2} of {TRAJECTORIES + 2} samples")
    expect(rows.nth(FORKED + 2)).to_have_text(re.compile("4 *2 *3$"))  # turns, segment, segments
    page.get_by_label("Agent", exact=True).select_option("failed")
    expect(rows).to_have_count(1)
    expect(rows.locator(".finish")).to_have_text("failed")
    expect(rows.locator(".finish")).to_have_attribute("title", ERROR)
    page.get_by_label("Agent", exact=True).select_option("any")
    page.get_by_label("turns from").fill("4")
    page.get_by_label("turns to").fill("5")
    expect(count).to_have_text("1 to 4 of 4 samples")


def test_conversation_shows_turns_calls_and_segments(visit, run):
    page = visit(run)
    sheet = open_sample(page, FORKED * MAX_SEGMENTS + 2)  # linked from its last segment
    turns = sheet.locator("article.exchange")
    expect(turns).to_have_count(4)
    expect(turns.locator("h5").filter(has_text="system")).to_have_count(1)
    first = turns.nth(0)
    expect(first.locator(".message.user .text")).to_have_text(HOSTILE)
    expect(first.locator(".reasoning .text")).to_be_hidden()
    first.locator(".reasoning summary").click()
    expect(first.locator(".reasoning .text")).to_have_text(f"First {HOSTILE}")
    shell = first.locator("[data-call=call-b]")
    # Lines of a program are lines, and numbers are as they were written.
    written = shell.locator(".arguments").inner_text()
    assert written == json.dumps(COMMAND, indent=2).replace("\\n", "\n")
    expect(shell.locator(".result .text")).to_have_text(["printed 1"] * 2)  # once in each branch
    expect(shell.locator(".result h5")).to_have_text(["result, in turn 2", "result, in turn 3"])
    expect(first.locator("[data-call=call-a] .result .text")).to_have_text(f"found {HOSTILE}")
    second = turns.nth(1)
    expect(second.locator("header")).to_contain_text("segment 0policy50 + 12 tokenslengthat 4 s, 2 s")
    expect(second.locator(".call")).to_contain_text("arguments are not JSON")
    expect(second.locator(".call")).to_contain_text("no result")
    assert len(second.locator(".message > div .text").inner_text()) == 4000
    second.get_by_role("button", name="show all 9,000 characters").click()
    assert len(second.locator(".message > div .text").inner_text()) == 9000
    expect(turns.nth(2).locator(".message.tool")).to_have_text("result of an unknown callof no call")
    expect(turns.nth(3).locator("header")).to_contain_text("not trained")
    segments = sheet.locator("table.segments tbody tr")
    expect(segments).to_have_text(
        [
            re.compile("^0 *90 *40 *. *turn 1"),
            re.compile("^1 *70 *20 *31 tokens of segment 0 *turn 3"),
            re.compile("^2 *25 *0 *. *turn 4"),
        ]
    )
    expect(segments.nth(2)).to_have_attribute("aria-current", "true")
    segments.nth(1).get_by_role("button", name="turn 3").click()
    expect(turns.nth(2)).to_be_focused()
    segments.nth(1).get_by_role("button", name="tokens").click()
    expect(sheet.locator("h2")).to_have_text(f"Sample {FORKED * MAX_SEGMENTS + 1}: segment 1 of trajectory {FORKED}")
    expect(sheet.locator(".token").first).to_be_visible()
    expect(sheet.locator(".prompt")).to_have_text("What is 3 + 5?\n")  # what the policy was given, not the data's
    sheet.get_by_role("button", name="Conversation").click()
    expect(turns).to_have_count(4)
    assert page.locator("dialog img, dialog script, dialog i, dialog b").count() == 0


def test_conversation_shows_times_and_the_log(visit, run):
    page = visit(run)
    sheet = open_sample(page, FORKED * MAX_SEGMENTS)
    lanes = sheet.locator(".turn-lanes")
    box, bars = lanes.bounding_box(), [lanes.locator("rect").nth(i).bounding_box() for i in range(4)]
    places = [((bar["x"] - box["x"]) / box["width"], bar["width"] / box["width"]) for bar in bars]
    assert places == [pytest.approx(place, abs=0.01) for place in ((0.05, 0.1), (0.4, 0.2), (0.7, 0.1), (0.9, 0.1))]
    assert bars[0]["y"] == bars[1]["y"] < bars[2]["y"] < bars[3]["y"]
    lanes.locator("rect").nth(1).hover()
    title, values = tooltip(page)
    assert title == "turn 2, length" and values["after the turn before"] == "2.5 s" and values["took"] == "2 s"
    lanes.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "ArrowDown", "Enter"):
        lanes.press(key)
    expect(sheet.locator("article.exchange").nth(1)).to_be_focused()
    log, field = sheet.get_by_role("log"), sheet.get_by_label("Filter lines of the log")
    assert log.inner_text().splitlines() == LOG
    field.fill("SCRIPT")
    expect(log).to_have_text(HOSTILE)
    field.press("ArrowLeft")  # moves in the field, not to another sample
    expect(sheet.locator("aside .count")).to_have_text(f"1 of {len(LOG)} lines")
    sheet.locator(".chips button").first.click()
    expect(sheet.locator("h2")).to_have_text("Sample 0: segment 0 of trajectory 0")
    page.keyboard.press("ArrowRight")
    expect(sheet.locator("h2")).to_have_text(f"Sample {MAX_SEGMENTS}: segment 0 of trajectory 1")
    page.keyboard.press("Escape")
    sheet = open_sample(page, FAILED * MAX_SEGMENTS)
    expect(sheet.locator(".failure")).to_have_text(f"The agent failed: {ERROR}")
    assert sheet.locator(".failure").evaluate("node => getComputedStyle(node).color") == "rgb(180, 35, 24)"
    expect(sheet.locator(".chip.bad")).to_have_count(1)


@pytest.mark.nightly
def test_conversation_of_a_megabyte_lays_out_only_what_is_visible(visit, run, tmp_path):
    folder = write_agent_run(tmp_path / "long", iterations=1)
    file = folder / "samples" / "000001" / "rank-0.parquet"
    row = pq.read_table(file).slice(0, 1).to_pylist()[0]
    text = json.dumps(conversation(200, words=250))
    assert len(text) > 2**20
    pq.write_table(pa.Table.from_pylist([row | {"conversation": text}], AGENT_SCHEMA), file)
    page = visit(folder)
    sheet = open_sample(page, 0)
    turns = sheet.locator("article.exchange")
    expect(turns).to_have_count(200)
    visible = "all => all.filter(n => n.firstChild.checkVisibility({contentVisibilityAuto: true})).length"
    assert 0 < turns.evaluate_all(visible) < 20
    sheet.locator(".turn-lanes rect").nth(150).click(force=True)
    expect(turns.nth(150)).to_be_in_viewport()
    assert turns.evaluate_all(visible) < 20
