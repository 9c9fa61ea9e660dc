// A word-by-word diff of two texts.

/** Maximum size of the subsequence table, in cells. Longer texts are shown as one deletion and one insertion. */
const MAX_CELLS = 4_000_000;

const splitWords = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

/** Returns pieces `[change, text]` in order: `change` is 0 (in both texts), −1 (only in `a`) or 1 (only in `b`). */
export function diff(a, b) {
  const [wordsA, wordsB] = [splitWords(a), splitWords(b)];
  let prefix = 0;
  while (prefix < wordsA.length && wordsA[prefix] === wordsB[prefix]) prefix++;
  let suffix = 0;
  while (suffix < Math.min(wordsA.length, wordsB.length) - prefix && wordsA.at(-1 - suffix) === wordsB.at(-1 - suffix)) suffix++;
  const [middleA, middleB] = [wordsA.slice(prefix, wordsA.length - suffix), wordsB.slice(prefix, wordsB.length - suffix)];
  const unchanged = (words) => words.map((word) => [0, word]);
  const middle = middleA.length * middleB.length > MAX_CELLS ? [[-1, middleA.join("")], [1, middleB.join("")]] : align(middleA, middleB);
  return mergePieces([...unchanged(wordsA.slice(0, prefix)), ...middle, ...unchanged(wordsA.slice(wordsA.length - suffix))]);
}

/** Aligns two lists of words along a longest common subsequence. */
function align(a, b) {
  const width = b.length + 1;
  // longest[i, j], shape (|a| + 1, |b| + 1): the length of the longest common subsequence of a[i..] and b[j..].
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

/** Merges neighbors of one kind into one piece. Within a change, the deleted text comes before the inserted text. */
function mergePieces(pieces) {
  const out = [];
  let [deleted, inserted] = ["", ""];
  const flush = () => {
    if (deleted) out.push([-1, deleted]);
    if (inserted) out.push([1, inserted]);
    deleted = inserted = "";
  };
  for (const [change, text] of pieces) {
    if (change < 0) deleted += text;
    else if (change > 0) inserted += text;
    else {
      flush();
      if (out.length && out.at(-1)[0] === 0) out.at(-1)[1] += text;
      else out.push([0, text]);
    }
  }
  flush();
  return out;
}

/** Returns the number of deleted words and the number of inserted words. */
export function countChangedWords(pieces) {
  const countWords = (wanted) => pieces.reduce((sum, [change, text]) => sum + (change === wanted ? (text.match(/[\p{L}\p{N}_]+/gu) ?? []).length : 0), 0);
  return [countWords(-1), countWords(1)];
}
