// Messages of a conversation: texts, reasoning, and calls of tools with their results.

import { el } from "./dom.js";

const SHOWN_CHARACTERS = 4000;
/** A text with so many characters more is shown whole. */
const SPARED = 1000;

/** A text that can be megabytes long: its begin, and a button for the rest. */
export function longText(value, css = "text") {
  const text = typeof value === "string" ? value : JSON.stringify(value ?? "");
  if (text.length <= SHOWN_CHARACTERS + SPARED) return el("div", { class: css, text });
  const node = el("div", { class: css, text: text.slice(0, SHOWN_CHARACTERS) });
  const more = el("button", {
    type: "button",
    class: "more",
    text: `… show all ${text.length.toLocaleString("en")} characters`,
    onclick: () => {
      node.textContent = text;
      more.remove();
    },
  });
  return el("div", {}, node, more);
}

/** Calls and results in the order of the turns: of each turn's messages and reply a list of `{message, calls}`. */
export function matched(turns) {
  const latest = new Map();
  return turns.map((turn, number) => {
    const withCalls = (message) => {
      const calls = (message.tool_calls ?? []).map((call) => ({ call, number, results: [] }));
      for (const entry of calls) latest.set(entry.call.id, entry);
      return { message, calls };
    };
    const messages = (turn.messages ?? []).map((message) => {
      // A fork repeats results: each belongs to the latest call of its id.
      const made = message.role === "tool" ? latest.get(message.tool_call_id) : undefined;
      made?.results.push({ message, number });
      return { ...withCalls(message), made };
    });
    return { messages, reply: withCalls(turn.reply ?? {}) };
  });
}

/** A message or reply; `jump(number)` shows another turn. */
export function messageOf({ message, calls }, jump, role = message.role) {
  const { reasoning_content: reasoning, content } = message;
  return el(
    "section",
    { class: `message ${role}` },
    el("h5", { text: role === "tool" ? "result of an unknown call" : role }),
    reasoning &&
      el(
        "details",
        { class: "reasoning" },
        el("summary", { text: `reasoning, ${reasoning.length.toLocaleString("en")} characters` }),
        longText(reasoning),
      ),
    (content || !(reasoning || calls.length)) && (content ? longText(content) : el("p", { text: "(nothing)" })),
    ...calls.map((entry) => callOf(entry, jump)),
  );
}

function callOf({ call, number, results }, jump) {
  const { name, arguments: given } = call.function ?? call;
  const text = typeof given === "string" ? given : JSON.stringify(given ?? "");
  const pretty = indented(text);
  return el(
    "section",
    { class: "call", "data-call": call.id },
    el(
      "h5",
      {},
      el("strong", { text: name }),
      el("span", { class: "id", text: call.id }),
      pretty === null && el("span", { class: "bad", text: "arguments are not JSON" }),
    ),
    longText(pretty ?? text, "text arguments"),
    ...results.map((result) => resultOf(result, number, jump)),
    !results.length && el("p", { class: "no-result", text: "no result" }),
  );
}

function resultOf({ message, number }, made, jump) {
  const link = el("button", {
    type: "button",
    class: "link",
    text: `turn ${number + 1}`,
    onclick: () => jump(number),
  });
  return el(
    "section",
    { class: "result" },
    el("h5", {}, number === made ? "result" : el("span", {}, "result, in ", link)),
    longText(message.content),
  );
}

/** JSON with a line per entry, its numbers as they were written; null where the text is not JSON. */
export function indented(text) {
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  const pieces = text.match(/"(?:[^"\\]|\\.)*"|[[\]{},:]|[^\s"[\]{},:]+/g) ?? [];
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  return pieces
    .map((piece, i) => {
      const empty = (pieces[i - 1] === "{" && piece === "}") || (pieces[i - 1] === "[" && piece === "]");
      if (piece === "{" || piece === "[") {
        depth += 1;
        return pieces[i + 1] === "}" || pieces[i + 1] === "]" ? piece : piece + line();
      }
      if (piece === "}" || piece === "]") {
        depth -= 1;
        return empty ? piece : line() + piece;
      }
      if (piece === ",") return piece + line();
      if (piece === ":") return ": ";
      // Programs and files are arguments: their lines are lines here too.
      return piece.replace(/\\(.)/g, (whole, code) => ({ n: "\n", t: "\t" })[code] ?? whole);
    })
    .join("");
}
