// Exports a chart as a CSV file or a PNG image.
import { color, dash, themeColors } from "./palette.js";

/** Saves `content` as a file with the browser's download dialog. */
export function download(name, content, type) {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Quotes a field of a CSV line. Text that a spreadsheet would run as a formula gets an apostrophe in front. */
export function csvField(text) {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** Formats the series as CSV: one line per step; a missing value is an empty field. */
export function toCsv(x, series) {
  const lines = [["step", ...series.map(({ key, label }) => csvField(key ?? label))].join(",")];
  for (let index = 0; index < x.length; index++) {
    const values = series.map(({ values }) => values[index]);
    if (values.some((value) => value === value)) lines.push([x[index], ...values.map((value) => (value === value ? value : ""))].join(","));
  }
  return `${lines.join("\n")}\n`;
}

/** Renders the canvas of a chart, with its title and legend, as a PNG blob. */
export function toPng(canvas, title, series, theme) {
  const scale = devicePixelRatio || 1;
  const [head, foot] = [34 * scale, 26 * scale];
  const page = document.createElement("canvas");
  page.width = canvas.width + 16 * scale;
  page.height = canvas.height + head + foot;
  const draw = page.getContext("2d");
  const { ground, ink } = themeColors(theme);
  draw.fillStyle = ground;
  draw.fillRect(0, 0, page.width, page.height);
  draw.drawImage(canvas, 8 * scale, head);
  draw.scale(scale, scale);
  draw.fillStyle = ink;
  draw.font = "600 14px system-ui, sans-serif";
  draw.fillText(title, 12, 22);
  draw.font = "12px system-ui, sans-serif";
  let left = 12;
  const line = (page.height - foot) / scale + 12;
  for (const [index, { label, tint = index }] of series.entries()) {
    draw.strokeStyle = color(tint, theme);
    draw.lineWidth = 2;
    draw.setLineDash(dash(tint));
    draw.beginPath();
    draw.moveTo(left, line - 4);
    draw.lineTo(left + 22, line - 4);
    draw.stroke();
    draw.fillText(label, left + 27, line);
    left += 27 + draw.measureText(label).width + 16;
  }
  return new Promise((done) => page.toBlob(done, "image/png"));
}
