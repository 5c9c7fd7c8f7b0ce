"""The page in a real browser, used only by pointer and keyboard."""

import json
import random
import re

import pytest

from tests.helpers.json_lines import read_lines, write_lines
from tests.view.runs import GROUP, HOSTILE, PROMPTS, metrics_of, write_run, write_samples
from verl_mg.view.index import TAIL

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright; tools/install/browser.sh installs it")
from tests.view.pages import panel, tooltip, turn_to  # noqa: E402 - needs playwright

expect = sync_api.expect
COUNT = PROMPTS * GROUP
TIMES = "\N{MULTIPLICATION SIGN}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [write_run(root / "grpo", 12), write_run(root / "dapo", 10, seed=1, state="finished")]


def metrics(folder):
    return read_lines(folder / "metrics.jsonl")


def slide(locator, value):
    """As a person does it: with the keys."""
    locator.focus()
    locator.press("Home" if value == "least" else "End")


# -- curves


def card(page, name):
    return page.locator(f"article[data-metric='{name}']")


def test_curves_of_two_runs_share_a_chart_with_tooltips(visit, folders):
    page = visit(*folders)
    reward = card(page, "reward/mean")
    for mark in "AB":
        expect(reward.locator(f"path.line.run-{mark}")).to_have_count(1)
    expect(page.locator("details.group summary")).to_contain_text(
        ["reward 2", "eval 1", "response 2", "actor 4", "rollout 1", "time 4"]
    )
    expect(card(page, "time/iteration")).to_be_hidden()  # folded up at first
    slide(page.get_by_label("Smoothing"), "least")
    expect(reward.locator("path.raw")).to_have_count(0)
    reward.locator(".chart").hover(position={"x": 200, "y": 60})
    title, values = tooltip(page)
    step = int(re.fullmatch(r"reward/mean, step (\d+)", title)[1])
    for folder in folders:
        assert float(values[folder.name]) == pytest.approx(metrics(folder)[step]["reward/mean"], rel=1e-3)
    # Another chart shows the same step, and keys move along it.
    expect(card(page, "response/length").locator(".cursor circle")).to_have_count(2)
    page.mouse.move(0, 0)
    expect(page.locator(".cursor circle")).to_have_count(0)
    loss = card(page, "actor/loss").locator(".chart")
    loss.focus()
    loss.press("ArrowLeft")
    title, values = tooltip(page)
    assert title == "actor/loss, step 12"
    assert float(values["grpo"]) == pytest.approx(metrics(folders[0])[12]["actor/loss"], rel=1e-3)


def test_curves_can_be_searched_and_pinned(visit, folders):
    page = visit(folders[0])
    page.get_by_label("Search metrics").fill("PHASE gen")
    expect(page.locator("article.card:visible")).to_have_count(1)
    expect(card(page, "time/phase/generate").locator("path.line")).to_be_visible()  # its group is opened
    page.get_by_label("Search metrics").fill("none of them")
    expect(page.get_by_text("No metric is called none of them.")).to_be_visible()
    page.get_by_label("Search metrics").fill("")
    card(page, "actor/kl").hover()
    page.get_by_role("button", name="Pin actor/kl").click()
    for _ in range(2):
        first = page.locator("details.group").first
        expect(first.locator("summary")).to_contain_text("Pinned 1")
        expect(first.locator("article")).to_have_attribute("data-metric", "actor/kl")
        page.reload()
    small = card(page, "actor/kl").bounding_box()["height"]
    card(page, "actor/kl").hover()
    page.get_by_role("button", name="Enlarge actor/kl").click()
    assert card(page, "actor/kl").bounding_box()["height"] > 1.5 * small


