// Readable text from numbers, in the words of the reports (holdfast/base/formatting.py).

export const DASH = "–";
const GAP = "\u00a0"; // between a number and its unit no line breaks
const WHOLE = new Intl.NumberFormat("en-US"); // making one takes longer than a frame has time for

/** A duration: "52 ms", "1.30 s", "2 min 5 s", or a dash. */
export function seconds(value) {
  if (!isNumber(value)) return DASH;
  if (value === 0) return `0${GAP}s`;
  if (value < 0.0095) return `${(value * 1e3).toFixed(1)}${GAP}ms`;
  if (value < 0.9995) return `${(value * 1e3).toFixed(0)}${GAP}ms`;
  if (value < 9.995) return `${value.toFixed(2)}${GAP}s`;
  if (value < 60) return `${value.toFixed(1)}${GAP}s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)}${GAP}min${GAP}${whole % 60}${GAP}s`;
  return `${Math.floor(whole / 3600)}${GAP}h${GAP}${Math.floor((whole % 3600) / 60)}${GAP}min`;
}

/** A moment of the run: "at 4.1 s", "at 2 min 5 s". */
export function moment(value) {
  return isNumber(value) && value < 60 ? `${value.toFixed(1)}${GAP}s` : seconds(value);
}

export function percent(part, digits = 1) {
  return isNumber(part) ? `${(part * 100).toFixed(digits)}${GAP}%` : DASH;
}

/** A size in decimal units, such as "12.3 MB". */
export function size(bytes) {
  if (!isNumber(bytes)) return DASH;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  for (; bytes >= 999.95 && unit < units.length - 1; unit += 1) bytes /= 1000;
  return unit === 0 ? `${bytes.toFixed(0)}${GAP}B` : `${bytes.toFixed(1)}${GAP}${units[unit]}`;
}

/** A number with commas between thousands; a fraction has four digits that count. */
export function number(value, digits = 4) {
  if (!isNumber(value)) return DASH;
  if (Number.isInteger(value)) return WHOLE.format(value);
  const magnitude = Math.abs(value);
  return magnitude >= 1e-4 && magnitude < 1e6 ? String(Number(value.toPrecision(digits))) : value.toExponential(2);
}

/** "1 worker", "4 workers". */
export function count(amount, what, many = `${what}s`) {
  return `${number(amount)} ${amount === 1 ? what : many}`;
}

/** "1", "1 and 2", "1, 2 and 3"; beyond `most` items the rest is counted. */
export function listing(items, most = 8) {
  const words = items.slice(0, most).map(String);
  if (items.length > most) words.push(`${items.length - most} more`);
  return words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : (words[0] ?? "");
}

/** Sorted whole numbers as ranges: "0–3, 5". */
export function ranges(numbers) {
  const found = [];
  for (const value of numbers) {
    const last = found.at(-1);
    if (last && value === last[1] + 1) last[1] = value;
    else found.push([value, value]);
  }
  return found.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}

/** The time of day of a Date: "14:03:22". */
export function clock(date) {
  return date.toLocaleTimeString("en-GB");
}

/** "a worker killed" -> "A worker killed". */
export function capital(text) {
  return text ? text[0].toUpperCase() + text.slice(1) : "";
}

/** Evenly spaced round values within [low, high], about `most` of them. */
export function ticks(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) ?? 10);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
  return found;
}

/** The label of a tick: few digits, thousands as k and M. */
export function tick(value) {
  const [unit, name] = Math.abs(value) >= 1e6 ? [1e6, "M"] : Math.abs(value) >= 1e4 ? [1e3, "k"] : [1, ""];
  return `${Number((value / unit).toPrecision(6))}${name}`.replace("-", "−");
}

/** The label of a tick on an axis of time: "30 s", "5 min", "1.5 h". */
export function timeTick(value, span) {
  if (span < 180) return `${Number(value.toPrecision(6))} s`;
  if (span < 3 * 3600) return `${Number((value / 60).toPrecision(4))} min`;
  return `${Number((value / 3600).toPrecision(4))} h`;
}

/** Round moments for an axis of time, about `most` of them. */
export function timeTicks(low, high, most) {
  const unit = high - low < 180 ? 1 : high - low < 3 * 3600 ? 60 : 3600;
  return ticks(low / unit, high / unit, most).map((value) => value * unit);
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}
