// What differs between two texts, word by word.

/** Cells of the table at most; longer texts are taken as a whole. */
const MOST_CELLS = 4_000_000;

const wordsOf = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

/** Pieces `[how, text]` in order: `how` is 0 (in both), −1 (only in `a`) or 1 (only in `b`). */
export function diff(a, b) {
  const [one, other] = [wordsOf(a), wordsOf(b)];
  let begin = 0;
  while (begin < one.length && one[begin] === other[begin]) begin++;
  let end = 0;
  while (end < Math.min(one.length, other.length) - begin && one.at(-1 - end) === other.at(-1 - end)) end++;
  const [left, right] = [one.slice(begin, one.length - end), other.slice(begin, other.length - end)];
  const same = (pieces) => pieces.map((piece) => [0, piece]);
  const middle = left.length * right.length > MOST_CELLS ? [[-1, left.join("")], [1, right.join("")]] : aligned(left, right);
  return joined([...same(one.slice(0, begin)), ...middle, ...same(one.slice(one.length - end))]);
}

/** Along a longest common subsequence. */
function aligned(a, b) {
  const width = b.length + 1;
  // (|a| + 1, |b| + 1): the length of the longest one of what is left of both.
  const longest = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      longest[i * width + j] = a[i] === b[j] ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const pieces = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) pieces.push([0, a[i++]]), j++;
    else if (j === b.length || (i < a.length && longest[(i + 1) * width + j] >= longest[i * width + j + 1])) pieces.push([-1, a[i++]]);
    else pieces.push([1, b[j++]]);
  }
  return pieces;
}

/** Neighbours of one kind in one piece; within a change, what is gone stands before what came. */
function joined(pieces) {
  const out = [];
  let [gone, came] = ["", ""];
  const flush = () => {
    if (gone) out.push([-1, gone]);
    if (came) out.push([1, came]);
    gone = came = "";
  };
  for (const [how, text] of pieces) {
    if (how < 0) gone += text;
    else if (how > 0) came += text;
    else {
      flush();
      if (out.length && out.at(-1)[0] === 0) out.at(-1)[1] += text;
      else out.push([0, text]);
    }
  }
  flush();
  return out;
}

/** How many words only `a` has, and how many only `b`. */
export function changed(pieces) {
  const counted = (wanted) => pieces.reduce((sum, [how, text]) => sum + (how === wanted ? (text.match(/[\p{L}\p{N}_]+/gu) ?? []).length : 0), 0);
  return [counted(-1), counted(1)];
}
