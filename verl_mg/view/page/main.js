// The frame: which runs, which view, and news every two seconds.

import { Run, ask } from "./data.js";
import { el } from "./dom.js";
import { duration, number } from "./format.js";
import { compareView } from "./compare.js";
import { curvesView } from "./curves.js";
import { samplesView } from "./samples.js";
import { timelineView } from "./timeline.js";

const PERIOD = 2000;
const byId = (id) => document.getElementById(id);

/** The runs, groups of those that repeat each other, and `go(view, parameters)`, which shows a view and makes a link. */
const app = {
  runs: [],
  groups: [],
  go(view, parameters = {}) {
    const given = Object.entries(parameters).filter(
      ([, value]) => value !== null && value !== undefined && value !== "",
    );
    const text = new URLSearchParams(given).toString();
    const link = text ? `#${view}?${text}` : `#${view}`;
    // "Back" leads to the previous view, not through all selections of this one.
    if (location.hash.slice(1).split("?")[0] !== view) location.hash = link;
    else {
      history.replaceState(null, "", link);
      show();
    }
  },
};
const views = {};
let shown = null;

async function start() {
  const [runs, groups] = await Promise.all([ask("runs"), ask("groups")]);
  app.runs = runs.map((about, i) => new Run(i, about));
  app.groups = groups;
  document.title = `${app.runs.map((run) => run.about.name).join(" / ")} – verl_mg`;
  views.curves = { label: "Curves", ...curvesView(app) };
  views.timeline = { label: "Time line", ...timelineView(app) };
  views.samples = { label: "Samples", ...samplesView(app) };
  if (app.runs.length > 1) views.compare = { label: "Side by side", ...compareView(app) };
  for (const [name, view] of Object.entries(views)) {
    view.link = el("a", { href: `#${name}`, text: view.label });
    byId("views").append(view.link);
    view.node.id = `view-${name}`;
    view.node.setAttribute("aria-label", view.label);
    view.node.hidden = true;
    byId("main").append(view.node);
  }
  tellRuns();
  window.addEventListener("hashchange", show);
  show();
  setTimeout(news, PERIOD);
}

function show() {
  const [latest, text] = location.hash.slice(1).split("?");
  const name = latest in views ? latest : "curves";
  for (const [other, view] of Object.entries(views)) {
    view.node.hidden = other !== name;
    if (other === name) view.link.setAttribute("aria-current", "page");
    else view.link.removeAttribute("aria-current");
  }
  shown = views[name];
  Promise.resolve(shown.show(Object.fromEntries(new URLSearchParams(text ?? "")))).catch(lost);
}

async function news() {
  try {
    if (!document.hidden) {
      const report = await ask("runs");
      const versions = () => app.runs.map((run) => run.about.metrics.version).join();
      const before = versions();
      app.runs.forEach((run, i) => (run.about = report[i]));
      tellRuns();
      await shown.news(versions() !== before);
    }
    notice("");
  } catch (error) {
    lost(error);
  }
  setTimeout(news, PERIOD);
}

function lost(error) {
  notice(`No news: ${error.message}. Is verl-mg view still running?`);
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

function tellRuns() {
  const chips = app.runs.map(({ mark, tint, about: { name, folder, status } }) => {
    const facts = [];
    if (status.iterations) facts.push(`${number(status.iteration)} / ${number(status.iterations)}`);
    if (status.state === "running" && status.phase) facts.push(status.phase);
    if (status.tokens_per_second) facts.push(`${number(Math.round(status.tokens_per_second))} tokens/s`);
    if (status.state === "running" && status.eta_seconds) facts.push(`${duration(status.eta_seconds)} left`);
    const state = status.state && el("span", { class: `state ${status.state}`, text: status.state });
    const progress =
      status.iterations &&
      el("progress", { max: status.iterations, value: status.iteration, "aria-label": `iterations of ${name}` });
    return el(
      "div",
      { class: `run ${tint}`, title: folder },
      app.runs.length > 1 && el("span", { class: "mark", text: mark }),
      el("strong", { text: name }),
      state,
      progress,
      el("span", { class: "facts", text: facts.join(" · ") }),
    );
  });
  byId("runs").replaceChildren(...chips);
}

start().catch((error) => notice(`The page could not be built: ${error.message}`));
