// Data of the server, and the part that the page keeps.

/** The JSON of an answer; an Error with the server's reason otherwise. */
export async function ask(name, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const answer = await fetch(`/api/${name}?${new URLSearchParams(given)}`);
  const report = await answer.json();
  if (!answer.ok) throw new Error(report.error);
  return report;
}

/** One of the runs on the command line. `mark` is A or B, which the page's colours go by. */
export class Run {
  constructor(number, about) {
    this.number = number;
    this.mark = "AB"[number];
    this.about = about;
    this.place = { file: "", end: 0 };
    this.curves = new Map();
  }

  /** Reads the lines of metrics that have come since the last time; were there any? */
  async readMetrics() {
    let changed = false;
    for (let more = true; more;) {
      const report = await ask("metrics", { run: this.number, file: this.place.file, offset: this.place.end });
      if (report.begin === 0 && this.place.end > 0) {
        this.curves = new Map();
        changed = true;
      }
      for (const line of report.lines) this.add(line);
      changed ||= report.lines.length > 0;
      this.place = report;
      more = report.more;
    }
    return changed;
  }

  add({ step, ...metrics }) {
    for (const [name, value] of Object.entries(metrics)) {
      if (value !== null && typeof value !== "number") continue;
      if (!this.curves.has(name)) this.curves.set(name, { steps: [], values: [] });
      const curve = this.curves.get(name);
      curve.steps.push(step);
      curve.values.push(value);
    }
  }
}

/** The place of the last entry that is at most `wanted` in an ascending list; 0 where all are larger. */
export function placeOf(list, wanted) {
  let [low, high] = [0, list.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (list[middle] <= wanted) low = middle;
    else high = middle - 1;
  }
  return low;
}
