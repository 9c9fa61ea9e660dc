// Binary search in an ascending list of numbers.

/** Returns the first index whose number is `value` or greater, or the length of the list. */
export function lowerBound(numbers, value) {
  let [low, high] = [0, numbers.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
