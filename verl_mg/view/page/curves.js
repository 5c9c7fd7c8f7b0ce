// Curves of metrics, grouped by the part before the slash; they can be pinned to the top.

import { Charts } from "./chart.js";
import { ask } from "./data.js";
import { el, patiently, select } from "./dom.js";
import { number } from "./format.js";

const FIRST = ["reward", "eval", "response", "actor", "critic"];
const LAST = ["time"];
const PINNED = "Pinned";
const MEMORY = "verl_mg.pinned";
const EACH = "each";

const groupOf = (name) => (name.includes("/") ? name.slice(0, name.indexOf("/")) : "other");
const placeOfGroup = (group) => {
  if (group === PINNED) return -1;
  if (LAST.includes(group)) return 1000;
  return FIRST.includes(group) ? FIRST.indexOf(group) : 100;
};
const inOrder = (a, b) => placeOfGroup(a) - placeOfGroup(b) || a.localeCompare(b);

export function curvesView(app) {
  const charts = new Charts(patiently(load, 0), zoom);
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
    oninput: () => {
      showWeight();
      soon();
    },
  });
  const soon = patiently(load, 60);
  const weight = el("output", { for: "smoothing" });
  const repeated = app.groups.some(({ runs }) => runs.length > 1);
  const seeds = select({ onchange: refresh }, [
    ["range", "mean, min to max"],
    ["error", "mean ± standard error"],
    [EACH, "each run"],
  ]);
  const whole = el("button", { type: "button", text: "All steps", disabled: true, onclick: () => zoom(null) });
  const legend = el("ul", { class: "series", "aria-label": "Curves" });
  let range = null; // steps that are shown; null: all
  const nothing = el("p", { class: "empty" });
  const list = el("div", { class: "groups" });
  const node = el(
    "section",
    {},
    el(
      "div",
      { class: "toolbar" },
      search,
      el("label", {}, "Smoothing", smoothing, weight),
      repeated && el("label", {}, "Seeds", seeds),
      whole,
      legend,
    ),
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
      onclick: () => {
        wide.setAttribute("aria-pressed", String(box.classList.toggle("wide")));
        load();
      },
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

  function showWeight() {
    weight.textContent = Number(smoothing.value).toFixed(2);
  }

  function zoom(to) {
    range = to;
    whole.disabled = range === null;
    load();
  }

  /** A curve for each run, or for each group of runs that differ only in their seed. */
  function series() {
    const each = repeated && seeds.value !== EACH ? app.groups : app.runs.map(({ number }) => ({ runs: [number] }));
    return each.map(({ runs: numbers }) => {
      const runs = numbers.map((number) => app.runs[number]);
      const name = runs.length > 1 ? `${runs[0].about.name} × ${runs.length}` : runs[0].about.name;
      return { tint: runs[0].tint, name, runs };
    });
  }

  function refresh() {
    showWeight();
    const names = new Set(app.runs.flatMap((run) => Object.keys(run.latest)));
    const shown = series();
    for (const name of names) {
      if (!cards.has(name)) cards.set(name, card(name));
      const latest = shown.flatMap(({ tint, runs }) => {
        const values = runs.map((run) => run.latest[name]).filter((value) => typeof value === "number");
        if (!values.length) return [];
        const mean = values.reduce((a, b) => a + b, 0) / values.length;
        return [el("span", { class: tint, text: number(mean) })];
      });
      // More would hide the name.
      cards.get(name).value.replaceChildren(...latest.slice(0, 4));
    }
    for (const name of [...cards.keys()].filter((name) => !names.has(name))) {
      charts.remove(cards.get(name).chart);
      cards.delete(name);
    }
    legend.hidden = app.runs.length < 2;
    legend.replaceChildren(...shown.map(entryOf));
    arrange();
    load();
  }

  function entryOf({ tint, name, runs }) {
    const { differs } = app.groups.find((group) => group.runs.includes(runs[0].number));
    const options = Object.entries(differs).map(([key, value]) => `${key.split(".").at(-1)}=${value}`);
    const title = [...runs.map((run) => `${run.mark}: ${run.about.folder}`), ...Object.entries(differs).map((pair) => pair.join("="))];
    return el(
      "li",
      { title: title.join("\n") },
      el("span", { class: `swatch ${tint}` }),
      name,
      options.length > 0 && el("span", { class: "count", text: options.slice(0, 2).join(", ") }),
    );
  }

  /** Loads the values of the charts that are seen and have others. */
  async function load() {
    const shown = series();
    const [first, last] = range ?? [null, null];
    const versions = app.runs.map((run) => run.about.metrics.version);
    const settings = { first, last, smoothing: smoothing.value, band: seeds.value === EACH ? null : seeds.value };
    const key = (pixels) => JSON.stringify([versions, shown.map(({ runs }) => runs.length), settings, pixels]);
    const wanted = new Map(); // names by width
    for (const [name, { chart }] of cards) {
      const pixels = Math.round(chart.node.getBoundingClientRect().width);
      if (!chart.visible || !pixels || chart.loaded === key(pixels)) continue;
      chart.loaded = key(pixels);
      wanted.set(pixels, [...(wanted.get(pixels) ?? []), name]);
    }
    for (const [pixels, names] of wanted) {
      try {
        const answers = await Promise.all(
          shown.map(({ runs }) => {
            const numbers = JSON.stringify(runs.map(({ number }) => number));
            return ask("curves", { runs: numbers, names: JSON.stringify(names), pixels, ...settings });
          }),
        );
        for (const name of names) draw(name, shown, answers, key(pixels));
      } catch {
        // The news report a server that has ended; then they are loaded again.
        for (const name of names) if (cards.has(name)) cards.get(name).chart.loaded = "";
      }
    }
  }

  function draw(name, shown, answers, key) {
    const chart = cards.get(name)?.chart;
    if (chart?.loaded !== key) return; // other values have been requested since
    const raw = Number(smoothing.value) > 0;
    chart.set(
      shown.map(({ tint, name: label }, i) => {
        const { values, smooth, ...rest } = answers[i][name];
        return { tint, name: label, values, smooth: raw && !rest.low ? smooth : values, ...rest };
      }),
    );
  }

  return { node, show: refresh, news: (changed) => changed && refresh() };
}
