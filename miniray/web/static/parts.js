// Small pieces that all pages are made of: how numbers, times, ids and states are shown.
import { html, useEffect, useState } from "./vendor/preact-htm.js";

export const DASH = "–";
const absent = (value) => value === undefined || value === false || value === null || value === "" || Number.isNaN(value);

/** A number in a few digits; large ones grouped. */
export function number(value) {
  if (absent(value)) return DASH;
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  const digits = Math.abs(value) >= 100 ? 1 : 3;
  return String(Math.abs(value) >= 0.001 || value === 0 ? Number(value.toFixed(digits)) : value.toPrecision(2));
}

export function bytes(value) {
  if (absent(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  for (; Math.abs(value) >= 1024 && at < units.length - 1; at++) value /= 1024;
  return `${at && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

export function seconds(value) {
  if (absent(value)) return DASH;
  if (value > 0 && value < 0.001) return `${Math.round(1e6 * value)} µs`;
  if (value > 0 && value < 1) return `${Number((1000 * value).toPrecision(3))} ms`;
  if (value < 60) return `${Number(value.toFixed(value < 10 ? 1 : 0))} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

export const percent = (value) => (absent(value) ? DASH : `${Math.round(100 * value)} %`);

/** Resources as a person says them: "1 CPU, 0.5 GPU, memory 2.0 GiB". */
export function amounts(resources) {
  const all = Object.entries(resources ?? {}).filter(([, amount]) => amount);
  const told = ([name, amount]) => (/memory/.test(name) ? `${name} ${bytes(amount)}` : `${number(amount)} ${name}`);
  return all.length ? all.map(told).join(", ") : DASH;
}

const units = {
  ratio: percent, bytes, seconds, count: number,
  "bytes/s": (value) => (absent(value) ? DASH : `${bytes(value)}/s`),
  "1/s": (value) => (absent(value) ? DASH : `${number(value)}/s`),
  celsius: (value) => `${number(value)} °C`,
  watts: (value) => `${number(value)} W`,
};
/** The function that writes values of a unit. */
export const inUnit = (unit) => units[unit] ?? number;

export const clock = (time, withDay = false) => {
  if (absent(time)) return DASH;
  const at = new Date(1000 * time);
  const day = withDay || Date.now() - at > 20 * 3600e3;
  const two = (n) => String(n).padStart(2, "0");
  const hours = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return day ? `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${hours}` : hours;
};

/** How long ago, kept up to date. */
export function Ago({ time }) {
  const [, draw] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || draw((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, []);
  if (absent(time)) return DASH;
  return html`<time title=${clock(time, true)}>${seconds(Math.max(0, Math.floor(Date.now() / 1000 - time)))}</time>`;
}

const GOOD = /^(ALIVE|RUNNING|CREATED|SUCCEEDED|FINISHED|RETURNED|INFO)$/i;
const WAITS = /^(PENDING|PENDING_CREATION|INITIALIZING|STARTING|RESTARTING|SCHEDULING|RESCHEDULING|DEPENDENCIES_UNREADY|DRAINING|QUEUED|RESIZING|WARNING|WAITING)$/i;
const BAD = /^(FAILED|ERRORED|LOST|INFEASIBLE|QUARANTINED|ERROR)$/i;
export const kindOf = (state) => (GOOD.test(state) ? "ok" : WAITS.test(state) ? "wait" : BAD.test(state) ? "bad" : "off");

/** A state: a word with a dot; never the colour alone. `bad` marks an end that nobody wanted. */
export const State = ({ of, bad }) =>
  absent(of) ? DASH : html`<span class="state ${bad ? "bad" : kindOf(of)}">${String(of).toLowerCase().replaceAll("_", " ")}</span>`;

/** An id in short: ids of one job begin alike, so its end is shown too; the whole as a title. */
export const Id = ({ of, href }) => {
  if (absent(of)) return DASH;
  const whole = String(of);
  const text = html`<code title=${whole}>${whole.length > 16 ? `${whole.slice(0, 4)}…${whole.slice(-6)}` : whole}</code>`;
  return href ? html`<a href=${href}>${text}</a>` : text;
};

/** A part of a whole as a bar, with its numbers. */
export function Bar({ value, of, show = number, text }) {
  if (absent(value) || !of) return html`<span class="dim">${absent(value) ? DASH : show(value)}</span>`;
  const share = Math.min(1, value / of);
  return html`<span class="bar" title="${show(value)} of ${show(of)}"><span class="fill ${share > 0.9 ? "high" : ""}" style=${{ width: `${100 * share}%` }} /><span class="on">${text ?? `${show(value)} / ${show(of)}`}</span></span>`;
}

/** What stands where there is nothing: what would be here, and how it gets here. */
export const Empty = ({ children }) => html`<div class="empty">${children}</div>`;

export const Problem = ({ of }) => of && html`<div class="problem" role="alert">${of}</div>`;

/** A command to copy. */
export function Command({ text }) {
  const [done, setDone] = useState(false);
  const copy = () => navigator.clipboard?.writeText(text).then(() => setDone(true), () => {});
  return html`<span class="command"><code>${text}</code><button type="button" class="quiet" onClick=${copy}>${done ? "copied" : "copy"}</button></span>`;
}

/** Names and values beside each other. */
export const Facts = ({ of }) =>
  html`<dl class="facts">${of.filter(([, value]) => !absent(value)).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

export const Card = ({ title, note, children, wide, ...rest }) =>
  html`<section class="card ${wide ? "wide" : ""}" ...${rest}><header><h2>${title}</h2>${note && html`<span class="dim">${note}</span>`}</header>${children}</section>`;

/** A hue for a name, the same on all pages. */
export function hue(name) {
  let hash = 2166136261;
  for (const letter of String(name)) hash = Math.imul(hash ^ letter.codePointAt(0), 16777619);
  return (hash >>> 0) % 360;
}

export const workerHref = (row) => (row?.pid && row?.node_id ? `#/worker/${row.node_id}/${row.pid}` : null);
