// Samples in a table: sorted, filtered, searched.

import { ask } from "./data.js";
import { detailSheet } from "./detail.js";
import { el, fill, patiently, select } from "./dom.js";
import { plain } from "./format.js";

const PAGE = 50;
const COLUMNS = [
  ["iteration", "iteration", true],
  ["sample_id", "sample", true],
  ["prompt_id", "prompt no.", true],
  ["source", "source", false],
  ["prompt", "prompt", false],
  ["response", "response", false],
  ["reward", "reward", true],
  ["length", "tokens", true],
  ["finish", "finish", false],
  ["policy_version", "version", true],
  ["agent_turns", "turns", true],
  ["segment", "segment", true],
  ["agent_segments", "segments", true],
];
const UNSORTED = ["prompt", "response", "segment"];
/** Columns of samples of agents. */
const OF_AGENTS = ["agent_turns", "segment", "agent_segments"];

export function samplesView(app) {
  const sheet = detailSheet();
  const filters = {};
  const soon = patiently(() => node.hidden || go({ page: 0 }));
  const field = (name, label, node) => {
    filters[name] = node;
    if (label) node.setAttribute("aria-label", label);
    return el("label", {}, label, node);
  };
  const bound = (name, label, step) => {
    filters[name] = el("input", {
      type: "number",
      step,
      "aria-label": label,
      placeholder: label.split(" ").at(-1),
      oninput: soon,
    });
    return filters[name];
  };
  const now = () => go({ page: 0 });
  const form = el(
    "form",
    {
      class: "toolbar",
      role: "search",
      onsubmit: (event) => {
        event.preventDefault();
        now();
      },
    },
    app.runs.length > 1 &&
      field(
        "run",
        "Run",
        select(
          { onchange: now },
          app.runs.map((run) => [run.number, `${run.mark}: ${run.about.name}`]),
        ),
      ),
    field(
      "text",
      "",
      el("input", {
        type: "search",
        placeholder: "Search prompts and responses",
        "aria-label": "Search prompts and responses",
        oninput: soon,
      }),
    ),
    field("iteration", "Iteration", select({ onchange: now }, [])),
    el(
      "span",
      { class: "pair" },
      "Reward ",
      bound("reward_from", "reward from", "any"),
      "–",
      bound("reward_to", "reward to", "any"),
    ),
    el(
      "span",
      { class: "pair" },
      "Tokens ",
      bound("length_from", "tokens from", 1),
      "–",
      bound("length_to", "tokens to", 1),
    ),
    el(
      "span",
      { class: "pair agent" },
      "Turns ",
      bound("turns_from", "turns from", 1),
      "–",
      bound("turns_to", "turns to", 1),
    ),
    field(
      "agent",
      "Agent",
      select({ onchange: now }, [
        ["", "any"],
        ["failed", "failed"],
        ["completed", "completed"],
      ]),
    ),
    field("finish", "Finish", select({ onchange: now }, [["", "any"]])),
    field("source", "Source", select({ onchange: now }, [["", "any"]])),
  );
  const count = el("p", { class: "count", role: "status" });
  const heads = Object.fromEntries(COLUMNS.map(([name, label, numeric]) => [name, head(name, label, numeric)]));
  const rows = el("tbody");
  const table = el("table", { class: "samples" }, el("thead", {}, el("tr", {}, ...Object.values(heads))), rows);
  const turn = (by, label, text) =>
    el("button", { type: "button", "aria-label": label, text, onclick: () => go({ page: page + by }) });
  const clear = el("button", { type: "button", text: "Clear filters", onclick: () => app.go("samples") });
  const [back, on] = [turn(-1, "Previous page", "‹"), turn(1, "Next page", "›")];
  const node = el(
    "section",
    {},
    form,
    el("div", { class: "paging" }, count, back, on, clear),
    el("div", { class: "scroll" }, table),
  );

  let [sort, descending, page, latest] = ["sample_id", false, 0, 0];

  function head(name, label, numeric) {
    const inside = UNSORTED.includes(name)
      ? label
      : el("button", { type: "button", text: label, onclick: () => sortBy(name) });
    return el("th", { scope: "col", class: classOf(name, numeric) }, inside);
  }

  function classOf(name, numeric) {
    return [numeric && "number", name, OF_AGENTS.includes(name) && "agent"].filter(Boolean).join(" ");
  }

  function sortBy(name) {
    // Numbers are looked at from the top: first the largest ones.
    const numeric = COLUMNS.find(([other]) => other === name)[2];
    descending = sort === name ? !descending : numeric && name !== "sample_id";
    sort = name;
    go({ page: 0 });
  }

  /** Make a link of what the form says, which then is shown. */
  function go(change) {
    const report = Object.fromEntries(Object.entries(filters).map(([name, input]) => [name, input.value]));
    if (report.run === "0") delete report.run;
    const order = sort === "sample_id" && !descending ? {} : { sort, descending };
    app.go("samples", { ...report, ...order, page: change.page || null });
  }

  function fillIterations() {
    const matches = (app.runs[Number(filters.run?.value ?? 0)].about.samples ?? []).map(String).reverse();
    fill(filters.iteration, [
      ["", matches.length ? `newest (${matches[0]})` : "none yet"],
      ["all", "all"],
      ...matches.map((item) => [item, item]),
    ]);
  }

  async function show(parameters) {
    if (filters.run) filters.run.value = parameters.run ?? "0";
    fillIterations();
    for (const [name, input] of Object.entries(filters)) {
      if (name === "run" || document.activeElement === input) continue;
      // An option that is not known yet comes with the facets below.
      const wanted = parameters[name] ?? "";
      if (input.tagName === "SELECT" && wanted && ![...input.options].some(({ value }) => value === wanted))
        input.append(el("option", { value: wanted, text: wanted }));
      input.value = wanted;
    }
    sort = heads[parameters.sort] ? parameters.sort : "sample_id";
    descending = parameters.descending === "true";
    page = Math.max(0, Number(parameters.page ?? 0) || 0);
    await load(parameters);
  }

  async function load({ iteration, page: _, ...rest }) {
    const request = (latest += 1);
    const run = app.runs[Number(rest.run ?? 0)] ?? app.runs[0];
    const newest = run.about.samples.at(-1);
    const item = iteration === "all" ? null : iteration || newest;
    const range = { run: run.number, first: item, last: item };
    try {
      const [matches, facets] = await Promise.all([
        ask("samples", { ...rest, ...range, sort, descending, offset: page * PAGE, limit: PAGE }),
        ask("facets", range),
      ]);
      if (request === latest) draw(run, matches, facets);
    } catch (error) {
      if (request === latest) count.textContent = error.message;
    }
  }

  function draw(run, { total, rows: matches }, facets) {
    for (const name of ["finish", "source"])
      fill(filters[name], [["", "any"], ...facets[name].map((item) => [item, item])]);
    node.classList.toggle("no-source", !facets.source.length); // the data names none
    const ofAgents = ["turns_from", "turns_to", "agent"].some((name) => filters[name].value);
    node.classList.toggle("no-agents", !facets.agents && !ofAgents);
    const last = Math.min(total, (page + 1) * PAGE);
    count.textContent = total ? `${page * PAGE + 1} to ${last} of ${total} samples` : "No such samples.";
    [back.disabled, on.disabled] = [page === 0, last >= total];
    for (const [name, cell] of Object.entries(heads)) {
      if (name === sort) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    table.hidden = !total;
    rows.replaceChildren(...matches.map((row) => line(run, row, matches)));
  }

  function line(run, row, list) {
    const cells = COLUMNS.map(([name, , numeric]) => {
      const text = plain(row[name]);
      if (name === "sample_id") {
        return el(
          "td",
          { class: "number" },
          el("button", { type: "button", class: "link", "aria-label": `Open sample ${text}`, text }),
        );
      }
      if (name === "finish" && row.agent_error)
        return el("td", { class: name, title: row.agent_error }, el("span", { class: "failed", text: "failed" }));
      return el("td", { class: classOf(name, numeric), text });
    });
    return el("tr", { "data-sample": row.sample_id, onclick: () => sheet.open(run, row, list) }, ...cells);
  }

  return { node, show, news: fillIterations };
}
