// A chart as a file: its numbers or its picture.
import { colour, dash, frame } from "./palette.js";

/** Hands `content` to the browser's downloads. */
export function download(name, content, type) {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A field of a CSV line; a name that a spreadsheet would take for a formula gets an apostrophe. */
export function csvField(text) {
  const plain = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}

/** A line a step; a value that is not there is empty. */
export function csvOf(x, series) {
  const lines = [["step", ...series.map(({ key, label }) => csvField(key ?? label))].join(",")];
  for (let index = 0; index < x.length; index++) {
    const values = series.map(({ values }) => values[index]);
    if (values.some((value) => value === value)) lines.push([x[index], ...values.map((value) => (value === value ? value : ""))].join(","));
  }
  return `${lines.join("\n")}\n`;
}

/** The canvas of a chart with its title and its legend, as a PNG. */
export function pngOf(canvas, title, series, theme) {
  const scale = devicePixelRatio || 1;
  const [head, foot] = [34 * scale, 26 * scale];
  const page = document.createElement("canvas");
  page.width = canvas.width + 16 * scale;
  page.height = canvas.height + head + foot;
  const draw = page.getContext("2d");
  const { ground, ink } = frame(theme);
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
    draw.strokeStyle = colour(tint, theme);
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
