// The conversation of an agent: its turns in order, times, segments, and the agent's log.

import { el, hideTooltip, patiently, showTooltip, svg } from "./dom.js";
import { number, plain, seconds } from "./format.js";
import { matched, messageOf } from "./messages.js";

const WIDE = 1000;

/** The conversation of an answer of the server; `openTokens(row)` shows the tokens of a segment. */
export function conversationOf({ sample, conversation, rows }, openTokens) {
  const { turns, segments, log, error } = conversation;
  const length = turns.reduce((most, turn) => Math.max(most, turn.started + turn.seconds), 0) || 1;
  const chosen = rows.find((row) => row.sample_id === sample.sample_id)?.segment ?? 0;
  const cards = [];
  const jump = (place) => {
    cards[place].scrollIntoView({ block: "start" });
    cards[place].focus({ preventScroll: true });
  };
  matched(turns).forEach((parts, place) => cards.push(cardOf(turns, place, parts, length, jump)));
  return el(
    "div",
    { class: "conversation" },
    error && el("p", { class: "failure", role: "alert" }, el("strong", { text: "The agent failed: " }), error),
    !turns.length && el("p", { class: "count", text: "The agent has made no request." }),
    el(
      "section",
      { hidden: !turns.length },
      el("h3", { text: "Time of its turns, a lane per segment" }),
      lanesOf(turns, segments.length, length, jump),
      el("p", { class: "scale" }, el("span", { text: "0 s" }), el("span", { text: seconds(length) })),
    ),
    el(
      "section",
      {},
      el("h3", { text: "Segments" }),
      el("div", { class: "scroll" }, tableOf(turns, segments, rows, chosen, jump, openTokens)),
    ),
    el(
      "div",
      { class: log && turns.length ? "reading with-log" : "reading" },
      el("div", { class: "exchanges", role: "region", "aria-label": "Turns" }, ...cards),
      log && logOf(log, Boolean(error)),
    ),
  );
}

/** A turn: what was new in the request, and the reply. */
function cardOf(turns, place, { messages, reply }, length, jump) {
  const turn = turns[place];
  const cut = turn.finish === "length";
  const bar = el("span", { class: turn.trained ? `bar segment-${turn.segment % 4}` : "bar untrained" });
  bar.style.left = `${(100 * turn.started) / length}%`;
  bar.style.width = `${(100 * turn.seconds) / length}%`;
  const track = el(
    "span",
    {
      class: "track",
      onpointermove: (event) => tooltipOf(event, turns, place),
      onpointerleave: hideTooltip,
    },
    bar,
  );
  const answered = messages.filter(({ made }) => made).map(({ made }) => made);
  const given = messages.filter(({ made }) => !made);
  return el(
    "article",
    { class: "exchange", tabindex: -1, "data-turn": place, "aria-label": `Turn ${place + 1}` },
    el(
      "header",
      {},
      el("h4", { text: `Turn ${place + 1}` }),
      el("span", { class: `segment segment-${turn.segment % 4}`, text: `segment ${turn.segment}` }),
      turn.model && el("span", { text: turn.model }),
      !turn.trained && el("span", { class: "bad", text: "not trained" }),
      el("span", { text: `${number(turn.prompt_tokens)} + ${number(turn.tokens)} tokens` }),
      el("span", { class: cut ? "bad" : null, text: turn.finish }),
      el("span", { class: "times", text: `at ${seconds(turn.started)}, ${seconds(turn.seconds)}` }),
      track,
    ),
    answered.length > 0 && el("p", { class: "answered" }, "results of tools for ", ...linksTo(answered, jump)),
    ...given.map((part) => messageOf(part, jump)),
    messageOf(reply, jump, "assistant"),
  );
}

function linksTo(calls, jump) {
  return calls.flatMap(({ call, number: place }, i) => [
    i ? ", " : "",
    el("button", {
      type: "button",
      class: "link",
      text: `${(call.function ?? call).name} of turn ${place + 1}`,
      onclick: () => jump(place),
    }),
  ]);
}

