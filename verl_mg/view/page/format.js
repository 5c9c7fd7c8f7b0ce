// Numbers as people read them.

/** Four digits that matter; "–" for none. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size < 1e7 && Number.isInteger(value)) return String(value);
  const small = size >= 1e5 || size < 1e-4;
  return small ? value.toExponential(3).replace(/\.?0+e\+?/, "e") : String(Number(value.toPrecision(4)));
}

/** A count with its digits in groups of three. */
export function grouped(count) {
  return count.toLocaleString("en");
}

/** The least and the largest number of a list of any length. */
export function extent(list) {
  return list.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

/** Seconds with a unit. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${number(value * 1e6)} µs`;
  return value < 1 ? `${number(value * 1e3)} ms` : `${number(value)} s`;
}

/** A long time in its two largest units: 2 h 5 min. */
export function duration(value) {
  const whole = Math.round(value);
  const [days, hours, minutes] = [
    Math.floor(whole / 86400),
    Math.floor(whole / 3600) % 24,
    Math.floor(whole / 60) % 60,
  ];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

/** Text and whole numbers, such as those that name a sample, as they are. */
export function plain(value) {
  return typeof value === "number" && !Number.isInteger(value) ? number(value) : String(value ?? "–");
}

/** With its sign, for differences. */
export function signed(value) {
  return value > 0 ? `+${number(value)}` : number(value);
}

/** Round numbers within [low, high], about so many. */
export function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const matches = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    matches.push(Number((i * step).toPrecision(12)));
  return matches;
}
