// What each rank did in an iteration. Above: the seconds of all iterations, to choose from.

import { ask } from "./data.js";
import { el } from "./dom.js";
import { lanesOf, tableOf, withIdle } from "./lanes.js";
import { strideOf, stripOf } from "./strip.js";

const MOST_RANKS = 64;

export function timelineView(app) {
  const slider = el("input", {
    type: "range",
    min: 1,
    max: 1,
    step: 1,
    value: 1,
    "aria-label": "Iteration",
    oninput: () => choose(slider.value),
  });
  const exact = el("input", {
    type: "number",
    min: 1,
    step: 1,
    "aria-label": "Iteration number",
    onchange: () => choose(exact.value),
  });
  const step = (by, label, text) =>
    el("button", { type: "button", "aria-label": label, text, onclick: () => choose(Number(slider.value) + by) });
  const whole = el("button", { type: "button", text: "Whole iteration", disabled: true, onclick: () => zoom(null) });
  const strip = el("div");
  const empty = el("p", { class: "empty", text: "No time lines yet: they come with the first iteration." });
  const lanes = el("div");
  const node = el(
    "section",
    {},
    el(
      "div",
      { class: "toolbar" },
      el("label", {}, "Iteration", exact),
      step(-1, "Previous iteration", "‹"),
      slider,
      step(1, "Next iteration", "›"),
      whole,
    ),
    strip,
    empty,
    lanes,
  );
  let chosen = null;
  let range = null; // seconds that are shown; null: all
  let report = []; // of each run, the ranks' lines
  let everyRank = false;
  let curves = {}; // seconds of the first run by name of the metric
  let latest = 0;

  function limits() {
    const ends = app.runs.map((run) => run.about.timeline).filter((pair) => pair.length);
    return ends.length ? [Math.min(...ends.map(([first]) => first)), Math.max(...ends.map(([, last]) => last))] : null;
  }

  /** The newest iteration that all runs have. */
  function newest() {
    return Math.min(...app.runs.map((run) => run.about.timeline[1] ?? Infinity));
  }

  function choose(iteration) {
    const [first, last] = limits() ?? [1, 1];
    app.go("timeline", { iteration: Math.min(last, Math.max(first, Number(iteration) || last)) });
  }

  async function show(parameters) {
    const bounds = limits();
    empty.hidden = bounds !== null;
    if (!bounds) return;
    const [first, last] = bounds;
    const iteration = Math.min(last, Math.max(first, Number(parameters.iteration ?? chosen ?? newest())));
    if (iteration !== chosen) range = null;
    chosen = iteration;
    Object.assign(slider, { min: first, max: last });
    [slider.value, exact.value] = [chosen, chosen];
    const request = (latest += 1);
    const lines = app.runs.map((run) => ask("timeline", { run: run.number, iteration: chosen }));
    const [answers] = await Promise.all([Promise.all(lines), drawStrip()]);
    if (request !== latest) return; // the slider has moved on
    report = answers;
    draw();
  }

  function news(changed) {
    const bounds = limits();
    if (!bounds || (!changed && Number(slider.max) === bounds[1])) return;
    // A view of the newest iteration follows the run.
    const follows = chosen === null || chosen === Number(slider.max);
    if (follows && chosen !== bounds[1]) return choose(bounds[1]);
    return show({ iteration: chosen });
  }

  function zoom(to) {
    range = to;
    draw();
  }

  function width() {
    return Math.max(320, node.getBoundingClientRect().width);
  }

  async function drawStrip() {
    const [first, last] = [Number(slider.min), Number(slider.max)];
    const stride = strideOf(first, last, width());
    const wanted = [app.runs[0].about.metrics.version, first, stride].join();
    if (curves.key !== wanted) {
      const answer = await ask("strip", { run: 0, first, stride });
      curves = { key: wanted, seconds: new Map(Object.entries(answer)) };
    }
    strip.replaceChildren(stripOf(curves.seconds, first, last, chosen, width(), choose));
  }

  /** All runs on one scale of seconds. */
  function draw() {
    whole.disabled = range === null;
    const rows = report.map((ranks) => {
      const start = Math.min(...ranks.map((line) => line.start));
      return ranks.map((line) => ({ rank: line.rank, spans: withIdle(line.spans, line.start - start) }));
    });
    const lengths = rows.map((request) => Math.max(...request.map(({ spans }) => spans.at(-1)?.end ?? 0), 1e-6));
    const scale = range ?? [0, Math.max(...lengths)];
    lanes.replaceChildren(...app.runs.flatMap((run, i) => ofRun(run, rows[i], lengths[i], scale)));
  }

  function ofRun(run, rows, length, scale) {
    const title = el(
      "h3",
      app.runs.length > 1 ? { class: run.tint, text: `${run.mark}: ${run.about.name}` } : { text: "Ranks" },
    );
    if (!rows.length) return [title, el("p", { class: "empty", text: `No time line of iteration ${chosen}.` })];
    const some = everyRank ? rows : rows.slice(0, MOST_RANKS);
    const more =
      rows.length > some.length &&
      el("button", {
        type: "button",
        text: `Show all ${rows.length} ranks`,
        onclick: () => {
          everyRank = true;
          draw();
        },
      });
    return [title, lanesOf(some, scale, width(), zoom), more, tableOf(rows, length, chosen)].filter(Boolean);
  }

  window.addEventListener("resize", () => {
    if (!node.hidden && report.length) {
      drawStrip().catch(() => {});
      draw();
    }
  });

  return { node, show, news };
}
