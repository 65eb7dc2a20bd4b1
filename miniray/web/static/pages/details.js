// One actor, and one worker's process: what it does now, its stack, profiles and log.
import { html } from "../vendor/preact-htm.js";
import { useLive } from "../live.js";
import { Inspect, Logs } from "../inspect.js";
import { Rows } from "../table.js";
import { Ago, Card, Empty, Facts, Id, Problem, State, amounts, bytes, seconds, workerHref } from "../parts.js";

const CALLS = [
  { name: "method", title: "Call", width: "minmax(120px, 2fr)", cell: (row) => html`<b>${row.method}</b>` },
  { name: "state", title: "State", width: "110px", cell: (row) => html`<${State} of=${row.state} />` },
  { name: "since", title: "For", width: "minmax(90px, 1fr)", right: true, cell: (row) => html`<${Ago} time=${row.since} />` },
];

const Crumbs = ({ to, name, children }) => html`<header class="top"><h1><a class="up" href=${to}>${name}</a>${children}</h1></header>`;
const uses = (row) => [["CPU time", row.cpu_seconds != null && seconds(row.cpu_seconds)], ["Memory", row.memory && bytes(row.memory)]];
const Calls = ({ rows }) => rows.length > 0 && html`<${Card} title="Calls"><${Rows} label="Calls" columns=${CALLS} rows=${rows} height=${240} /><//>`;

export function Actor({ id }) {
  const at = useLive(`actor:${id}`)(`actor:${id}`);
  const actor = at.summary.actor ?? {};
  const dead = actor.state === "DEAD";
  const lives = actor.pid > 0 && !dead;
  const unknown = at.error && !actor.actor_id; // its log may still be there
  return html`<div class="page">
    <${Crumbs} to="#/actors" name="Actors">${actor.class_name ?? id.slice(0, 10)} <${State} of=${actor.is_starting ? "STARTING" : actor.state} bad=${dead} /><//>
    <${Problem} of=${at.error} />
    ${(actor.death_cause || actor.why_waits) && html`<p class="cause">${actor.death_cause ?? actor.why_waits}</p>`}
    <${Facts} of=${[
      ["Name", actor.name], ["Node", actor.node_id], ["Process", workerHref(actor) ? html`<a href=${workerHref(actor)}>${actor.pid}</a>` : null],
      ["Holds", actor.required_resources && amounts(actor.required_resources)], ["Restarts", actor.num_restarts], ["Queued", actor.queued],
      ...uses(actor), ["Job", actor.job_id], ["Namespace", actor.ray_namespace], ["Id", html`<code>${id}</code>`],
    ]} />
    ${!unknown && html`<${Inspect} key=${id} of=${{ of: id }} live=${lives} ended=${dead ? undefined : actor.state ? "It has no process yet." : ""} why=${`#/why/${id}`} />`}
    <${Calls} rows=${at.rows} />
    <${Card} title="Log" wide><${Logs} of=${{ of: id }} live=${!dead} /><//>
  </div>`;
}

/** `run` and `rank`: of a training run, from whose page one has come. */
export function Worker({ node, pid, run, rank }) {
  const topic = `worker:${node}:${pid}`;
  const at = useLive(topic)(topic);
  const worker = at.summary.worker ?? {};
  const of = { of: `${node}:${pid}` };
  const lives = worker.state !== "DEAD";
  return html`<div class="page">
    <${Crumbs} to=${run ? `#/run/${run}` : "#/"} name=${run ? "Train run" : "Cluster"}>${rank && `Rank ${rank}, `}${worker.name || worker.kind || "Worker"}${worker.state && html` <${State} of=${worker.state} />`}<//>
    <${Problem} of=${at.error} />
    <${Facts} of=${[
      ["Process", pid], ["Node", node], ["Kind", worker.kind], ["Actor", worker.actor_id && html`<${Id} of=${worker.actor_id} href="#/actor/${worker.actor_id}" />`],
      ["Queued", worker.queued], ...uses(worker), ["Job", worker.job_id],
    ]} />
    <${Inspect} key=${topic} of=${of} live=${lives} />
    <${Calls} rows=${at.rows} />
    ${!lives && html`<${Empty}>This process is not there any more; its log is.<//>`}
    <${Card} title="Log" wide><${Logs} of=${of} live=${lives} /><//>
  </div>`;
}
