// Building the page. Whatever a run wrote goes in as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Attributes: `text` is what it says, a function listens ("onclick"), false and null are left out. */
export function el(tag, attributes = {}, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

/** The same for a part of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, tag), attributes, children);
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** A text in which terms, given in lower case, are marked. */
export function marked(text, terms) {
  const lower = text.toLowerCase();
  // Few letters have another length in lower case; then nothing is marked.
  if (!terms.length || lower.length !== text.length) return [text];
  const parts = [];
  for (let place = 0; place < text.length; ) {
    const hits = terms.map((term) => [lower.indexOf(term, place), term.length]).filter(([begin]) => begin >= 0);
    const [begin, length] = hits.sort(([p, m], [q, n]) => p - q || n - m)[0] ?? [text.length, 0];
    parts.push(text.slice(place, begin));
    if (length) parts.push(el("mark", { text: text.slice(begin, begin + length) }));
    place = begin + length;
  }
  return parts;
}

/** A <select> with these [value, label] pairs. */
export function select(attributes, options) {
  const node = el("select", attributes);
  fill(node, options);
  return node;
}

/** Give a <select> other options; what was chosen stays so where it is still there. */
export function fill(node, options) {
  const wanted = JSON.stringify(options);
  if (node.dataset.options === wanted) return;
  node.dataset.options = wanted;
  const before = node.value;
  node.replaceChildren(...options.map(([value, label]) => el("option", { value, text: label })));
  if (options.some(([value]) => String(value) === before)) node.value = before;
}

/** Call a function when nothing has been typed for a moment. */
export function patiently(action, milliseconds = 250) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, milliseconds);
  };
}

const box = document.getElementById("tooltip");

/** Shows rows of [name, value, class] next to a point of the window. */
export function showTooltip(x, y, title, rows) {
  const cells = rows.flatMap(([name, value, kind]) => [
    el("dt", { text: name, class: kind }),
    el("dd", { text: value }),
  ]);
  box.replaceChildren(el("strong", { text: title }), el("dl", {}, ...cells));
  // Shown again, so that it is above a dialog too.
  hideTooltip();
  box.showPopover();
  const { width, height } = box.getBoundingClientRect();
  const left = x + 14 + width > window.innerWidth ? x - width - 14 : x + 14;
  const top = Math.min(y + 14, window.innerHeight - height - 8);
  box.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

/** Take it away. */
export function hideTooltip() {
  if (box.matches(":popover-open")) box.hidePopover();
}
