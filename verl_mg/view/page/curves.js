// Curves of metrics, grouped by the part before the slash; they can be pinned to the top.

import { Charts, smoothed } from "./chart.js";
import { el } from "./dom.js";
import { number } from "./format.js";

const FIRST = ["reward", "eval", "response", "actor", "critic"];
const LAST = ["time"];
const PINNED = "Pinned";
const MEMORY = "verl_mg.pinned";

const groupOf = (name) => (name.includes("/") ? name.slice(0, name.indexOf("/")) : "other");
const placeOfGroup = (group) => {
  if (group === PINNED) return -1;
  if (LAST.includes(group)) return 1000;
  return FIRST.includes(group) ? FIRST.indexOf(group) : 100;
};
const inOrder = (a, b) => placeOfGroup(a) - placeOfGroup(b) || a.localeCompare(b);

export function curvesView(app) {
  const charts = new Charts();
  const cards = new Map();
  const groups = new Map();
  const pinned = new Set(JSON.parse(localStorage.getItem(MEMORY) ?? "[]"));

  const search = el("input", {
    type: "search",
    placeholder: "Search metrics",
    "aria-label": "Search metrics",
    oninput: arrange,
  });
  const smoothing = el("input", {
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: 0.6,
    id: "smoothing",
    oninput: refresh,
  });
  const weight = el("output", { for: "smoothing" });
  const nothing = el("p", { class: "empty" });
  const list = el("div", { class: "groups" });
  const node = el(
    "section",
    {},
    el("div", { class: "toolbar" }, search, el("label", {}, "Smoothing", smoothing, weight)),
    nothing,
    list,
  );

  function card(name) {
    const chart = charts.add(name);
    const value = el("span", { class: "latest" });
    const pin = el("button", { type: "button", class: "quiet pin", onclick: () => togglePin(name) });
    const wide = el("button", {
      type: "button",
      class: "quiet",
      "aria-pressed": "false",
      "aria-label": `Enlarge ${name}`,
      text: "⤢",
      onclick: () => wide.setAttribute("aria-pressed", String(box.classList.toggle("wide"))),
    });
    const box = el(
      "article",
      { class: "card", "data-metric": name },
      el("header", {}, el("h3", { text: name }), value, pin, wide),
      chart.node,
    );
    return { box, chart, value, pin };
  }

  function togglePin(name) {
    if (!pinned.delete(name)) pinned.add(name);
    localStorage.setItem(MEMORY, JSON.stringify([...pinned]));
    arrange();
    cards.get(name).pin.focus();
  }

  /** Each metric in its group, or among the pinned ones; what does not match the search is hidden. */
  function arrange() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const members = new Map();
    let matches = 0;
    for (const name of [...cards.keys()].sort()) {
      const { box, pin } = cards.get(name);
      const on = pinned.has(name);
      pin.textContent = on ? "★" : "☆";
      pin.setAttribute("aria-pressed", String(on));
      pin.setAttribute("aria-label", `Pin ${name}`);
      box.hidden = !words.every((word) => name.toLowerCase().includes(word));
      if (box.hidden) continue;
      matches += 1;
      const group = on ? PINNED : groupOf(name);
      members.set(group, [...(members.get(group) ?? []), box]);
    }
    for (const [group, boxes] of members) {
      if (!groups.has(group)) {
        const grid = el("div", { class: "cards" });
        const count = el("span", { class: "count" });
        const details = el("details", { open: !LAST.includes(group) }, el("summary", {}, `${group} `, count), grid);
        groups.set(group, { details, grid, count });
      }
      const { details, grid, count } = groups.get(group);
      if (boxes.length !== grid.children.length || boxes.some((box, i) => grid.children[i] !== box))
        grid.replaceChildren(...boxes);
      count.textContent = boxes.length;
      details.className = `group small-${boxes.length}`;
      if (words.length) details.open = true;
    }
    const sections = [...members.keys()].sort(inOrder).map((group) => groups.get(group).details);
    if (sections.some((section, i) => list.children[i] !== section) || sections.length !== list.children.length)
      list.replaceChildren(...sections);
    nothing.textContent = cards.size
      ? `No metric is called ${search.value}.`
      : "No metrics yet: they come with the first iteration.";
    nothing.hidden = matches > 0;
  }

  function refresh() {
    weight.textContent = Number(smoothing.value).toFixed(2);
    const names = new Set(app.runs.flatMap((run) => [...run.curves.keys()]));
    for (const name of names) {
      if (!cards.has(name)) cards.set(name, card(name));
      const { chart, value } = cards.get(name);
      const series = app.runs
        .filter((run) => run.curves.has(name))
        .map((run) => {
          const { steps, values } = run.curves.get(name);
          const smooth = Number(smoothing.value) ? smoothed(values, Number(smoothing.value)) : values;
          return { mark: run.mark, name: run.about.name, steps, values, smooth };
        });
      chart.set(series);
      value.replaceChildren(
        ...series.map(({ mark, values }) => el("span", { class: `run-${mark}`, text: number(values.at(-1)) })),
      );
    }
    for (const name of [...cards.keys()].filter((name) => !names.has(name))) {
      charts.remove(cards.get(name).chart);
      cards.delete(name);
    }
    arrange();
  }

  return { node, show: refresh, news: (changed) => changed && refresh() };
}
