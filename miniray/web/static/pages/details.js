// One actor, and one worker's process: what it does now, its stack, profiles and log.
import { html } from "../vendor/preact-htm.js";
import { useLive } from "../live.js";
import { Inspect, Logs } from "../inspect.js";
import { Rows } from "../table.js";
import { Ago, Card, Empty, Facts, Id, Problem, State, amounts, bytes, percent, workerHref } from "../parts.js";

const CALLS = [
  { name: "method", title: "Call", width: "minmax(120px, 2fr)", cell: (row) => html`<b>${row.method ?? row.name ?? row.key}</b>` },
  { name: "state", title: "State", width: "110px", cell: (row) => html`<${State} of=${row.state} />` },
  { name: "since", title: "For", width: "minmax(90px, 1fr)", right: true, cell: (row) => html`<${Ago} time=${row.since} />` },
];

const devices = (held) => Object.entries(held ?? {}).map(([name, ids]) => `${name} ${[].concat(ids).join(", ")}`).join("; ");
const Crumbs = ({ to, name, children }) => html`<header class="top"><h1><a class="up" href=${to}>${name}</a>${children}</h1></header>`;

export function Actor({ id }) {
  const at = useLive(`actor:${id}`)(`actor:${id}`);
  const actor = at.summary.actor ?? at.summary;
  const lives = actor.state === "ALIVE" || (actor.pid > 0 && actor.state !== "DEAD");
  return html`<div class="page">
    <${Crumbs} to="#/actors" name="Actors">${actor.class_name ?? id.slice(0, 10)} <${State} of=${actor.state} bad=${actor.state === "DEAD"} /><//>
    <${Problem} of=${at.error} />
    ${(actor.death_cause || actor.reason) && html`<p class="cause">${actor.death_cause ?? actor.reason}</p>`}
    <${Facts} of=${[
      ["Name", actor.name], ["Node", actor.node_name ?? actor.node_id], ["Process", workerHref(actor) ? html`<a href=${workerHref(actor)}>${actor.pid}</a>` : null],
      ["Holds", actor.required_resources && amounts(actor.required_resources)], ["Devices", devices(actor.devices)], ["Restarts", actor.num_restarts], ["Queued", actor.queued], ["Runs", actor.running],
      ["CPU", actor.cpu_percent != null ? percent(actor.cpu_percent / 100) : null], ["Memory", actor.memory && bytes(actor.memory)],
      ["Job", actor.job_id], ["Namespace", actor.ray_namespace], ["Id", html`<code>${id}</code>`],
    ]} />
    <${Inspect} key=${id} of=${{ actor: id }} live=${lives} why=${`#/why/${id}`} />
    ${at.rows.length > 0 && html`<${Card} title="Calls"><${Rows} label="Calls" columns=${CALLS} rows=${at.rows} height=${240} /><//>`}
    <${Card} title="Log" wide><${Logs} of=${{ actor: id }} /><//>
  </div>`;
}

export function Worker({ node, pid }) {
  const topic = `worker:${node}:${pid}`;
  const at = useLive(topic)(topic);
  const worker = at.summary.worker ?? at.summary;
  const of = { node, pid: Number(pid) };
  const lives = worker.state !== "DEAD";
  const title = worker.title || worker.class_name || "Worker";
  return html`<div class="page">
    <${Crumbs} to=${worker.run_id ? `#/run/${worker.run_id}` : "#/"} name=${worker.run_id ? "Run" : "Cluster"}>${title}${worker.rank != null && html` <span class="dim">rank ${worker.rank}</span>`}${worker.state && html` <${State} of=${worker.state} />`}<//>
    <${Problem} of=${at.error} />
    <${Facts} of=${[
      ["Process", pid], ["Node", worker.node_name ?? node], ["Kind", worker.kind], ["Actor", worker.actor_id && html`<${Id} of=${worker.actor_id} href="#/actor/${worker.actor_id}" />`],
      ["CPU", worker.cpu_percent != null ? percent(worker.cpu_percent / 100) : null], ["Memory", worker.memory && bytes(worker.memory)], ["Devices", devices(worker.devices)],
      ["For", worker.since && html`<${Ago} time=${worker.since} />`], ["Job", worker.job_id],
    ]} />
    <${Inspect} key=${topic} of=${of} live=${lives} />
    ${at.rows.length > 0 && html`<${Card} title="Calls"><${Rows} label="Calls" columns=${CALLS} rows=${at.rows} height=${240} /><//>`}
    ${at.ready && !at.rows.length && !lives && html`<${Empty}>This process is not there any more; its log is.<//>`}
    <${Card} title="Log" wide><${Logs} of=${of} /><//>
  </div>`;
}
