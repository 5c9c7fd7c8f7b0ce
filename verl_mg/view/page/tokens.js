// The text of a sample, token by token, coloured by what is known of each.

import { el, hideTooltip, showTooltip } from "./dom.js";
import { extent, number, signed } from "./format.js";

const TEXTUAL = new Set(["tokens", "pieces", "loss_mask", "policy_versions", "turns"]);
const NEGATIVE = "217 119 6",
  POSITIVE = "37 99 235",
  VERSION = "124 58 237";
const DEEPEST = 0.55;
/** Tokens of a part of a text after which it ends with the next line, and after which it ends in any case. */
const PART = 300,
  LONGEST_PART = 3000;

/** What tokens can be coloured by: label and value of token i, null where it has none; `sides`: may it be negative? */
export function colourings(sample) {
  const columns = Object.keys(sample).filter((name) => !TEXTUAL.has(name) && isColumn(sample, name));
  const request = (name) => (i) => sample[name][i];
  const gap = (a, b) => (i) => (sample[a][i] === null || sample[b][i] === null ? null : sample[a][i] - sample[b][i]);
  const matches = {};
  const add = (key, label, value, sides = true) => (matches[key] = { label, value, sides });
  if (columns.includes("advantages")) add("advantages", "advantages", request("advantages"));
  const pairs = [
    ["old", "rollout"],
    ["ref", "rollout"],
    ["old", "ref"],
  ];
  for (const [a, b] of pairs) {
    const names = [`${a}_logprobs`, `${b}_logprobs`];
    if (names.every((name) => columns.includes(name))) add(`${a}-${b}`, `log-prob: ${a} - ${b}`, gap(...names));
  }
  for (const name of columns) if (name !== "advantages") add(name, name, request(name));
  if (sample.policy_versions) add("policy_versions", "version of the weights", request("policy_versions"), false);
  return matches;
}

function isColumn(sample, name) {
  const value = sample[name];
  return (
    Array.isArray(value) &&
    value.length === sample.tokens.length &&
    value.every((item) => item === null || typeof item === "number")
  );
}

/** The scale of a colouring over the tokens that the policy wrote: all but the 2 % that stick out most. */
function scaleOf(sample, { value, sides }) {
  const matches = [];
  for (let i = sample.prompt_length; i < sample.tokens.length; i++) {
    const item = sample.loss_mask[i] ? value(i) : null;
    if (item !== null) matches.push(item);
  }
  if (!matches.length) return { low: 0, high: 0 };
  if (!sides) {
    const [low, high] = extent(matches);
    return { low, high };
  }
  const sizes = matches.map(Math.abs).sort((a, b) => a - b);
  const high = sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.98))] || sizes.at(-1);
  return { low: -high, high };
}

function colourOf(value, { low, high }, sides) {
  if (value === null || high === low) return "";
  if (!sides) return `rgb(${VERSION} / ${(((value - low) / (high - low)) * DEEPEST).toFixed(3)})`;
  const depth = Math.min(1, Math.abs(value) / high) * DEEPEST;
  return depth < 0.01 ? "" : `rgb(${value < 0 ? NEGATIVE : POSITIVE} / ${depth.toFixed(3)})`;
}

/** The response in turns of policy and tool, and a legend. */
export function coloured(sample, colouring) {
  const scale = colouring ? scaleOf(sample, colouring) : null;
  const token = (i) => {
    const piece = sample.pieces?.[i] ?? `⟨${sample.tokens[i]}⟩`;
    const span = el("span", { class: piece.includes("\n") ? "token newline" : "token", "data-token": i, text: piece });
    if (colouring && sample.loss_mask[i])
      span.style.backgroundColor = colourOf(colouring.value(i), scale, colouring.sides);
    return span;
  };
  // Parts that are not on the screen are not laid out, which takes seconds for a long text as a whole.
  const range = (from, to) => {
    const parts = [];
    for (let i = from, begin = from; i < to; i++) {
      const long = i - begin >= PART && (sample.pieces?.[i].endsWith("\n") || i - begin >= LONGEST_PART);
      if (!long && i < to - 1) continue;
      const tokens = Array.from({ length: i + 1 - begin }, (_, k) => token(begin + k));
      parts.push(el("div", { class: tokens.length >= PART ? "part" : null }, ...tokens));
      begin = i + 1;
    }
    return parts;
  };
  const turns = sample.turns?.length
    ? sample.turns
    : [{ by: "policy", start: sample.prompt_length, end: sample.tokens.length }];
  const blocks = turns.map(({ by, start, end }) =>
    el("section", { class: `turn ${by}` }, el("h4", { text: by }), el("div", { class: "text" }, ...range(start, end))),
  );
  const body = el(
    "div",
    {
      class: "turns",
      onpointermove: (event) => report(event, sample, colouring),
      onpointerleave: hideTooltip,
    },
    ...blocks,
  );
  return el("div", {}, colouring ? legend(colouring, scale) : null, body);
}

function legend({ label, sides }, { low, high }) {
  const report = sides ? signed : number;
  const bar = el("span", { class: "gradient" });
  const [from, middle, to] = sides
    ? [`rgb(${NEGATIVE} / ${DEEPEST})`, "transparent", `rgb(${POSITIVE} / ${DEEPEST})`]
    : [`rgb(${VERSION} / 0)`, `rgb(${VERSION} / ${DEEPEST / 2})`, `rgb(${VERSION} / ${DEEPEST})`];
  bar.style.backgroundImage = `linear-gradient(to right, ${from}, ${middle}, ${to})`;
  return el(
    "p",
    { class: "legend" },
    `${label}: `,
    el("span", { class: "number", text: report(low) }),
    bar,
    el("span", { class: "number", text: report(high) }),
  );
}

function report(event, sample, colouring) {
  const place = event.target.dataset?.token;
  if (place === undefined) {
    hideTooltip();
    return;
  }
  const i = Number(place);
  const rows = [["token", `${sample.tokens[i]}, at ${i}`]];
  if (colouring) rows.push([colouring.label, number(colouring.value(i))]);
  for (const name of Object.keys(sample)) {
    if (!TEXTUAL.has(name) && isColumn(sample, name) && name !== colouring?.label)
      rows.push([name, number(sample[name][i])]);
  }
  if (sample.policy_versions) rows.push(["version", sample.policy_versions[i]]);
  if (!sample.loss_mask[i]) rows.push(["", "not trained on"]);
  showTooltip(event.clientX, event.clientY, JSON.stringify(sample.pieces?.[i] ?? ""), rows);
}
