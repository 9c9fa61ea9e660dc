// Line colors after Okabe and Ito's palette, which is safe for all types of color vision, adjusted to the light and dark background.
// Each color has its own dash pattern, so that lines can be told apart without color or in print.

const LIGHT = ["#0067a5", "#c44e00", "#00785a", "#a2407f", "#8f6400", "#3a86c0", "#5b5b5b", "#7a3fb0"];
const DARK = ["#6cb8ec", "#f08a45", "#3ccf9f", "#e295c5", "#e8bd45", "#a9d6f5", "#c2c2c2", "#bb94ea"];
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [5, 2, 1, 2, 1, 2], [12, 4], [1, 2], [4, 4]];

export const color = (index, theme) => (theme === "dark" ? DARK : LIGHT)[index % LIGHT.length];
export const dash = (index) => DASHES[index % DASHES.length];
/** Colors of the axes, the grid, the background and the text. */
export const themeColors = (theme) =>
  theme === "dark" ? { text: "#a0a6b1", grid: "#2a2f37", ground: "#1a1d22", ink: "#e5e7eb" } : { text: "#5d6068", grid: "#e9e8e3", ground: "#ffffff", ink: "#1c1e22" };
