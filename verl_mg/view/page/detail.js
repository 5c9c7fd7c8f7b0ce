// One sample in a dialog: rewards, and prompt and response token by token or the conversation of an agent.

import { ask } from "./data.js";
import { conversationOf } from "./conversation.js";
import { el, select } from "./dom.js";
import { extent, number, plain } from "./format.js";
import { longText } from "./messages.js";
import { coloured, colourings } from "./tokens.js";

const PLAIN = "plain";
const CONVERSATION = "conversation",
  TOKENS = "tokens";
/** Numbers of a sample with a separate place in the dialog. */
const SHOWN = new Set([
  ..."iteration call sample_id group prompt_id policy_version reward prompt_length".split(" "),
  ..."trajectory prefix_of prefix_length".split(" "),
]);

/** Samples that a group can have at most. */
const MOST = 1000;

/** `open(run, row, rows)` shows a sample of a list; the arrow keys switch to the next ones. */
export function detailSheet() {
  const title = el("h2");
  const body = el("div", { class: "body", tabindex: -1, autofocus: true });
  const step = (by, label, text) => el("button", { type: "button", "aria-label": label, text, onclick: () => go(by) });
  const [back, on] = [step(-1, "Previous sample", "‹"), step(1, "Next sample", "›")];
  const close = el("button", { type: "button", "aria-label": "Close", text: "✕", onclick: () => sheet.close() });
  const sheet = el(
    "dialog",
    {
      class: "sheet",
      "aria-label": "Sample",
      onclick: (event) => event.target === sheet && sheet.close(),
      onkeydown: (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (by && !["SELECT", "INPUT"].includes(event.target.tagName)) go(by);
      },
    },
    el("header", {}, title, back, on, close),
    body,
  );
  let [run, rows, place, colour, tab] = [null, [], 0, "advantages", CONVERSATION];
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

  async function load(row) {
    const { iteration, call, sample_id } = row;
    const request = (latest += 1);
    const hasAgent = row.agent_turns !== null;
    [back.disabled, on.disabled] = [place <= 0, place < 0 || place >= rows.length - 1];
    title.textContent = `Sample ${sample_id}`;
    if (hasAgent) title.textContent += `: segment ${row.segment} of trajectory ${row.trajectory}`;
    try {
      // A conversation comes without the tokens, which are much more.
      const name = hasAgent && tab === CONVERSATION ? "conversation" : "sample";
      const answer = await ask(name, { run: run.number, iteration, call, sample_id });
      const group = await ask("samples", {
        run: run.number,
        first: iteration,
        last: iteration,
        call,
        group: row.group,
        trajectories: true,
        limit: MOST,
      });
      if (request !== latest) return;
      const conversation = name === CONVERSATION ? answer : null;
      sheet.classList.toggle("wide", conversation !== null);
      const parts = [
        hasAgent && tabsOf(row),
        facts(conversation?.sample ?? answer, row),
        siblings(row, group.rows),
        ...(conversation ? [conversationOf(conversation, (other) => turnTo(TOKENS, other))] : tokensOf(answer, hasAgent)),
      ];
      body.replaceChildren(...parts.filter(Boolean));
      body.scrollTop = 0;
      // Keys reach the dialog only through an element that exists and is not disabled.
      const focused = document.activeElement;
      if (!sheet.contains(focused) || focused.disabled) body.focus();
    } catch (error) {
      if (request === latest) body.replaceChildren(el("p", { class: "empty", text: error.message }));
    }
  }

  function tabsOf(row) {
    const button = (name, label) =>
      el("button", {
        type: "button",
        "aria-pressed": String(tab === name),
        text: label,
        onclick: () => turnTo(name, row),
      });
    return el(
      "div",
      { class: "tabs", role: "group", "aria-label": "Show" },
      button(CONVERSATION, "Conversation"),
      button(TOKENS, `Tokens of segment ${row.segment}`),
    );
  }

  function turnTo(name, row) {
    tab = name;
    move(row);
  }

  /** Shows a sample that need not be in the list. */
  function move(row) {
    place = rows.findIndex((other) => ["iteration", "call", "sample_id"].every((name) => other[name] === row[name]));
    load(row);
  }

  function tokensOf(sample, hasAgent) {
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
    return [
      el(
        "section",
        {},
        el("h3", { text: hasAgent ? "Context" : "Prompt" }),
        // What an agent gave the policy can be other than the prompt of the data.
        longText(hasAgent ? sample.pieces.slice(0, sample.prompt_length).join("") : sample.prompt, "text prompt"),
      ),
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
  }

  function facts(sample, row) {
    const versions = (sample.policy_versions ?? []).filter((_, i) => sample.loss_mask[i]);
    const [oldest, newest] = extent(versions);
    const report = [
      ["reward", sample.reward],
      ...Object.entries(sample.parts ?? {}),
      ["iteration", sample.iteration],
      ["prompt", sample.prompt_id],
      ["group", sample.group],
      ["tokens", `${sample.prompt_length} + ${row.length}`],
      ["finish", sample.finish],
      ["source", sample.source],
      ["version", versions.length && oldest !== newest ? `${oldest} to ${newest}` : sample.policy_version],
      ["call", sample.call],
      ...(row.agent_turns === null ? [] : [["turns", row.agent_turns]]),
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
  function siblings({ trajectory }, group) {
    const chips = group.map((row) =>
      el("button", {
        type: "button",
        class: row.agent_error ? "chip bad" : "chip",
        "aria-current": row.trajectory === trajectory ? "true" : null,
        "aria-label": `Sample ${row.sample_id}, reward ${number(row.reward)}`,
        text: number(row.reward),
        onclick: () => move(row),
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
