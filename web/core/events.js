// Server-sent events over fetch: replays from the last one seen, so that a cut leaves no gap and nothing comes twice.
import { send } from "./api.js";
import { Signal } from "./signal.js";

const PAUSES_MS = [250, 500, 1000, 2000, 4000, 8000];
/** The server pings every 15 s; after this much silence the connection is dead, ms. */
const SILENCE_MS = 40_000;
/** A hidden page gives its connection back after this, ms: browsers have six for a server. The replay fills the rest. */
const HIDDEN_MS = 20_000;

/** Follows one stream. `onEvent({type, id, data})` gets every event once and in order. `state` is `connecting`, `live`, `lost`, `paused`, `ended` or `refused`. `onBehind()`: the server went back to a backup that does not hold what was seen. */
export class EventStream {
  state = new Signal("connecting");
  #abort = null;
  #stopped = false;
  #failures = 0;
  #timers = new Map();

  constructor(path, { after = 0, onEvent, onOpen = () => {}, onBehind = () => {} }) {
    Object.assign(this, { path, last: after, onEvent, onOpen, onBehind });
    document.addEventListener("visibilitychange", this.#seen);
    addEventListener("online", this.#retryNow);
    this.#connect();
  }

  stop() {
    this.#stopped = true;
    document.removeEventListener("visibilitychange", this.#seen);
    removeEventListener("online", this.#retryNow);
    for (const name of [...this.#timers.keys()]) this.#clear(name);
    this.#abort?.abort();
  }

  /** Cuts the connection, as a bad network would. */
  cut() {
    this.#abort?.abort();
  }

  #seen = () => {
    if (document.hidden) this.#after("hidden", HIDDEN_MS, () => (this.state.set("paused"), this.cut()));
    else {
      this.#clear("hidden");
      if (this.state.value === "paused") this.#connect();
    }
  };

  #retryNow = () => {
    if (this.state.value === "lost") this.#connect();
  };

  async #connect() {
    this.#clear("retry");
    if (this.#stopped || this.#abort || ["ended", "refused"].includes(this.state.value)) return;
    this.state.set("connecting");
    const abort = (this.#abort = new AbortController());
    try {
      const headers = { accept: "text/event-stream" };
      if (this.last) headers["last-event-id"] = String(this.last);
      const response = await send("GET", this.path, { headers, signal: abort.signal });
      this.state.set("live");
      this.onOpen();
      await this.#read(response.body.getReader());
    } catch (error) {
      if (error.code === "invalid_cursor") this.onBehind();
      if (error.status >= 400 && error.status < 500 && error.status !== 408 && error.status !== 429) this.state.set("refused");
    }
    abort.abort();
    if (this.#abort === abort) this.#abort = null;
    this.#clear("silence");
    if (this.#stopped || ["ended", "refused"].includes(this.state.value)) return;
    if (this.state.value === "paused") {
      if (!document.hidden) this.#connect();
      return;
    }
    this.state.set("lost");
    const pause = PAUSES_MS[Math.min(this.#failures++, PAUSES_MS.length - 1)];
    this.#after("retry", pause * (0.75 + Math.random() / 2), () => this.#connect());
  }

  async #read(reader) {
    const decoder = new TextDecoder();
    const parser = new Parser((event) => this.#take(event));
    for (;;) {
      this.#after("silence", SILENCE_MS, () => this.cut());
      const { done, value } = await reader.read();
      if (done) return;
      this.#failures = 0;
      parser.push(decoder.decode(value, { stream: true }));
    }
  }

  #take({ type, id, data }) {
    if (id !== null) {
      const number = Number(id);
      if (number <= this.last) return; // Seen before the cut.
      this.last = number;
    }
    this.onEvent({ type, id, data: JSON.parse(data) });
    if (type === "end") this.state.set("ended");
  }

  #after(name, ms, then) {
    this.#clear(name);
    this.#timers.set(name, setTimeout(then, ms));
  }

  #clear(name) {
    clearTimeout(this.#timers.get(name));
    this.#timers.delete(name);
  }
}

/** The wire format: fields until an empty line. What a cut left unfinished is never told. */
export class Parser {
  #rest = "";
  #event = { type: "message", id: null, lines: [] };

  constructor(tell) {
    this.tell = tell;
  }

  push(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    for (const line of lines) this.#line(line.endsWith("\r") ? line.slice(0, -1) : line);
  }

  #line(line) {
    const event = this.#event;
    if (line === "") {
      this.#event = { type: "message", id: null, lines: [] };
      if (event.lines.length) this.tell({ type: event.type, id: event.id, data: event.lines.join("\n") });
      return;
    }
    const [, name, value] = line.match(/^([^:]*):? ?(.*)$/s);
    if (name === "event") event.type = value;
    else if (name === "id") event.id = value;
    else if (name === "data") event.lines.push(value);
  }
}
