// One metric over the steps, a line for each run: drawn when it is visible; a tooltip shows the values at the pointer.

import { placeOf } from "./data.js";
import { el, hideTooltip, showTooltip, svg } from "./dom.js";
import { number, ticks } from "./format.js";

const LEFT = 46,
  RIGHT = 14,
  TOP = 8,
  BOTTOM = 20;

/** Charts that share a step under the pointer, and a range of steps that is chosen by dragging. */
export class Charts {
  /** need(): called when a chart needs values; zoom(range): with the steps that were chosen, null for all. */
  constructor(need, zoom) {
    this.all = new Set();
    this.zoom = zoom;
    this.seen = new IntersectionObserver(
      (entries) =>
        entries.forEach(({ target, isIntersecting }) => {
          target.chart.visible = isIntersecting;
          target.chart.draw();
          if (isIntersecting) need();
        }),
      { rootMargin: "300px" },
    );
    this.sized = new ResizeObserver((entries) => entries.forEach(({ target }) => target.chart.draw()));
  }

  add(name) {
    const chart = new Chart(name, (step) => this.all.forEach((other) => other.point(step)), this.zoom);
    chart.node.chart = chart;
    this.all.add(chart);
    this.seen.observe(chart.node);
    this.sized.observe(chart.node);
    return chart;
  }

  remove(chart) {
    this.all.delete(chart);
    this.seen.unobserve(chart.node);
    this.sized.unobserve(chart.node);
  }
}

class Chart {
  constructor(name, pointAll, zoom) {
    this.name = name;
    this.pointAll = pointAll;
    this.zoom = zoom;
    this.loaded = ""; // what its values are of
    this.began = null; // where dragging has begun
    this.series = [];
    this.visible = false;
    this.drawn = "";
    this.cursor = svg("g", { class: "cursor" });
    this.selection = svg("rect", { class: "selection", y: TOP, width: 0 });
    this.picture = svg("svg", { "aria-hidden": "true" });
    this.node = el(
      "div",
      {
        class: "chart",
        tabindex: 0,
        role: "img",
        onpointerdown: (event) => (this.began = this.placeIn(event)),
        onpointermove: (event) => this.pointed(event),
        onpointerup: (event) => this.released(event),
        onpointerleave: () => this.left(),
        ondblclick: () => this.zoom(null),
        onblur: () => this.left(),
        onkeydown: (event) => this.keyed(event),
      },
      this.picture,
    );
  }

  /** series: of each run `tint`, `name`, `steps`, `values`, their `smooth` ones, of several runs `low` and `high` too. */
  set(series) {
    this.series = series.filter(({ values }) => values.some((value) => value !== null));
    this.drawn = "";
    const last = this.series.map(
      ({ name, steps, values }) => `${name} ${number(values.at(-1))} at step ${steps.at(-1)}`,
    );
    this.node.setAttribute("aria-label", `${this.name}: ${last.join(", ")}`);
    this.draw();
  }

  draw() {
    const { width, height } = this.node.getBoundingClientRect();
    const wanted = `${width}x${height}`;
    if (!this.visible || width < 80 || this.drawn === wanted) return;
    if (!this.series.length) return this.picture.replaceChildren(); // nothing has been loaded yet
    this.drawn = wanted;
    this.measure(width, height);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.picture.replaceChildren(
      ...this.grid(width, height),
      ...this.series.flatMap((item) => this.areas(item)),
      ...this.series.flatMap((item) => this.lines(item)),
      this.selection,
      this.cursor,
    );
  }

