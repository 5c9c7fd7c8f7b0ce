// Two runs side by side: how each answered the same prompt in the same iteration.

import { ask } from "./data.js";
import { detailSheet } from "./detail.js";
import { el, fill, select } from "./dom.js";
import { number, signed } from "./format.js";

const MOST = 1000;

export function compareView(app) {
  const sheet = detailSheet();
  const [first, second] = app.runs;
  const iteration = select(
    { "aria-label": "Iteration", onchange: () => app.go("compare", { iteration: iteration.value }) },
    [],
  );
  const order = select({ "aria-label": "Sort by", onchange: () => list() }, [
    ["gap", "difference of rewards"],
    ["prompt_id", "number"],
  ]);
  const report = el("p", { class: "count", role: "status" });
  const prompts = el("ul", { class: "prompts", "aria-label": "Prompts in both runs" });
  const answers = el("div", { class: "answers" });
  const node = el(
    "section",
    {},
    el("div", { class: "toolbar" }, el("label", {}, "Iteration", iteration), el("label", {}, "Sort by", order), report),
    el("div", { class: "split" }, prompts, answers),
  );
  let [shared, chosen, latest] = [[], null, 0];

  const inBoth = () => first.about.samples.filter((item) => second.about.samples.includes(item)).reverse();

  async function show({ iteration: wanted, prompt }) {
    const both = inBoth();
    fill(
      iteration,
      both.map((item) => [item, item]),
    );
    if (!both.length) {
      report.textContent = "The runs have no iteration with samples in common yet.";
      return;
    }
    iteration.value = both.includes(Number(wanted)) ? wanted : both[0];
    const request = (latest += 1);
    const matches = await Promise.all(
      app.runs.map((run) => ask("prompts", { run: run.number, iteration: iteration.value })),
    );
    if (request !== latest) return;
    const others = new Map(matches[1].map((item) => [item.prompt_id, item]));
    shared = matches[0]
      .filter((item) => others.has(item.prompt_id))
      .map((item) => ({
        ...item,
        rewards: [item.reward, others.get(item.prompt_id).reward],
        same: item.prompt === others.get(item.prompt_id).prompt,
      }));
    report.textContent = `${shared.length} prompts in both runs`;
    chosen = prompt === undefined ? null : Number(prompt);
    list();
    await open(request);
  }

  function list() {
    const gap = ({ rewards: [a, b] }) => (b ?? 0) - (a ?? 0);
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
            el("span", { class: "run-A", text: number(item.rewards[0]) }),
            el("span", { class: "run-B", text: number(item.rewards[1]) }),
            el("span", { class: "gap", text: signed(gap(item)) }),
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
      item && !item.same && el("p", { class: "empty", text: "The prompt of this number is another text in run B." });
    const columns = app.runs.map((run, i) =>
      el(
        "section",
        { "aria-label": `Run ${run.mark}` },
        el("h3", { class: `run-${run.mark}`, text: `${run.mark}: ${run.about.name}` }),
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

  return {
    node,
    show,
    news: () =>
      fill(
        iteration,
        inBoth().map((item) => [item, item]),
      ),
  };
}
