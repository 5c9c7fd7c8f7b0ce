// One sample in a dialog: prompt, response turn by turn, and rewards.

import { ask } from "./data.js";
import { el, select } from "./dom.js";
import { extent, number, plain } from "./format.js";
import { coloured, colourings } from "./tokens.js";

const PLAIN = "plain";
/** Numbers of a sample with a separate place in the dialog. */
const SHOWN = new Set("iteration call sample_id group prompt_id policy_version reward prompt_length".split(" "));

/** `open(run, row, rows)` shows a sample of a list; the arrow keys switch to the next ones. */
export function detailSheet() {
  const title = el("h2");
  const body = el("div", { class: "body" });
  const move = (by, label, text) => el("button", { type: "button", "aria-label": label, text, onclick: () => go(by) });
  const [back, on] = [move(-1, "Previous sample", "‹"), move(1, "Next sample", "›")];
  const close = el("button", { type: "button", "aria-label": "Close", text: "✕", onclick: () => sheet.close() });
  const sheet = el(
    "dialog",
    {
      class: "sheet",
      "aria-label": "Sample",
      onclick: (event) => event.target === sheet && sheet.close(),
      onkeydown: (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (by && event.target.tagName !== "SELECT") go(by);
      },
    },
    el("header", {}, title, back, on, close),
    body,
  );
  let [run, rows, place, colour] = [null, [], 0, "advantages"];
  let latest = 0;

  function open(ofRun, row, list) {
    [run, rows, place] = [ofRun, list, list.indexOf(row)];
    document.body.append(sheet);
    if (!sheet.open) sheet.showModal();
    load(row);
  }

  function go(by) {
    if (place < 0 || place + by < 0 || place + by >= rows.length) return;
    place += by;
    load(rows[place]);
  }

  async function load({ iteration, call, sample_id }) {
    const request = (latest += 1);
    [back.disabled, on.disabled] = [place <= 0, place < 0 || place >= rows.length - 1];
    title.textContent = `Sample ${sample_id}`;
    try {
      const sample = await ask("sample", { run: run.number, iteration, call, sample_id });
      const group = await ask("samples", {
        run: run.number,
        first: iteration,
        last: iteration,
        call,
        group: sample.group,
        limit: 200,
      });
      if (request === latest) draw(sample, group.rows);
    } catch (error) {
      if (request === latest) body.replaceChildren(el("p", { class: "empty", text: error.message }));
    }
  }

  function draw(sample, group) {
    const choices = colourings(sample);
    if (!(colour in choices)) colour = "advantages" in choices ? "advantages" : PLAIN;
    const options = [[PLAIN, "nothing"], ...Object.entries(choices).map(([key, { label }]) => [key, label])];
    const response = el("div", { class: "response" });
    const chooser = select({ "aria-label": "Colour tokens by", onchange: () => paint(chooser.value) }, options);
    const paint = (name) => {
      colour = name;
      response.replaceChildren(coloured(sample, choices[name]));
    };
    chooser.value = colour;
    paint(colour);
    const parts = [
      facts(sample),
      siblings(sample, group),
      el("section", {}, el("h3", { text: "Prompt" }), el("div", { class: "text prompt", text: sample.prompt })),
      sample.answer &&
        el(
          "section",
          {},
          el("h3", { text: "Expected answer" }),
          el("div", { class: "text answer", text: sample.answer }),
        ),
      el(
        "section",
        {},
        el("header", {}, el("h3", { text: "Response" }), el("label", {}, "Colour by ", chooser)),
        response,
      ),
    ];
    body.replaceChildren(...parts.filter(Boolean));
    body.scrollTop = 0;
  }

  function facts(sample) {
    const versions = (sample.policy_versions ?? []).filter((_, i) => sample.loss_mask[i]);
    const [oldest, newest] = extent(versions);
    const report = [
      ["reward", sample.reward],
      ...Object.entries(sample.parts ?? {}),
      ["iteration", sample.iteration],
      ["prompt", sample.prompt_id],
      ["group", sample.group],
      ["tokens", `${sample.prompt_length} + ${sample.tokens.length - sample.prompt_length}`],
      ["finish", sample.finish],
      ["source", sample.source],
      ["version", versions.length && oldest !== newest ? `${oldest} to ${newest}` : sample.policy_version],
      ["call", sample.call],
      ...Object.entries(sample).filter(
        ([name, value]) => !SHOWN.has(name) && typeof value === "number" && Math.abs(value) <= Number.MAX_SAFE_INTEGER,
      ),
    ];
    return el(
      "dl",
      { class: "facts" },
      ...report.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: plain(value) }))),
    );
  }

  /** The rewards of all responses to this prompt, to switch between them. */
  function siblings(sample, group) {
    const chips = group.map((row) =>
      el("button", {
        type: "button",
        class: "chip",
        "aria-current": row.sample_id === sample.sample_id ? "true" : null,
        "aria-label": `Sample ${row.sample_id}, reward ${number(row.reward)}`,
        text: number(row.reward),
        onclick: () => {
          place = rows.findIndex((other) =>
            ["iteration", "call", "sample_id"].every((name) => other[name] === row[name]),
          );
          load(row);
        },
      }),
    );
    return el(
      "section",
      { class: "siblings" },
      el("h3", { text: "Rewards of its group" }),
      el("div", { class: "chips" }, ...chips),
    );
  }

  return { open };
}
