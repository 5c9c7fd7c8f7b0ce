// Data of the server.

/** The JSON of an answer; an Error with the server's reason otherwise. */
export async function ask(name, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const answer = await fetch(`/api/${name}?${new URLSearchParams(given)}`);
  const report = await answer.json();
  if (!answer.ok) throw new Error(report.error);
  return report;
}

const TINTS = "ABCDEFGH";

/** One of the runs on the command line. `mark` is a letter, `tint` the class of its colour. */
export class Run {
  constructor(number, about) {
    this.number = number;
    this.mark = number < 26 ? String.fromCharCode(65 + number) : String(number + 1);
    this.tint = `run-${TINTS[number % TINTS.length]}`;
    this.about = about;
  }

  /** The latest value of each metric. */
  get latest() {
    return this.about.metrics.names;
  }

  /** The newest iteration with samples. */
  get newest() {
    return this.about.samples.at(-1)?.[1];
  }

  hasSamples(iteration) {
    return this.about.samples.some(([first, last]) => first <= iteration && iteration <= last);
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
