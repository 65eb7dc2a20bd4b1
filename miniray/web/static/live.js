// What the pages show: one stream of changed rows for the view that is open, and single requests.
import { useEffect, useState } from "./vendor/preact-htm.js";

/** An answer that is not what was asked for; `status` is 401 where the browser has to log in. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const watchers = new Set();
/** What the whole page has to know: "connecting", "open", "lost", "login", and why. */
export const link = { state: "connecting", reason: "" };

function setLink(state, reason = "") {
  if (link.state === state && link.reason === reason) return;
  Object.assign(link, { state, reason });
  for (const watcher of watchers) watcher();
}

export function useLink() {
  const [, draw] = useState(0);
  useEffect(() => {
    const watcher = () => draw((n) => n + 1);
    watchers.add(watcher);
    return () => watchers.delete(watcher);
  }, []);
  return link;
}

const query = (values) =>
  new URLSearchParams(Object.entries(values).filter(([, v]) => v !== undefined && v !== null && v !== ""));

async function answer(response) {
  const text = response.status === 204 ? "" : await response.text();
  let data = null;
  try {
    data = text ? JSON.parse(text) : null;
  } catch {
    data = null;
  }
  if (response.status === 401 && !response.url.endsWith("/api/login")) setLink("login", data?.error ?? "");
  if (!response.ok) throw new Refused(data?.error ?? `${response.status} ${response.statusText}`, response.status);
  return data;
}

async function reach(path, options) {
  try {
    return await fetch(path, { credentials: "same-origin", ...options });
  } catch {
    throw new Refused("The page's server does not answer: has the cluster ended?", 0);
  }
}

/** What a GET returns; throws `Refused` with the server's sentence. */
export async function get(path, values = {}) {
  const text = query(values).toString();
  return answer(await reach(`./api/${path}${text ? `?${text}` : ""}`));
}

/** What a POST returns. */
export async function post(path, body) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return answer(await reach(`./api/${path}`, options));
}

/** Exchange a code for the cookie; the server's sentence if it refuses, null if this browser is let in. */
export async function login(code) {
  try {
    await post("login", { code });
  } catch (error) {
    const before = await get("session").then(() => true, () => false); // by an earlier code
    if (!before) {
      setLink("login", error.message);
      return error.message;
    }
  }
  setLink("connecting");
  return null;
}

/** The stream of the window before this one: it ends when this one's rows are here, so that the server keeps the table. */
let leaving = null;

function leave(source) {
  leaving?.close();
  leaving = source;
  if (source) {
    source.onmessage = source.onerror = null;
    setTimeout(() => leaving === source && leave(null), 1000);
  }
}

const nothing = { rows: [], start: 0, total: 0, summary: {}, ready: false, error: null };

/** Take a message of the stream into what is known of its topic. */
function merged(old, message, start) {
  if (message.error) return { ...old, error: message.error };
  const known = new Map(old.start === start ? old.rows.map((row) => [row.key, row]) : []);
  for (const [key, row] of Object.entries(message.changed ?? {})) known.set(key, { ...row, key });
  const order = message.order ?? old.rows.map((row) => row.key);
  return {
    rows: order.map((key) => known.get(key) ?? old.rows.find((row) => row.key === key)).filter(Boolean),
    start,
    total: message.total ?? old.total,
    summary: message.summary ?? old.summary,
    ready: true,
    error: null,
  };
}

/**
 * The topics of this view, kept up to date while the page can be seen.
 * The window (from, size, search, sort) is that of the first topic.
 */
export function useLive(topics, asked = {}) {
  const url = `./api/events?${query({ topic: topics, ...asked })}`;
  const [data, setData] = useState({});
  useEffect(() => {
    let source = null;
    let timer = 0;
    let frame = 0;
    let delay = 400;
    let closed = false;
    const queue = [];

    const draw = () => {
      frame = 0;
      const messages = queue.splice(0);
      setData((old) => {
        const next = { ...old };
        for (const message of messages) {
          const start = message.topic === topics.split(",")[0] ? (asked.from ?? 0) : 0;
          next[message.topic] = merged(next[message.topic] ?? nothing, message, start);
        }
        return next;
      });
    };
    const open = () => {
      timer = 0;
      if (closed || source || document.hidden || link.state === "login") return;
      source = new EventSource(url);
      source.onmessage = (event) => {
        delay = 400;
        setLink("open");
        leave(null);
        queue.push(JSON.parse(event.data));
        frame ||= requestAnimationFrame(draw);
      };
      source.onerror = () => {
        close();
        if (closed || document.hidden) return;
        setLink("lost", link.state === "lost" ? link.reason : "");
        // A stream does not tell what ended it; too many views are no lost connection.
        get("session").then(({ full }) => link.state === "lost" && setLink("lost", full), () => {});
        timer = setTimeout(open, delay);
        delay = Math.min(2 * delay, 5000);
      };
    };
    const close = () => {
      source?.close();
      source = null;
      clearTimeout(timer);
    };
    const seen = () => (document.hidden ? close() : source || open());
    const opened = setTimeout(open, 0);
    document.addEventListener("visibilitychange", seen);
    return () => {
      closed = true;
      clearTimeout(opened);
      clearTimeout(timer);
      cancelAnimationFrame(frame);
      if (source) leave(source);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [url, link.state === "login"]);
  return (topic) => data[topic] ?? nothing;
}

/** What `ask` returns, again each `seconds` while the page can be seen: {value, error}. */
export function usePolled(ask, seconds, keys) {
  const [state, setState] = useState({ value: null, error: null });
  useEffect(() => {
    let timer = 0;
    let closed = false;
    let asking = false;
    const turn = async () => {
      timer = 0;
      if (document.hidden || asking) return;
      asking = true;
      try {
        const value = await ask();
        if (!closed) setState({ value, error: null });
      } catch (error) {
        if (!closed) setState((old) => ({ ...old, error: error.message }));
      }
      asking = false;
      if (!closed && seconds) timer = setTimeout(turn, 1000 * seconds);
    };
    const seen = () => document.hidden || timer || turn();
    turn();
    document.addEventListener("visibilitychange", seen);
    return () => {
      closed = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, keys);
  return state;
}