def test_curves_follow_a_running_job(visit, tmp_path):
    folder = write_run(tmp_path / "run", 3)
    page = visit(folder)
    expect(card(page, "reward/mean").locator(".latest")).to_have_text(re.compile("0"))
    with (folder / "metrics.jsonl").open("a") as file:
        line = {"step": 4, **metrics_of(4, random.Random(0)), "reward/mean": 0.125, "new/one": 7}
        file.write(json.dumps(line) + "\n")
        file.write('{"step": 5, "reward/mean": 0.2')
    expect(card(page, "reward/mean").locator(".latest")).to_have_text("0.125")
    expect(card(page, "new/one").locator(".latest")).to_have_text("7")
    assert page.locator(".state").inner_text() == "running"


def test_page_of_an_empty_run_has_a_message(visit, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    page = visit(tmp_path / "run")
    expect(page.get_by_text("No metrics yet")).to_be_visible()
    turn_to(page, "Time line")
    expect(page.get_by_text("No time lines yet")).to_be_visible()
    turn_to(page, "Samples")
    expect(page.get_by_text("No such samples.")).to_be_visible()


# -- time lines


def test_timeline_shows_lanes_and_phases(visit, folders):
    page = visit(*folders, tab="Time line")
    # The newest iteration that both have.
    expect(page.get_by_label("Iteration number")).to_have_value("10")
    expect(page.locator("svg.lanes")).to_have_count(2)
    page.get_by_role("button", name="Previous iteration").click()
    expect(page.get_by_label("Iteration number")).to_have_value("9")
    expect(page.locator("table.phases caption").first).to_contain_text("iteration 9")
    line = json.loads((folders[0] / "timeline" / "rank-1.jsonl").read_text().splitlines()[8])
    phase, begin, end = line["spans"][0]
    lanes = page.locator("svg.lanes").first
    lanes.locator("rect[data-rank='1'][data-phase=generate]").hover()
    title, values = tooltip(page)
    assert title == phase == "generate" and values["rank"] == "1"
    assert float(values["takes"].removesuffix(" s")) == pytest.approx(end - begin, rel=1e-3)
    rows = page.locator("table.phases").first.locator("tbody th").all_inner_texts()
    assert rows[:3] == ["generate", "weight_sync", "forward"] and rows[-2:] == ["wait_generate", "idle"]
    slide(panel(page).get_by_label("Iteration", exact=True), "least")
    expect(page.get_by_label("Iteration number")).to_have_value("1")
    expect(page.locator("table.phases caption").first).to_contain_text("iteration 1,")


def test_timeline_can_be_zoomed(visit, folders):
    page = visit(folders[0], tab="Time line")
    lanes = page.locator("svg.lanes")
    sync = lanes.locator("rect[data-rank='0'][data-phase=weight_sync]")
    before, box = sync.bounding_box(), lanes.bounding_box()
    page.mouse.move(before["x"] - 20, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(before["x"] + before["width"] + 20, box["y"] + 12, steps=3)
    page.mouse.up()
    expect(page.get_by_role("button", name="Whole iteration")).to_be_enabled()
    assert sync.bounding_box()["width"] > 3 * before["width"]
    expect(lanes.locator("rect[data-phase=generate]")).to_have_count(0)
    page.get_by_role("button", name="Whole iteration").click()
    assert sync.bounding_box()["width"] == pytest.approx(before["width"], rel=0.01)
    strip = page.locator("svg.strip").bounding_box()
    page.mouse.click(strip["x"] + strip["width"] * 3.5 / 12, strip["y"] + 40)
    expect(page.get_by_label("Iteration number")).to_have_value("4")


# -- samples


def shown(page):
    return page.locator("table.samples tbody tr")


def cells(page, name):
    place = page.locator("table.samples th").evaluate_all(f"all => all.findIndex(th => th.matches('.{name}'))")
    return page.locator(f"table.samples tbody td:nth-child({place + 1})").all_inner_texts()


def counted(page, text):
    expect(page.locator("#view-samples .count")).to_have_text(re.compile(text))


def test_samples_can_be_filtered_sorted_and_searched(visit, folders):
    page = visit(folders[0], tab="Samples")
    counted(page, f"1 to {COUNT} of {COUNT} samples")
    assert set(cells(page, "iteration")) == {"12"}  # the newest
    page.get_by_role("button", name="reward").click()
    expect(page.locator("th.reward")).to_have_attribute("aria-sort", "descending")
    expect(shown(page)).to_have_count(COUNT)
    rewards = [float(text) for text in cells(page, "reward")]
    assert rewards == sorted(rewards, reverse=True)
    page.get_by_label("reward from").fill("0.25")
    page.get_by_label("reward to").fill("0.75")
    within = sum(0.25 <= value <= 0.75 for value in rewards)
    assert 0 < within < COUNT
    counted(page, f"of {within} samples")
    page.get_by_label("Finish").select_option("length")
    expect(shown(page).first).to_contain_text("length")
    counted(page, r"of \d samples")
    assert set(cells(page, "finish")) == {"length"}
    # What is shown is a link.
    before = cells(page, "sample_id")
    page.reload()
    expect(shown(page)).to_have_count(len(before))
    assert cells(page, "sample_id") == before
    expect(page.get_by_label("reward from")).to_have_value("0.25")
    page.get_by_role("button", name="Clear filters").click()
    counted(page, f"of {COUNT} samples")
    panel(page).get_by_label("Iteration", exact=True).select_option("all")
    counted(page, f"1 to 50 of {12 * COUNT} samples")
    page.get_by_role("button", name="Next page").click()
    counted(page, "51 to 100 of")
    page.get_by_label("Source").select_option("carry")
    counted(page, f"1 to 50 of {4 * 12 * COUNT // 12} samples")
    page.get_by_label("Search prompts and responses").fill("PLUS 11 makes")
    counted(page, "1 to (6|9|1[0-9]) of")
    assert all("plus 11 makes" in text for text in cells(page, "response"))
    page.get_by_label("Search prompts and responses").fill("no one says this")
    expect(page.get_by_text("No such samples.")).to_be_visible()


def test_sample_dialog_shows_tokens(visit, folders):
    page = visit(folders[0], tab="Samples")
    page.get_by_role("button", name=f"Open sample {11 * COUNT + 1}", exact=True).click()
    sheet = page.get_by_role("dialog")
    expect(sheet.locator(".turn h4")).to_have_text(["policy", "tool", "policy"])
    expect(sheet.locator("dl.facts")).to_contain_text("exact")
    expect(sheet.get_by_text("10 to 11")).to_be_visible()  # two versions of the weights wrote it
    expect(sheet.locator(".prompt")).to_have_text("What is 9 + 17?\n")
    expect(sheet.locator(".siblings button")).to_have_count(GROUP)
    colour = sheet.get_by_label("Colour tokens by")
    expect(colour).to_have_value("advantages")
    token, answer = sheet.locator(".turn.policy .token").first, sheet.locator(".turn.tool .token").first
    background = "node => getComputedStyle(node).backgroundColor"
    plain = answer.evaluate(background)  # a tool's words have no advantage
    seen = {"plain": plain, "advantages": token.evaluate(background)}
    token.hover()
    title, values = tooltip(page)
    assert title == '"<tool>"' and values["token"] == "1007, at 7" and "rollout_logprobs" in values
    for name in ("old-rollout", "rollout_logprobs", "policy_versions"):
        colour.select_option(name)
        expect(sheet.locator(".legend")).to_be_visible()
        seen[name] = token.evaluate(background)
        assert answer.evaluate(background) == plain
    assert len(set(seen.values())) >= 4
    colour.select_option("old-rollout")
    token.hover()
    _, values = tooltip(page)
    gap = float(values["old_logprobs"]) - float(values["rollout_logprobs"])
    assert float(values["log-prob: old - rollout"]) == pytest.approx(gap, abs=2e-3)
    colour.select_option("plain")
    assert token.evaluate(background) == plain
    sheet.get_by_role("button", name="Next sample").click()
    expect(sheet.locator("h2")).to_have_text(f"Sample {11 * COUNT + 2}")
    page.keyboard.press("Escape")
    expect(sheet).to_be_hidden()


def test_sample_dialog_escapes_text(visit, folders):
    page = visit(*folders, tab="Samples")
    expect(shown(page).first.locator("td.response")).to_contain_text("<script>window.injected = 1</script><img")
    shown(page).first.locator("td.response").click()
    sheet = page.get_by_role("dialog")
    expect(sheet.locator(".token").first).to_have_text(HOSTILE)
    sheet.locator(".token").first.hover()
    assert tooltip(page)[0] == json.dumps(HOSTILE)
    page.keyboard.press("Escape")
    turn_to(page, "Side by side")
    expect(page.locator("button.answer")).to_have_count(2 * GROUP)
    page.locator(".prompts button").get_by_text("What is 9 + 17").click()
    expect(page.locator("button.answer").first).to_contain_text(HOSTILE)
    assert page.locator("main script, main img, dialog img, dialog script").count() == 0


# -- two runs


def test_compare_shows_two_runs(visit, folders):
    page = visit(*folders, tab="Side by side")
    expect(panel(page).get_by_label("Iteration", exact=True)).to_have_value("10")
    expect(page.locator(".prompts li")).to_have_count(PROMPTS)
    gaps = [abs(float(text)) for text in page.locator(".prompts .gap").all_inner_texts()]
    assert gaps == sorted(gaps, reverse=True)
    panel(page).get_by_label("Iteration", exact=True).fill("3")
    panel(page).get_by_label("Iteration", exact=True).press("Enter")
    expect(page.locator(".prompts button", has_text="What is 3 + 5?")).to_be_visible()
    page.locator(".prompts button", has_text="What is 4 + 7?").click()
    for mark in "AB":
        column = page.get_by_role("region", name=f"Run {mark}")
        expect(column.locator("button.answer")).to_have_count(GROUP)
        expect(column.locator("button.answer").nth(1)).to_contain_text("<tool>4+7</tool>")
    page.get_by_role("region", name="Run B").locator("button.answer").first.click()
    expect(page.get_by_role("dialog").locator(".prompt")).to_have_text("What is 4 + 7?\n")
    page.keyboard.press("Escape")
    turn_to(page, "Samples")
    panel(page).get_by_label("Run", exact=True).select_option("B: dapo")
    expect(panel(page).get_by_label("Iteration", exact=True)).to_contain_text("newest (10)")
    expect(shown(page).locator("td:first-child")).to_have_text(["10"] * COUNT)


def test_page_reports_a_server_that_has_ended(visit, folders):
    page = visit(folders[0])
    page.route("**/api/**", lambda route: route.abort())
    expect(page.locator("#notice")).to_contain_text("Is verl-mg view still running?")
    turn_to(page, "Time line")
    turn_to(page, "Samples")
    expect(page.locator("#view-samples .count")).not_to_be_empty()
    page.unroute("**/api/**")
    expect(page.locator("#notice")).to_be_hidden()
    page.complaints[:] = [text for text in page.complaints if "ERR_FAILED" not in text]


# -- many iterations, many runs


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Three runs that differ in their seed, and one of another configuration; 3,000 steps each."""
    root = tmp_path_factory.mktemp("seeds")
    folders = []
    for seed, name in enumerate(("one", "two", "three", "other")):
        folder = write_run(root / name, 1, seed)
        rate = 2 if name == "other" else 1
        (folder / "config.yaml").write_text(f"job: {{seed: {seed}}}\nactor: {{lr: {rate}}}\n")
        lines = [{"step": step, "x": seed + (9.0 if step == 1234 else 0.001 * step)} for step in range(1, 3001)]
        write_lines(folder / "metrics.jsonl", lines)
        folders.append(folder)
    return folders


def test_curves_of_seeds_are_a_mean_with_a_band(visit, seeds):
    page = visit(*seeds)
    chart = card(page, "x")
    slide(page.get_by_label("Smoothing"), "least")
    expect(chart.locator("path.line")).to_have_count(2)
    expect(chart.locator("path.band")).to_have_count(1)
    expect(page.get_by_role("list", name="Curves").locator("li")).to_have_text([f"one {TIMES} 3lr=1", "otherlr=2"])
    expect(chart.locator(".chart")).to_have_attribute("aria-label", re.compile("4 at step 3000.* 6 at step 3000"))
    chart.locator(".chart").focus()
    page.keyboard.press("ArrowLeft")
    title, values = tooltip(page)
    assert (title, values[f"one {TIMES} 3"], values["other"]) == ("x, step 3000", "4 (3 to 5)", "6")
    page.get_by_label("Seeds").select_option("each run")
    expect(chart.locator("path.line")).to_have_count(4)
    expect(chart.locator("path.band")).to_have_count(0)
    turn_to(page, "Side by side")
    expect(page.locator("button.answer")).to_have_count(4 * GROUP)


def test_curves_keep_extremes_and_can_be_zoomed(visit, seeds):
    page = visit(seeds[0])
    slide(page.get_by_label("Smoothing"), "least")
    line = card(page, "x").locator("path.line")
    expect(card(page, "x").locator("path.raw")).to_have_count(0)
    # The one step of 9 is as high as the picture, less its margins.
    expect(line).to_have_attribute("d", re.compile(r" 1[0-9]\.\d(L|$)"))
    assert len(line.get_attribute("d").split("L")) < 1500
    box = card(page, "x").locator(".chart").bounding_box()
    page.mouse.move(box["x"] + 46 + 0.7 * (box["width"] - 60), box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 46 + 0.8 * (box["width"] - 60), box["y"] + 60, steps=3)
    page.mouse.up()
    expect(page.get_by_role("button", name="All steps")).to_be_enabled()
    expect(card(page, "x").locator("text.tick", has_text="2200")).to_be_visible()
    page.get_by_role("button", name="All steps").click()
    expect(card(page, "x").locator("text.tick", has_text="1000")).to_be_visible()


def test_samples_of_many_iterations_are_indexed_while_the_run_continues(visit, tmp_path):
    folder = write_run(tmp_path / "run", TAIL + 8)
    page = visit(folder)
    page.viewer.runs[0].samples.index.start()
    turn_to(page, "Samples")
    panel(page).get_by_label("Iteration", exact=True).select_option("all")
    counted(page, rf"^1 to 50 of {(TAIL + 8) * COUNT} samples$")
    page.get_by_label("Page", exact=True).fill("3")
    page.keyboard.press("Enter")
    counted(page, "^101 to 150 of")
    draw = random.Random(0)
    for iteration in range(TAIL + 9, TAIL + 12):
        write_samples(folder, iteration, draw)
    page.get_by_label("Search prompts and responses").fill(HOSTILE[:20].upper())
    counted(page, f"of {TAIL + 11} samples$")  # one of each iteration
    expect(shown(page).first.locator("mark")).to_have_text(HOSTILE[:20])
    page.get_by_label("Find").select_option("all words")
    page.get_by_label("Search prompts and responses").fill("plus  and")
    expect(page.get_by_text("No such samples.")).to_be_visible()
    page.get_by_label("Search prompts and responses").fill("makes 11  plus")
    expect(shown(page).first.locator("mark").first).to_be_visible()
    panel(page).get_by_label("Iteration", exact=True).select_option("range")
    page.get_by_label("iteration from").fill("2")
    page.get_by_label("iteration to").fill("3")
    expect(shown(page).first.locator("td").first).to_have_text(re.compile("^[23]$"))
    assert set(cells(page, "iteration")) <= {"2", "3"}