function tooltipOf(event, turns, place) {
  const turn = turns[place];
  const before = turns[place - 1];
  const rows = [
    ["started at", seconds(turn.started)],
    ["took", seconds(turn.seconds)],
  ];
  if (before) rows.push(["after the turn before", seconds(Math.max(0, turn.started - before.started - before.seconds))]);
  rows.push(["generated tokens", number(turn.tokens)], ["segment", turn.segment], ["model", turn.model || "–"]);
  showTooltip(event.clientX, event.clientY, `turn ${place + 1}, ${turn.finish}`, rows);
}

/** All turns on one scale; what is empty is the agent's time, mostly tools. */
function lanesOf(turns, count, length, jump) {
  const high = Math.max(2, Math.min(14, 160 / Math.max(1, count)));
  const bars = turns.map((turn, place) =>
    svg("rect", {
      class: turn.trained ? `segment-${turn.segment % 4}` : "untrained",
      "data-turn": place,
      x: (WIDE * turn.started) / length,
      y: turn.segment * high,
      width: Math.max(1.5, (WIDE * turn.seconds) / length),
      height: high * 0.85,
    }),
  );
  let focused = -1;
  const under = (event) => event.target.dataset?.turn;
  return svg(
    "svg",
    {
      class: "turn-lanes",
      role: "img",
      tabindex: 0,
      "aria-label": "Times of turns; the keys up and down switch between them",
      viewBox: `0 0 ${WIDE} ${Math.max(1, count) * high}`,
      height: Math.max(1, count) * high,
      preserveAspectRatio: "none",
      onclick: (event) => under(event) !== undefined && jump(Number(under(event))),
      onpointermove: (event) =>
        under(event) === undefined ? hideTooltip() : tooltipOf(event, turns, Number(under(event))),
      onpointerleave: hideTooltip,
      onblur: hideTooltip,
      onkeydown: (event) => {
        const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
        if (event.key === "Enter" && focused >= 0) jump(focused);
        if (!by || !turns.length) return;
        event.preventDefault();
        focused = Math.min(turns.length - 1, Math.max(0, focused + by));
        const { right, bottom } = bars[focused].getBoundingClientRect();
        tooltipOf({ clientX: right, clientY: bottom }, turns, focused);
      },
    },
    ...bars,
  );
}

function tableOf(turns, segments, rows, chosen, jump, openTokens) {
  const head = ["segment", "tokens", "trained", "repeats", "begins with", "response"];
  const lines = segments.map((segment, place) => {
    const first = turns.findIndex((turn) => turn.segment === place);
    const row = rows.find((other) => other.segment === place);
    const shared = (segment.prefix_of ?? place) !== place && segment.prefix_length > 0;
    const link = (text, onclick) => el("button", { type: "button", class: "link", text, onclick });
    return el(
      "tr",
      { "aria-current": place === chosen ? "true" : null, "data-segment": place },
      el("th", { scope: "row" }, el("span", { class: `segment segment-${place % 4}`, text: place })),
      el("td", { class: "number", text: plain(segment.tokens) }),
      el("td", { class: "number", text: plain(segment.trained) }),
      el("td", { text: shared ? `${segment.prefix_length} tokens of segment ${segment.prefix_of}` : "–" }),
      el("td", {}, first < 0 ? "–" : link(`turn ${first + 1}`, () => jump(first))),
      el("td", {}, row ? link("tokens", () => openTokens(row)) : "not recorded"),
    );
  });
  return el(
    "table",
    { class: "segments" },
    el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...lines),
  );
}

function logOf(log, fromEnd) {
  const lines = log.replace(/\n$/, "").split("\n");
  const body = el("div", { class: "text log-lines", tabindex: 0, role: "log", "aria-label": "Log", text: log });
  const count = el("span", { class: "count", text: `${lines.length} lines` });
  const filter = el("input", {
    type: "search",
    placeholder: "Filter lines",
    "aria-label": "Filter lines of the log",
    oninput: patiently(() => {
      const wanted = filter.value.toLowerCase();
      const matches = lines.filter((line) => line.toLowerCase().includes(wanted));
      body.textContent = matches.join("\n");
      count.textContent = wanted ? `${matches.length} of ${lines.length} lines` : `${lines.length} lines`;
    }, 100),
  });
  // Of a failed agent the end is the reason; the page has the node only after this.
  if (fromEnd) queueMicrotask(() => (body.scrollTop = body.scrollHeight));
  return el("aside", { class: "log" }, el("header", {}, el("h3", { text: "Log of the agent" }), count, filter), body);
}
