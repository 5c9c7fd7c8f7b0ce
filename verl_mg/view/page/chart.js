// One metric over the steps, a line for each run: drawn when it is visible; a tooltip shows the values at the pointer.

import { placeOf } from "./data.js";
import { el, hideTooltip, showTooltip, svg } from "./dom.js";
import { number, ticks } from "./format.js";

const LEFT = 46,
  RIGHT = 14,
  TOP = 8,
  BOTTOM = 20;

/** The running mean in which a step counts `weight` times the next one; missing values remain missing. */
export function smoothed(values, weight) {
  let [sum, count] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value;
    count = count * weight + 1;
    return sum / count;
  });
}

/** Charts that share a step under the pointer. */
export class Charts {
  constructor() {
    this.all = new Set();
    this.seen = new IntersectionObserver(
      (entries) =>
        entries.forEach(({ target, isIntersecting }) => {
          target.chart.visible = isIntersecting;
          target.chart.draw();
        }),
      { rootMargin: "300px" },
    );
    this.sized = new ResizeObserver((entries) => entries.forEach(({ target }) => target.chart.draw()));
  }

  add(name) {
    const chart = new Chart(name, (step) => this.all.forEach((other) => other.point(step)));
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
  constructor(name, pointAll) {
    this.name = name;
    this.pointAll = pointAll;
    this.series = [];
    this.visible = false;
    this.drawn = "";
    this.cursor = svg("g", { class: "cursor" });
    this.picture = svg("svg", { "aria-hidden": "true" });
    this.node = el(
      "div",
      {
        class: "chart",
        tabindex: 0,
        role: "img",
        onpointermove: (event) => this.pointed(event),
        onpointerleave: () => this.left(),
        onblur: () => this.left(),
        onkeydown: (event) => this.keyed(event),
      },
      this.picture,
    );
  }

  /** series: of each run `mark`, `name`, `steps`, `values` and their `smooth` ones. */
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
    this.drawn = wanted;
    this.measure(width, height);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.picture.replaceChildren(
      ...this.grid(width, height),
      ...this.series.flatMap((item) => this.lines(item)),
      this.cursor,
    );
  }

  measure(width, height) {
    const steps = this.series.flatMap((item) => [item.steps[0], item.steps.at(-1)]);
    let [low, high] = [Infinity, -Infinity];
    for (const { values } of this.series) {
      for (const value of values) {
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

  lines({ mark, steps, values, smooth }) {
    const drawn = [];
    if (smooth !== values) drawn.push(svg("path", { class: `raw run-${mark}`, d: this.path(steps, values) }));
    drawn.push(svg("path", { class: `line run-${mark}`, d: this.path(steps, smooth) }));
    if (steps.length < 2)
      drawn.push(svg("circle", { class: `dot run-${mark}`, cx: this.x(steps[0]), cy: this.y(smooth[0]), r: 3 }));
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

  pointed(event) {
    if (!this.x || !this.series.length) return;
    const { left } = this.node.getBoundingClientRect();
    this.showValues(Math.round(this.stepAt(event.clientX - left)), event.clientX, event.clientY);
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
      return [[item.name, report, `run-${item.mark}`]];
    });
    const near = this.nearest(step)[0];
    showTooltip(x, y, `${this.name}, step ${near ? near.item.steps[near.i] : step}`, rows);
  }

  left() {
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
        svg("circle", { class: `dot run-${item.mark}`, cx: this.x(item.steps[i]), cy: this.y(item.smooth[i]), r: 3.5 }),
      );
    const x = this.x(step);
    this.cursor.replaceChildren(svg("line", { x1: x, x2: x, y1: TOP, y2: height - BOTTOM }), ...dots);
  }
}