  measure(width, height) {
    const steps = this.series.flatMap((item) => [item.steps[0], item.steps.at(-1)]);
    let [low, high] = [Infinity, -Infinity];
    for (const { values, low: lowest, high: highest } of this.series) {
      for (const value of lowest ? [...lowest, ...highest] : values) {
        if (value === null) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (!(high > low)) [low, high] = [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
    const margin = (high - low) * 0.06;
    [this.low, this.high] = [low - margin, high + margin];
    [this.first, this.last] = [Math.min(...steps), Math.max(...steps)];
    const [wide, tall] = [width - LEFT - RIGHT, height - TOP - BOTTOM];
    this.x = (step) => LEFT + (this.last > this.first ? (step - this.first) / (this.last - this.first) : 0.5) * wide;
    this.y = (value) => TOP + (1 - (value - this.low) / (this.high - this.low)) * tall;
    this.stepAt = (x) => this.first + ((x - LEFT) / wide) * (this.last - this.first);
  }

  grid(width, height) {
    const rows = ticks(this.low, this.high, height / 45).flatMap((value) => [
      svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: this.y(value), y2: this.y(value) }),
      svg("text", { class: "tick", x: LEFT - 6, y: this.y(value) + 3.5, "text-anchor": "end", text: number(value) }),
    ]);
    const columns = ticks(this.first, this.last, width / 80)
      .filter(Number.isInteger)
      .map((step) =>
        svg("text", { class: "tick", x: this.x(step), y: height - 5, "text-anchor": "middle", text: step }),
      );
    return [...rows, ...columns];
  }

  /** The band of several runs, in a piece for each range without missing values. */
  areas({ tint, steps, low, high }) {
    if (!low) return [];
    const pieces = [];
    let piece = [];
    const at = (i, value) => `${this.x(steps[i]).toFixed(1)} ${this.y(value).toFixed(1)}`;
    const flush = () => {
      if (piece.length > 1)
        pieces.push(`M${[...piece.map((i) => at(i, high[i])), ...piece.reverse().map((i) => at(i, low[i]))].join("L")}Z`);
      piece = [];
    };
    steps.forEach((_, i) => (low[i] === null ? flush() : piece.push(i)));
    flush();
    return [svg("path", { class: `band ${tint}`, d: pieces.join("") })];
  }

  lines({ tint, steps, values, smooth }) {
    const drawn = [];
    if (smooth !== values) drawn.push(svg("path", { class: `raw ${tint}`, d: this.path(steps, values) }));
    drawn.push(svg("path", { class: `line ${tint}`, d: this.path(steps, smooth) }));
    if (steps.length < 2)
      drawn.push(svg("circle", { class: `dot ${tint}`, cx: this.x(steps[0]), cy: this.y(smooth[0]), r: 3 }));
    return drawn;
  }

  /** Of many points in a pixel, the lowest and the highest. */
  path(steps, values) {
    const points = [];
    let broken = true;
    let column = null;
    const flush = () => {
      if (!column) return;
      const ends =
        column.lowest.i < column.highest.i ? [column.lowest, column.highest] : [column.highest, column.lowest];
      for (const point of ends[0].i === ends[1].i ? [ends[0]] : ends) {
        points.push(`${broken ? "M" : "L"}${this.x(steps[point.i]).toFixed(1)} ${this.y(point.value).toFixed(1)}`);
        broken = false;
      }
      column = null;
    };
    values.forEach((value, i) => {
      if (value === null) {
        flush();
        broken = true;
        return;
      }
      const pixel = Math.floor(this.x(steps[i]));
      if (column && column.pixel !== pixel) flush();
      column ??= { pixel, lowest: { i, value }, highest: { i, value } };
      if (value < column.lowest.value) column.lowest = { i, value };
      if (value > column.highest.value) column.highest = { i, value };
    });
    flush();
    return points.join("");
  }

  placeIn(event) {
    return event.clientX - this.node.getBoundingClientRect().left;
  }

  pointed(event) {
    if (!this.x || !this.series.length) return;
    this.showValues(Math.round(this.stepAt(this.placeIn(event))), event.clientX, event.clientY);
    if (this.began === null) return;
    const [from, to] = [this.began, this.placeIn(event)].sort((p, q) => p - q);
    const height = this.node.getBoundingClientRect().height - TOP - BOTTOM;
    for (const [name, value] of Object.entries({ x: from, width: to - from, height }))
      this.selection.setAttribute(name, value);
  }

  released(event) {
    const ends = [this.began, this.placeIn(event)].sort((p, q) => p - q);
    if (this.began !== null && this.x && ends[1] - ends[0] > 6) {
      const [first, last] = ends.map((x) => Math.round(this.stepAt(x)));
      this.left();
      this.zoom([Math.max(this.first, first), Math.min(this.last, last)]);
    }
    this.began = null;
    this.selection.setAttribute("width", 0);
  }

  keyed(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !this.x) return;
    event.preventDefault();
    const { left, top } = this.node.getBoundingClientRect();
    const step = Math.min(
      this.last,
      Math.max(this.first, (this.step ?? (move < 0 ? this.last + 1 : this.first - 1)) + move),
    );
    this.showValues(step, left + this.x(step), top + TOP);
  }

  showValues(step, x, y) {
    this.pointAll(step);
    const rows = this.nearest(step).flatMap(({ item, i }) => {
      const value = number(item.values[i]);
      const report = item.smooth === item.values ? value : `${number(item.smooth[i])}  (${value})`;
      const range = item.low ? `${value}  (${number(item.low[i])} to ${number(item.high[i])})` : report;
      return [[item.name, range, item.tint]];
    });
    const near = this.nearest(step)[0];
    showTooltip(x, y, `${this.name}, step ${near ? near.item.steps[near.i] : step}`, rows);
  }

  left() {
    this.began = null;
    this.selection.setAttribute("width", 0);
    this.pointAll(null);
    hideTooltip();
  }

  /** Of each run, the place of the step that is nearest. */
  nearest(step) {
    return this.series.map((item) => {
      const i = placeOf(item.steps, step);
      const after = i + 1 < item.steps.length && item.steps[i + 1] - step < step - item.steps[i];
      return { item, i: after ? i + 1 : i };
    });
  }

  point(step) {
    this.step = step;
    if (step === null || !this.visible || !this.x || !this.series.length || step < this.first || step > this.last) {
      this.cursor.replaceChildren();
      return;
    }
    const { height } = this.node.getBoundingClientRect();
    const dots = this.nearest(step)
      .filter(({ item, i }) => item.smooth[i] !== null)
      .map(({ item, i }) =>
        svg("circle", { class: `dot ${item.tint}`, cx: this.x(item.steps[i]), cy: this.y(item.smooth[i]), r: 3.5 }),
      );
    const x = this.x(step);
    this.cursor.replaceChildren(svg("line", { x1: x, x2: x, y1: TOP, y2: height - BOTTOM }), ...dots);
  }
}
