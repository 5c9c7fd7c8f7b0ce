// Samples in a table: sorted, filtered, searched.

import { ask } from "./data.js";
import { detailSheet } from "./detail.js";
import { el, fill, marked, patiently, select } from "./dom.js";
import { grouped, plain } from "./format.js";

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
const TEXTS = ["prompt", "response"];
const UNSORTED = [...TEXTS, "segment"];
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
    field("words", "", select({ "aria-label": "Find", onchange: now }, [["", "as written"], ["true", "all words"]])),
    field("iteration", "Iteration", select({ onchange: now }, [])),
    el("span", { class: "pair range" }, bound("first", "iteration from", 1), "–", bound("last", "iteration to", 1)),
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
  const exact = el("input", {
    type: "number",
    min: 1,
    "aria-label": "Page",
    onchange: () => go({ page: Math.min(Math.max(1, Math.floor(exact.value) || 1), Number(exact.max)) - 1 }),
  });
  const pages = el("span", { class: "pages" });
  const clear = el("button", { type: "button", text: "Clear filters", onclick: () => app.go("samples") });
  const [back, on] = [turn(-1, "Previous page", "‹"), turn(1, "Next page", "›")];
  const node = el(
    "section",
    {},
    form,
    el("div", { class: "paging" }, count, back, el("label", {}, exact, pages), on, clear),
    el("div", { class: "scroll" }, table),
  );

  let [sort, descending, page, latest] = ["sample_id", false, 0, 0];
  let complete = true; // whether the index has all iterations that are shown
  let given = {};

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
    const newest = app.runs[Number(filters.run?.value ?? 0)]?.newest;
    fill(filters.iteration, [
      ["", newest === undefined ? "none yet" : `newest (${newest})`],
      ["all", "all"],
      ["range", "from – to"],
    ]);
  }

  function news() {
    fillIterations();
    return complete ? null : load(given);
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
    node.classList.toggle("no-range", parameters.iteration !== "range");
    given = parameters;
    await load(parameters);
  }

  /** The iterations that the form selects. */
  function rangeOf(run, { iteration, first, last }) {
    if (iteration === "range") return { first, last };
    return iteration === "all" ? {} : { first: run.newest, last: run.newest };
  }

  /** known: sources and finish reasons of the same iterations, from the request before. */
  async function load(parameters, known = null) {
    const { iteration: _, page: __, first: ___, last: ____, ...rest } = parameters;
    const request = (latest += 1);
    const run = app.runs[Number(rest.run ?? 0)] ?? app.runs[0];
    const range = { run: run.number, ...rangeOf(run, parameters) };
    try {
      const [matches, facets] = await Promise.all([
        ask("samples", { ...rest, ...range, sort, descending, offset: page * PAGE, limit: PAGE }),
        known ?? ask("facets", range),
      ]);
      if (request !== latest) return;
      draw(run, matches, facets);
      // The server continues a search with each request.
      if (matches.share < 1 && !node.hidden) setTimeout(() => request === latest && load(parameters, facets), 50);
    } catch (error) {
      if (request === latest) count.textContent = error.message;
    }
  }

  function draw(run, { total, rows: matches, share, index }, facets) {
    for (const name of ["finish", "source"])
      fill(filters[name], [["", "any"], ...facets[name].map((item) => [item, item])]);
    node.classList.toggle("no-source", !facets.source.length); // the data names none
    const ofAgents = ["turns_from", "turns_to", "agent"].some((name) => filters[name].value);
    node.classList.toggle("no-agents", !facets.agents && !ofAgents);
    const last = Math.min(total, (page + 1) * PAGE);
    complete = index.indexed >= index.iterations;
    const notes = [];
    if (share < 1) notes.push(`${Math.floor(100 * share)} % searched`);
    if (!complete) notes.push(`${grouped(index.indexed)} of ${grouped(index.iterations)} iterations in the index`);
    const nothing = notes.length ? "Nothing so far" : "No such samples.";
    const listed = `${grouped(page * PAGE + 1)} to ${grouped(last)} of ${grouped(total)} samples`;
    count.textContent = [total ? listed : nothing, ...notes].join(" · ");
    count.classList.toggle("busy", notes.length > 0);
    const most = Math.max(1, Math.ceil(total / PAGE));
    Object.assign(exact, { max: most, value: page + 1, disabled: most === 1 });
    pages.textContent = `/ ${grouped(most)}`;
    [back.disabled, on.disabled] = [page === 0, last >= total];
    for (const [name, cell] of Object.entries(heads)) {
      if (name === sort) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    table.hidden = !total;
    const text = filters.text.value.toLowerCase();
    const terms = filters.words.value ? text.split(/\s+/).filter(Boolean) : text ? [text] : [];
    rows.replaceChildren(...matches.map((row) => line(run, row, matches, terms)));
  }

  function line(run, row, list, terms) {
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
      if (TEXTS.includes(name)) return el("td", { class: name }, ...marked(text, terms));
      return el("td", { class: classOf(name, numeric), text });
    });
    return el("tr", { "data-sample": row.sample_id, onclick: () => sheet.open(run, row, list) }, ...cells);
  }

  return { node, show, news };
}
