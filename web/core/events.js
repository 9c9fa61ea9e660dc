// Server-sent events over fetch. A reconnect resumes after the last event received, so that no event is lost or delivered twice.
import { send } from "./api.js";
import { Signal } from "./signal.js";

/** Delays before successive reconnect attempts, in ms. */
const RETRY_DELAYS_MS = [250, 500, 1000, 2000, 4000, 8000];
/** Time without any bytes after which the connection counts as dead, in ms. The server sends a ping every 15 s. */
const IDLE_TIMEOUT_MS = 40_000;
/**
 * Time after which a hidden page closes its connection, in ms: browsers open only six connections to a server. The replay delivers
 * the missed events when the page is visible again.
 */
const HIDDEN_TIMEOUT_MS = 20_000;

/**
 * Follows one stream. `onEvent({type, id, data})` receives every event once and in order. `onOpen()` is called for each connection.
 * `onInvalidCursor()` is called when the server does not know the last event received: it was restored from an older backup.
 * `state` is `connecting`, `live`, `lost`, `paused`, `ended` or `refused`.
 */
export class EventStream {
  state = new Signal("connecting");
  #abort = null;
  #stopped = false;
  #failures = 0;
  #timers = new Map();

  constructor(path, { after = 0, onEvent, onOpen = () => {}, onInvalidCursor = () => {} }) {
    Object.assign(this, { path, lastId: after, onEvent, onOpen, onInvalidCursor });
    document.addEventListener("visibilitychange", this.#onVisibilityChange);
    addEventListener("online", this.#retryNow);
    this.#connect();
  }

  stop() {
    this.#stopped = true;
    document.removeEventListener("visibilitychange", this.#onVisibilityChange);
    removeEventListener("online", this.#retryNow);
    for (const name of [...this.#timers.keys()]) this.#clearTimer(name);
    this.#abort?.abort();
  }

  /** Closes the current connection. Unless the stream is paused, it reconnects. */
  disconnect() {
    this.#abort?.abort();
  }

  #onVisibilityChange = () => {
    if (document.hidden) this.#startTimer("hidden", HIDDEN_TIMEOUT_MS, () => (this.state.set("paused"), this.disconnect()));
    else {
      this.#clearTimer("hidden");
      if (this.state.value === "paused") this.#connect();
    }
  };

  #retryNow = () => {
    if (this.state.value === "lost") this.#connect();
  };

  async #connect() {
    this.#clearTimer("retry");
    if (this.#stopped || this.#abort || ["ended", "refused"].includes(this.state.value)) return;
    this.state.set("connecting");
    const abort = (this.#abort = new AbortController());
    try {
      const headers = { accept: "text/event-stream" };
      if (this.lastId) headers["last-event-id"] = String(this.lastId);
      const response = await send("GET", this.path, { headers, signal: abort.signal });
      this.state.set("live");
      this.onOpen();
      await this.#read(response.body.getReader());
    } catch (error) {
      if (error.code === "invalid_cursor") this.onInvalidCursor();
      if (error.status >= 400 && error.status < 500 && error.status !== 408 && error.status !== 429) this.state.set("refused");
    }
    abort.abort();
    if (this.#abort === abort) this.#abort = null;
    this.#clearTimer("idle");
    if (this.#stopped || ["ended", "refused"].includes(this.state.value)) return;
    if (this.state.value === "paused") {
      if (!document.hidden) this.#connect();
      return;
    }
    this.state.set("lost");
    const delay = RETRY_DELAYS_MS[Math.min(this.#failures++, RETRY_DELAYS_MS.length - 1)];
    // ±25 % of jitter, so that pages do not all reconnect at the same moment.
    this.#startTimer("retry", delay * (0.75 + Math.random() / 2), () => this.#connect());
  }

  async #read(reader) {
    const decoder = new TextDecoder();
    const parser = new Parser((event) => this.#deliver(event));
    for (;;) {
      this.#startTimer("idle", IDLE_TIMEOUT_MS, () => this.disconnect());
      const { done, value } = await reader.read();
      if (done) return;
      this.#failures = 0;
      parser.push(decoder.decode(value, { stream: true }));
    }
  }

  #deliver({ type, id, data }) {
    if (id !== null) {
      const number = Number(id);
      if (number <= this.lastId) return; // Delivered before the reconnect.
      this.lastId = number;
    }
    this.onEvent({ type, id, data: JSON.parse(data) });
    if (type === "end") this.state.set("ended");
  }

  #startTimer(name, ms, callback) {
    this.#clearTimer(name);
    this.#timers.set(name, setTimeout(callback, ms));
  }

  #clearTimer(name) {
    clearTimeout(this.#timers.get(name));
    this.#timers.delete(name);
  }
}

/** Parses the wire format: `name: value` lines, ended by an empty line. An event that the connection cut short is dropped. */
export class Parser {
  #rest = "";
  #event = { type: "message", id: null, lines: [] };

  constructor(onEvent) {
    this.onEvent = onEvent;
  }

  push(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    for (const line of lines) this.#parseLine(line.endsWith("\r") ? line.slice(0, -1) : line);
  }

  #parseLine(line) {
    const event = this.#event;
    if (line === "") {
      this.#event = { type: "message", id: null, lines: [] };
      if (event.lines.length) this.onEvent({ type: event.type, id: event.id, data: event.lines.join("\n") });
      return;
    }
    const [, name, value] = line.match(/^([^:]*):? ?(.*)$/s);
    if (name === "event") event.type = value;
    else if (name === "id") event.id = value;
    else if (name === "data") event.lines.push(value);
  }
}
