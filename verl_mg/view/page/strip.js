// The seconds of all iterations, each a bar divided into its phases: an overview to choose from.

import { placeOf } from "./data.js";
import { hideTooltip, showTooltip, svg } from "./dom.js";
import { extent, seconds } from "./format.js";
import { inOrder, kind } from "./lanes.js";

const HEIGHT = 64;
const PHASE = "time/phase/";

/** Of more iterations than pixels, the distance of those that are shown. */
export const strideOf = (first, last, width) => Math.ceil((1.5 * (last - first + 1)) / width);

/** Bars of the iterations `first` to `last` from metrics by name; `choose` receives the clicked iteration. */
export function stripOf(curves, first, last, chosen, width, choose) {
  const total = curves.get("time/iteration") ?? { steps: [], values: [] };
  const slot = width / (last - first + 1);
  const stride = strideOf(first, last, width);
  const shown = (step) => step >= first && step <= last && (step - first) % stride === 0;
  const [, most] = extent(total.values.filter((_, i) => shown(total.steps[i])));
  const high = (value) => (value / most) * (HEIGHT - 4);
  const reached = new Map();
  const bars = [];
  const add = (step, value, css) => {
    if (!shown(step) || !(value > 0)) return;
    const begin = reached.get(step) ?? 0;
    reached.set(step, begin + value);
    if (high(value) < 0.3) return;
    const place = { x: (step - first) * slot, y: HEIGHT - high(begin + value) };
    bars.push(svg("rect", { class: css, ...place, width: slot * stride - (slot > 4 ? 1.5 : 0), height: high(value) }));
  };
  for (const [phase, { steps, values }] of phasesOf(curves))
    steps.forEach((step, i) => add(step, values[i], kind(phase)));
  total.steps.forEach((step, i) => add(step, total.values[i] - (reached.get(step) ?? 0), kind("idle")));
  const mark = { x: (chosen - first) * slot - 1, y: 0.5, width: slot + 1, height: HEIGHT - 1 };
  const under = (event) => first + Math.floor((event.clientX - picture.getBoundingClientRect().left) / slot);
  const showValues = (event) => {
    const place = placeOf(total.steps, under(event));
    const rows = [["took", seconds(total.values[place])]];
    if (total.steps.length) showTooltip(event.clientX, event.clientY, `iteration ${total.steps[place]}`, rows);
  };
  const picture = svg(
    "svg",
    {
      class: "strip",
      role: "img",
      "aria-label": "Seconds of each iteration",
      viewBox: `0 0 ${width} ${HEIGHT}`,
      onclick: (event) => choose(under(event)),
      onpointermove: showValues,
      onpointerleave: hideTooltip,
    },
    ...bars,
    svg("rect", { class: "chosen", ...mark }),
  );
  return picture;
}

function phasesOf(curves) {
  return [...curves]
    .filter(([name]) => name.startsWith(PHASE))
    .map(([name, curve]) => [name.slice(PHASE.length), curve])
    .sort(([a], [b]) => inOrder(a, b));
}
