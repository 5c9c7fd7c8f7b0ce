// Spans of phases: a lane for each rank, and a table of their seconds.

import { el, hideTooltip, showTooltip, svg } from "./dom.js";
import { seconds, ticks } from "./format.js";

const MEANING = {
  generate: "engines generate samples",
  weight_sync: "weights are sent to the engines (reshard)",
  forward: "forward passes: log-probs, values",
  update: "forward and backward passes of training",
  optimizer: "gradients are cleared and checked, Adam's step",
  row_dispatch: "rows are sent between ranks",
  role_compute: "a role's work around its models",
  other: "the recipe's computations",
  evaluation: "around the generation of an evaluation",
  checkpoint: "weights and optimizer are copied for a checkpoint",
  logging: "metrics and samples are written",
  wait_generate: "waiting for engines of other ranks",
  wait_reward: "waiting for rewards",
  wait_update: "waiting for gradients of other ranks",
  wait_role_compute: "waiting for the work of a role on other ranks",
  wait_weight_sync: "waiting for the weight sync of other ranks",
  idle: "in no phase",
};
const KNOWN = Object.keys(MEANING);
const [LEFT, RIGHT, ROW, GAP, AXIS] = [66, 4, 24, 6, 24];

/** The class that gives a phase its colour. */
export const kind = (phase) =>
  phase.startsWith("wait_") ? "phase-wait" : `phase-${KNOWN.includes(phase) ? phase : "unknown"}`;

/** As the table lists them. */
export const inOrder = (a, b) =>
  ((KNOWN.indexOf(a) + 100) % 100) - ((KNOWN.indexOf(b) + 100) % 100) || a.localeCompare(b);

/** Spans later by `late`, and between them those in which the rank was in no phase. */
export function withIdle(spans, late) {
  const matches = [];
  let reached = 0;
  for (const [phase, begin, end] of spans) {
    if (begin + late - reached > 1e-4) matches.push({ phase: "idle", begin: reached, end: begin + late });
    matches.push({ phase, begin: begin + late, end: end + late });
    reached = end + late;
  }
  return matches;
}

/**
 * A lane a rank; dragging chooses a part of it.
 * [from, to]: the seconds that are shown; zoom: called with those that were chosen, null for all.
 */
export function lanesOf(rows, [from, to], width, zoom) {
  const height = rows.length * (ROW + GAP) + AXIS;
  const x = (second) => LEFT + ((second - from) / (to - from)) * (width - LEFT - RIGHT);
  const secondAt = (event) => {
    const place =
      ((event.clientX - picture.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT)) * (to - from) + from;
    return Math.min(to, Math.max(from, place));
  };
  const drawn = rows.flatMap((row, i) => {
    const y = i * (ROW + GAP);
    const label = svg("text", {
      class: "tick",
      x: LEFT - 8,
      y: y + ROW / 2 + 4,
      "text-anchor": "end",
      text: `rank ${row.rank}`,
    });
    const seen = row.spans.filter(({ begin, end }) => end > from && begin < to && x(end) - x(begin) > 0.15);
    return [
      label,
      ...seen.map((span) =>
        rectangle(row.rank, span, Math.max(LEFT, x(span.begin)), Math.min(width - RIGHT, x(span.end)), y),
      ),
    ];
  });
  const axis = ticks(from, to, width / 110).flatMap((second) => [
    svg("line", { class: "grid", x1: x(second), x2: x(second), y1: 0, y2: height - AXIS }),
    svg("text", { class: "tick", x: x(second), y: height - 6, "text-anchor": "middle", text: seconds(second) }),
  ]);
  const chosenPart = svg("rect", { class: "selection", y: 0, height: height - AXIS, width: 0 });
  const picture = svg(
    "svg",
    { class: "lanes", viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" },
    ...axis,
    ...drawn,
    chosenPart,
  );
  letChoose(picture, chosenPart, x, secondAt, zoom);
  return picture;
}

function letChoose(picture, chosenPart, x, secondAt, zoom) {
  let began = null;
  const ends = (event) => [began, secondAt(event)].sort((p, q) => p - q);
  picture.onpointerdown = (event) => (began = secondAt(event));
  picture.onpointermove = (event) => {
    if (began === null) return;
    const [a, b] = ends(event);
    chosenPart.setAttribute("x", x(a));
    chosenPart.setAttribute("width", x(b) - x(a));
  };
  picture.onpointerup = (event) => {
    if (began === null) return;
    const [a, b] = ends(event);
    began = null;
    if (x(b) - x(a) > 4) zoom([a, b]);
  };
  picture.onpointerleave = () => {
    began = null;
    chosenPart.setAttribute("width", 0);
  };
  picture.ondblclick = () => zoom(null);
}

function rectangle(rank, { phase, begin, end }, left, right, y) {
  const showValues = (event) =>
    showTooltip(event.clientX, event.clientY, phase, [
      ["takes", seconds(end - begin)],
      ["from", seconds(begin)],
      ["to", seconds(end)],
      ["rank", rank],
      ["", MEANING[phase] ?? ""],
    ]);
  const width = Math.max(right - left, 0.4);
  return svg("rect", {
    class: `span ${kind(phase)}`,
    "data-phase": phase,
    "data-rank": rank,
    x: left,
    y,
    width,
    height: ROW,
    rx: Math.min(3, width / 4),
    onpointermove: showValues,
    onpointerleave: hideTooltip,
  });
}

/** The same in words, and what the colours mean. */
export function tableOf(rows, length, iteration) {
  const sums = new Map();
  rows.forEach((row, i) => {
    for (const { phase, begin, end } of row.spans) {
      if (!sums.has(phase)) sums.set(phase, new Array(rows.length).fill(0));
      sums.get(phase)[i] += end - begin;
    }
  });
  const lines = [...sums]
    .sort(([a], [b]) => inOrder(a, b))
    .map(([phase, each]) => {
      const mean = each.reduce((a, b) => a + b, 0) / each.length;
      const [least, most] = [Math.min(...each), Math.max(...each)];
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, el("span", { class: `key ${kind(phase)}` }), phase),
        ...[seconds(mean), seconds(least), seconds(most), `${((mean / length) * 100).toFixed(1)} %`].map((text) =>
          el("td", { class: "number", text }),
        ),
        el("td", { class: "meaning", text: MEANING[phase] ?? "" }),
      );
    });
  const heads = ["phase", "mean", "least", "most", "share", ""].map((text, i) =>
    el("th", { scope: "col", class: i && i < 5 ? "number" : null, text }),
  );
  const caption = el("caption", {
    text: `Seconds of ${rows.length} ranks in iteration ${iteration}, which took ${seconds(length)}`,
  });
  return el("table", { class: "phases" }, caption, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...lines));
}
