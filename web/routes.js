// Every view: its address, its title, its module (loaded when it is first shown). A view is `export default function View({params})`.

export const routes = [
  ["/", "Jobs", () => import("./views/jobs.js")],
  ["/new", "New job", () => import("./views/new-job.js")],
  ["/jobs/:id", "Run", () => import("./views/run.js")],
  ["/jobs/:id/samples", "Samples", () => import("./views/samples.js")],
  ["/jobs/:id/checkpoints", "Checkpoints", () => import("./views/checkpoints.js")],
  ["/jobs/:id/rewards", "Reward health", () => import("./views/reward-health.js")],
  ["/jobs/:id/logs", "Events and logs", () => import("./views/logs.js")],
  ["/jobs/:id/config", "Configuration", () => import("./views/config.js")],
  ["/compare", "Compare runs", () => import("./views/compare.js")],
  ["/system", "System", () => import("./views/system.js")],
  ["/access", "Keys and webhooks", () => import("./views/access.js")],
];

/** The tabs of a job's pages: the end of the address, and its name. */
export const jobTabs = [
  ["", "Charts"],
  ["/samples", "Samples"],
  ["/checkpoints", "Checkpoints"],
  ["/rewards", "Rewards"],
  ["/logs", "Logs"],
  ["/config", "Config"],
];

/** The links at the top. */
export const topLinks = [
  ["/", "Jobs"],
  ["/compare", "Compare"],
  ["/system", "System"],
  ["/access", "Access"],
];
