// Numbers as people read them, and predictions as a CSV file.

/** A share in [0, 1] with three decimals; what would round to a bound it does not reach says so. */
export function share(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (value > 0 && value < 0.0005) return "< 0.001";
  if (value < 1 && value >= 0.9995) return "> 0.999";
  return value.toFixed(3);
}

/** Any number with three significant digits. */
export function figure(value) {
  if (value === null || Number.isNaN(value)) return "–";
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

/** Names without their middle, since they often differ in their ends; those that would look the same stay whole. */
export function shortNames(names, longest) {
  const tail = Math.floor((longest - 1) / 2);
  const short = names.map((name) =>
    name.length > longest ? `${name.slice(0, longest - 1 - tail)}…${name.slice(-tail)}` : name,
  );
  return names.map((name, i) => (short.filter((other) => other === short[i]).length > 1 ? name : short[i]));
}

/** A share as a percentage: 0.05 is 5 %. */
export const percent = (value) => `${Number((100 * value).toPrecision(6))} %`;

export const plural = (n, noun) => `${n.toLocaleString("en-GB")} ${noun}${n === 1 ? "" : "s"}`;

/** A size in bytes: 2,500,000 is 2.5 MB. */
export const megabytes = (bytes) => `${Number((bytes / 1e6).toPrecision(2))} MB`;

/** The columns of the prediction files, and the level that ``is_ood`` was decided at. */
export const COLUMNS = [
  "file", "class", "probability", "is_ood", "p_value", "score", "typicality", "uncertainty", "cluster", "md_class",
  "softmax_class", "false_alarm",
];

/** Rows as CSV, written as Python's csv module writes them: True, False, and nan where there is no number. */
export function csv(rows) {
  const lines = [COLUMNS, ...rows.map((row) => COLUMNS.map((column) => cell(row[column])))];
  return lines.map((line) => line.map(quote).join(",") + "\n").join("");
}

function cell(value) {
  if (value === null || value === undefined) return "nan";
  if (typeof value === "boolean") return value ? "True" : "False";
  return String(value);
}

const quote = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
