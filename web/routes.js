// The routes: `[pattern, title, view]`. A view is `export default function View({ params })`.
import Access from "./views/access.js";
import Chat from "./views/chat.js";
import Checkpoints from "./views/checkpoints.js";
import Compare from "./views/compare.js";
import Config from "./views/config.js";
import Jobs from "./views/jobs.js";
import Library from "./views/library.js";
import Logs from "./views/logs.js";
import NewJob from "./views/new-job.js";
import Playground from "./views/playground.js";
import RewardHealth from "./views/reward-health.js";
import RunView from "./views/run.js";
import Samples from "./views/samples.js";
import System from "./views/system.js";

export const routes = [
  ["/", "Jobs", Jobs],
  ["/new", "New job", NewJob],
  ["/jobs/:id", "Run", RunView],
  ["/jobs/:id/samples", "Samples", Samples],
  ["/jobs/:id/checkpoints", "Checkpoints", Checkpoints],
  ["/jobs/:id/playground", "Playground", Playground],
  ["/jobs/:id/chat", "Chat", Chat],
  ["/jobs/:id/rewards", "Rewards", RewardHealth],
  ["/jobs/:id/logs", "Events and logs", Logs],
  ["/jobs/:id/config", "Configuration", Config],
  ["/compare", "Compare runs", Compare],
  ["/library", "Models and data", Library],
  ["/system", "System", System],
  ["/access", "Keys and webhooks", Access],
];

/** Links in the header: `[path, text]`. */
export const topLinks = [
  ["/", "Jobs"],
  ["/compare", "Compare"],
  ["/library", "Models and data"],
  ["/system", "System"],
  ["/access", "Access"],
];
