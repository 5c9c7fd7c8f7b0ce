// Runs side by side: how each answered the same prompt in the same iteration.

import { ask } from "./data.js";
import { detailSheet } from "./detail.js";
import { el, select } from "./dom.js";
import { extent, grouped, number, signed } from "./format.js";

const MOST = 1000;

export function compareView(app) {
  const sheet = detailSheet();
  const iteration = el("input", {
    type: "number",
    min: 1,
    "aria-label": "Iteration",
    onchange: () => app.go("compare", { iteration: iteration.value }),
  });
  const step = (by, label, text) =>
    el("button", { type: "button", "aria-label": label, text, onclick: () => move(by) });
  const order = select({ "aria-label": "Sort by", onchange: () => list() }, [
    ["gap", "difference of rewards"],
    ["prompt_id", "number"],
  ]);
  const report = el("p", { class: "count", role: "status" });
  const prompts = el("ul", { class: "prompts", "aria-label": "Prompts in all runs" });
  const answers = el("div", { class: "answers" });
  const node = el(
    "section",
    {},
    el(
      "div",
      { class: "toolbar" },
      el("label", {}, "Iteration", iteration),
      step(-1, "Previous iteration", "‹"),
      step(1, "Next iteration", "›"),
      el("label", {}, "Sort by", order),
      report,
    ),
    el("div", { class: "split" }, prompts, answers),
  );
  let [shared, chosen, latest] = [[], null, 0];

  const inAll = (item) => app.runs.every((run) => run.hasSamples(item));

  /** The newest iteration up to `limit` of which all runs have samples. */
  function newest(limit = Infinity) {
    const ends = app.runs.flatMap((run) => run.about.samples.map(([, last]) => Math.min(last, limit)));
    return ends.sort((p, q) => q - p).find(inAll);
  }

  /** The first iteration from `limit` on of which all runs have samples. */
  function oldest(limit) {
    const begins = app.runs.flatMap((run) => run.about.samples.map(([first]) => Math.max(first, limit)));
    return begins.sort((p, q) => p - q).find(inAll);
  }

  function move(by) {
    const next = Number(iteration.value) + by;
    const item = by < 0 ? newest(next) : oldest(next);
    if (item !== undefined) app.go("compare", { iteration: item });
  }

  async function show({ iteration: wanted, prompt }) {
    const last = newest();
    if (last === undefined) {
      report.textContent = "The runs have no iteration with samples in common yet.";
      return;
    }
    const item = newest(Number(wanted) || last) ?? last;
    Object.assign(iteration, { value: item, max: last });
    const request = (latest += 1);
    const matches = await Promise.all(app.runs.map((run) => ask("prompts", { run: run.number, iteration: item })));
    if (request !== latest) return;
    const others = matches.slice(1).map((prompts) => new Map(prompts.map((one) => [one.prompt_id, one])));
    shared = matches[0]
      .filter(({ prompt_id }) => others.every((prompts) => prompts.has(prompt_id)))
      .map((one) => {
        const all = [one, ...others.map((prompts) => prompts.get(one.prompt_id))];
        return { ...one, rewards: all.map(({ reward }) => reward), same: all.every((other) => other.prompt === one.prompt) };
      });
    report.textContent = `${grouped(shared.length)} prompts in ${app.runs.length === 2 ? "both" : "all"} runs`;
    chosen = prompt === undefined ? null : Number(prompt);
    list();
    await open(request);
  }

  function list() {
    const gap = ({ rewards }) => {
      const [least, largest] = extent(rewards.map((reward) => reward ?? 0));
      return rewards.length === 2 ? (rewards[1] ?? 0) - (rewards[0] ?? 0) : largest - least;
    };
    const sorted = [...shared].sort(
      (p, q) => (order.value === "gap" && Math.abs(gap(q)) - Math.abs(gap(p))) || p.prompt_id - q.prompt_id,
    );
    chosen ??= sorted[0]?.prompt_id ?? null;
    prompts.replaceChildren(
      ...sorted.map((item) => {
        const link = el(
          "button",
          {
            type: "button",
            "aria-current": item.prompt_id === chosen ? "true" : null,
            "data-prompt": item.prompt_id,
            onclick: () => app.go("compare", { iteration: iteration.value, prompt: item.prompt_id }),
          },
          el("span", { class: "excerpt", text: item.prompt }),
          el(
            "span",
            { class: "rewards" },
            ...app.runs.map(({ tint }, i) => el("span", { class: tint, text: number(item.rewards[i]) })),
            el("span", { class: "gap", text: app.runs.length === 2 ? signed(gap(item)) : number(gap(item)) }),
          ),
        );
        return el("li", {}, link);
      }),
    );
  }

  async function open(request) {
    if (chosen === null) {
      answers.replaceChildren();
      return;
    }
    const range = { first: iteration.value, last: iteration.value, prompt_id: chosen, trajectories: true, limit: MOST };
    const matches = await Promise.all(app.runs.map((run) => ask("samples", { run: run.number, ...range })));
    if (request !== latest) return;
    const item = shared.find(({ prompt_id }) => prompt_id === chosen);
    const differ =
      item && !item.same && el("p", { class: "empty", text: "The prompt of this number is another text in another run." });
    const columns = app.runs.map((run, i) =>
      el(
        "section",
        { "aria-label": `Run ${run.mark}` },
        el("h3", { class: run.tint, text: `${run.mark}: ${run.about.name}` }),
        ...matches[i].rows.map((row) => answer(run, row, matches[i].rows)),
      ),
    );
    answers.replaceChildren(
      el("div", { class: "text prompt", text: item?.prompt ?? "" }),
      ...(differ ? [differ] : []),
      el("div", { class: "columns" }, ...columns),
    );
  }

  function answer(run, row, rows) {
    const size = row.agent_turns === null ? `${number(row.length)} tokens` : `${row.agent_turns} ${row.agent_turns === 1 ? "turn" : "turns"}`;
    const facts = `${size}, ${row.agent_error ? "failed" : (row.finish ?? "–")}`;
    return el(
      "button",
      {
        type: "button",
        class: "answer",
        "aria-label": `Open sample ${row.sample_id} of run ${run.mark}`,
        onclick: () => sheet.open(run, row, rows),
      },
      el("span", { class: "head" }, el("strong", { text: number(row.reward) }), el("span", { text: facts })),
      el("span", { class: "text", text: row.response || "(nothing)" }),
    );
  }

  return { node, show, news: () => {} };
}
