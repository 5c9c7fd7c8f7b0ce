// Two runs side by side: how each answered the same prompt in the same iteration.

import { ask } from "./data.js";
import { detailSheet } from "./detail.js";
import { el, fill, select } from "./dom.js";
import { number, signed } from "./format.js";

const MOST = 200;

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
  const told = el("p", { class: "count", role: "status" });
  const prompts = el("ul", { class: "prompts", "aria-label": "Prompts in both runs" });
  const answers = el("div", { class: "answers" });
  const node = el(
    "section",
    {},
    el("div", { class: "toolbar" }, el("label", {}, "Iteration", iteration), el("label", {}, "Sort by", order), told),
    el("div", { class: "split" }, prompts, answers),
  );
  let [shared, chosen, asked] = [[], null, 0];

  const inBoth = () => first.about.samples.filter((one) => second.about.samples.includes(one)).reverse();

  async function show({ iteration: wanted, prompt }) {
    const both = inBoth();
    fill(
      iteration,
      both.map((one) => [one, one]),
    );
    if (!both.length) {
      told.textContent = "The runs have no iteration with samples in common yet.";
      return;
    }
    iteration.value = both.includes(Number(wanted)) ? wanted : both[0];
    const own = (asked += 1);
    const found = await Promise.all(
      app.runs.map((run) => ask("prompts", { run: run.number, iteration: iteration.value })),
    );
    if (own !== asked) return;
    const others = new Map(found[1].map((one) => [one.prompt_id, one]));
    shared = found[0]
      .filter((one) => others.has(one.prompt_id))
      .map((one) => ({
        ...one,
        rewards: [one.reward, others.get(one.prompt_id).reward],
        same: one.prompt === others.get(one.prompt_id).prompt,
      }));
    told.textContent = `${shared.length} prompts in both runs`;
    chosen = prompt === undefined ? null : Number(prompt);
    list();
    await open(own);
  }

  function list() {
    const gap = ({ rewards: [a, b] }) => (b ?? 0) - (a ?? 0);
    const sorted = [...shared].sort(
      (p, q) => (order.value === "gap" && Math.abs(gap(q)) - Math.abs(gap(p))) || p.prompt_id - q.prompt_id,
    );
    chosen ??= sorted[0]?.prompt_id ?? null;
    prompts.replaceChildren(
      ...sorted.map((one) => {
        const link = el(
          "button",
          {
            type: "button",
            "aria-current": one.prompt_id === chosen ? "true" : null,
            "data-prompt": one.prompt_id,
            onclick: () => app.go("compare", { iteration: iteration.value, prompt: one.prompt_id }),
          },
          el("span", { class: "excerpt", text: one.prompt }),
          el(
            "span",
            { class: "rewards" },
            el("span", { class: "run-A", text: number(one.rewards[0]) }),
            el("span", { class: "run-B", text: number(one.rewards[1]) }),
            el("span", { class: "gap", text: signed(gap(one)) }),
          ),
        );
        return el("li", {}, link);
      }),
    );
  }

  async function open(own) {
    if (chosen === null) {
      answers.replaceChildren();
      return;
    }
    const range = { first: iteration.value, last: iteration.value, prompt_id: chosen, limit: MOST };
    const found = await Promise.all(app.runs.map((run) => ask("samples", { run: run.number, ...range })));
    if (own !== asked) return;
    const one = shared.find(({ prompt_id }) => prompt_id === chosen);
    const differ =
      one && !one.same && el("p", { class: "empty", text: "The prompt of this number is another text in run B." });
    const columns = app.runs.map((run, i) =>
      el(
        "section",
        { "aria-label": `Run ${run.mark}` },
        el("h3", { class: `run-${run.mark}`, text: `${run.mark}: ${run.about.name}` }),
        ...found[i].rows.map((row) => answer(run, row, found[i].rows)),
      ),
    );
    answers.replaceChildren(
      el("div", { class: "text prompt", text: one?.prompt ?? "" }),
      ...(differ ? [differ] : []),
      el("div", { class: "columns" }, ...columns),
    );
  }

  function answer(run, row, rows) {
    const facts = `${number(row.length)} tokens, ${row.finish ?? "–"}`;
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
        inBoth().map((one) => [one, one]),
      ),
  };
}
