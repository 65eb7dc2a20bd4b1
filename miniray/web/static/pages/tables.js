// The pages that are one table each.
import { html } from "../vendor/preact-htm.js";
import { TopicPage } from "../table.js";
import { Ago, Bar, Id, State, amounts, bytes, clock, number, seconds, workerHref } from "../parts.js";

const node = ({ node_id }) => html`<span title=${node_id}>${node_id ? node_id.slice(0, 8) : "–"}</span>`;
const job = { name: "job_id", title: "Job", width: "88px", wide: true, cell: (row) => html`<code title=${row.job_id}>${row.job_id ? row.job_id.slice(0, 8) : "–"}</code>` };
const pid = { name: "pid", title: "Process", width: "72px", right: true, wide: true, cell: (row) => (workerHref(row) && row.state !== "DEAD" ? html`<a href=${workerHref(row)}>${row.pid}</a>` : row.pid || "–") };
const text = (name, title, width, rest = {}) => ({ name, title, width, cell: (row) => html`<span title=${row[name]}>${row[name] || "–"}</span>`, ...rest });
const names = (row) => row.names.join(", ") || "–";
const reason = (row) => row.death_cause ?? row.why_waits ?? "";
/** A sentence without the id of the actor that the row is about anyway. */
const unnumbered = (told) => String(told ?? "").replace(/ \([0-9a-f]{32}\)/, "");
const PLANNED = /^(EXIT_ACTOR|OUT_OF_SCOPE|KILLED|OWNER_DIED|GROUP_REMOVED)$/;

export const actorColumns = [
  { name: "class_name", title: "Class", width: "minmax(110px, 1.3fr)", cell: (row) => html`<a href="#/actor/${row.actor_id}" title="${row.class_name} ${row.name ?? ""}"><b class=${row.name ? "broad" : ""}>${row.class_name}</b>${row.name && html`<b class="narrow">${row.name}</b>`}</a>` },
  text("name", "Name", "minmax(70px, 0.9fr)", { wide: true }),
  { name: "state", title: "State", width: "minmax(104px, 152px)", cell: (row) => html`<${State} of=${row.state} bad=${row.state === "DEAD" && !PLANNED.test(row.death_kind ?? "")} />` },
  { name: "reason", title: "Why it waits or died", width: "minmax(130px, 2fr)", sort: false, cell: (row) => html`<span title=${reason(row)}>${unnumbered(reason(row)).replace(/^The actor \S+ died: /, "") || "–"}</span>` },
  { name: "node_id", title: "Node", width: "70px", wide: true, cell: node },
  pid,
  { name: "required_resources", title: "Holds", width: "minmax(116px, 0.9fr)", wide: true, sort: false, cell: (row) => html`<span title=${amounts(row.required_resources)}>${amounts(row.required_resources)}</span>` },
  { name: "num_restarts", title: "Restarts", width: "62px", right: true, wide: true },
  job,
];

const TABLES = {
  waiting: {
    title: "Waiting", first: "since", tell: (row) => row.reason,
    columns: [
      { name: "names", title: "What", width: "minmax(110px, 1.3fr)", sort: false, cell: (row) => html`<b title=${names(row)}>${names(row)}</b>` },
      { name: "kind", title: "Kind", width: "114px", wide: true, cell: (row) => String(row.kind ?? "–").replaceAll("_", " ") },
      { name: "count", title: "Count", width: "60px", right: true, cell: (row) => number(row.count) },
      { name: "shape", title: "Each asks for", width: "minmax(100px, 1fr)", wide: true, sort: false, cell: (row) => html`<span>${(row.shape ?? []).map(amounts).join(" + ") || "–"}</span>` },
      { name: "reason", title: "Why it waits", width: "minmax(160px, 3fr)", sort: false, cell: (row) => html`<span title=${row.reason} class=${row.infeasible ? "bad" : ""}>${row.reason || "–"}</span>` },
      { name: "since", title: "For", width: "96px", right: true, cell: (row) => html`<${Ago} time=${row.since} />` },
    ],
    empty: html`Nothing waits for resources: all that was asked for is placed. What can't be placed stands here with the reason, to the number that is missing.`,
  },
  actors: {
    title: "Actors", columns: actorColumns, open: (row) => `#/actor/${row.actor_id}`, tell: reason,
    empty: html`No actor yet. A class with <code>@miniray.remote</code> becomes one when <code>.remote()</code> is called on it; those that died stay here with the reason.`,
  },
  tasks: {
    title: "Tasks by function", first: "-running",
    columns: [
      { name: "name", title: "Function", width: "minmax(140px, 1.5fr)", cell: (row) => html`<b title=${row.name}>${row.name ?? row.key}</b>` },
      { name: "progress", title: "", width: "minmax(80px, 1.2fr)", sort: false, wide: true, cell: (row) => html`<${Progress} row=${row} />` },
      ...["waiting", "running", "finished", "failed"].map((name) => ({ name, title: name[0].toUpperCase() + name.slice(1), width: "74px", right: true, cell: (row) => html`<span class=${name === "failed" && row.failed ? "bad" : ""}>${number(row[name])}</span>` })),
    ],
    empty: html`No task has run. A function with <code>@miniray.remote</code> is counted here by its name: how many of its calls wait, run, have finished and have failed.`,
  },
  jobs: {
    title: "Jobs", first: "-start_time", tell: (row) => [row.entrypoint, row.message].filter(Boolean).join("\n"),
    columns: [
      { name: "job_id", title: "Job", width: "minmax(100px, 1.6fr)", cell: (row) => html`<code title=${row.submission_id ?? row.job_id}>${row.submission_id ?? row.job_id?.slice(0, 8) ?? "–"}</code>` },
      { name: "status", title: "State", width: "110px", cell: (row) => html`<${State} of=${row.status} />` },
      text("entrypoint", "Program", "minmax(140px, 2fr)"),
      text("namespace", "Namespace", "minmax(80px, 0.8fr)", { wide: true }),
      { name: "pid", title: "Driver", width: "72px", right: true, wide: true, sort: false, cell: (row) => row.driver_info?.pid ?? "–" },
      { name: "start_time", title: "Started", width: "140px", wide: true, cell: (row) => clock(row.start_time / 1000) },
      { name: "end_time", title: "Took", width: "100px", right: true, cell: (row) => (row.end_time ? seconds((row.end_time - row.start_time) / 1000) : html`<${Ago} time=${row.start_time / 1000} />`) },
      text("message", "Message", "minmax(80px, 1fr)", { wide: true }),
    ],
    empty: html`No job yet: each program that calls <code>miniray.init()</code>, and each <code>miniray job submit</code>, is one.`,
  },
  groups: {
    title: "Placement groups",
    columns: [
      { name: "placement_group_id", title: "Id", width: "100px", wide: true, cell: (row) => html`<${Id} of=${row.placement_group_id} />` },
      { name: "name", title: "Name", width: "minmax(80px, 1fr)", cell: (row) => html`<span title=${row.name || row.placement_group_id}>${row.name || html`<${Id} of=${row.placement_group_id} />`}</span>` },
      { name: "state", title: "State", width: "116px", cell: (row) => html`<${State} of=${row.state} />` },
      { name: "strategy", title: "Strategy", width: "122px", wide: true, cell: (row) => String(row.strategy ?? "–").toLowerCase().replaceAll("_", " ") },
      { name: "bundles", title: "Bundles", width: "minmax(120px, 1.4fr)", sort: false, cell: (row) => { const told = folded((row.bundles ?? []).map(amounts)); return html`<span title=${told}>${told || "–"}</span>`; } },
      { name: "bundle_nodes", title: "On", width: "minmax(80px, 1fr)", sort: false, wide: true, cell: (row) => { const told = row.state === "REMOVED" ? "" : folded((row.bundle_nodes ?? []).map((each) => each.slice(0, 8) || "not placed")); return html`<span title=${told}>${told || "–"}</span>`; } },
    ],
    empty: html`No placement group. <code>placement_group([{"GPU": 1}] * 4)</code> reserves bundles together, all or none; train runs make one each.`,
  },
  objects: {
    title: "Objects", first: "-object_size", tell: (row) => row.why,
    columns: [
      { name: "object_id", title: "Id", width: "108px", cell: (row) => html`<${Id} of=${row.object_id} />` },
      { name: "object_size", title: "Size", width: "92px", right: true, cell: (row) => bytes(row.object_size) },
      { name: "reference_type", title: "Held as", width: "minmax(100px, 160px)", cell: (row) => String(row.reference_type ?? "–").toLowerCase().replaceAll("_", " ") },
      text("why", "By whom", "minmax(100px, 1.6fr)", { sort: false, wide: true }),
      { name: "call_site", title: "Made in", width: "minmax(100px, 1.4fr)", wide: true, cell: (row) => html`<span title=${row.call_site}>${row.call_site.replace(/^\S*\//, "") || "–"}</span>` },
      { name: "task_status", title: "State", width: "100px", wide: true, cell: (row) => (row.task_status === "NIL" ? "put" : String(row.task_status ?? "–").toLowerCase().replaceAll("_", " ")) },
      { name: "node_id", title: "Node", width: "minmax(80px, 0.7fr)", wide: true, cell: node },
      pid,
    ],
    empty: html`No object in shared memory. Values above 100 KiB that <code>put</code> stores or a task returns are here with their size, their owner and why they are held.`,
  },
  events: {
    title: "Events", first: "-time", tell: (row) => row.message,
    columns: [
      { name: "time", title: "When", width: "84px", cell: (row) => html`<time title=${clock(row.time, true)}>${clock(row.time)}</time>` },
      { name: "severity", title: "Level", width: "86px", wide: true, cell: (row) => html`<${State} of=${row.severity} />` },
      { name: "event_type", title: "Kind", width: "minmax(80px, 150px)", cell: (row) => row.event_type.replaceAll("_", " ") },
      { name: "message", title: "What happened", width: "minmax(180px, 4fr)", sort: false, cell: (row) => html`<span title=${row.message}>${unnumbered(row.message)}</span>` },
      { name: "node_id", title: "Node", width: "minmax(80px, 0.7fr)", sort: false, wide: true, cell: (row) => node(row.custom_fields) },
    ],
    open: ({ custom_fields: of }) => (of.actor_id ? `#/actor/${of.actor_id}` : null),
    empty: html`Nothing has happened yet: what is placed, restarted, lost, quarantined, spilled, drained or killed for memory is noted here with its cause.`,
  },
  datasets: {
    title: "Datasets",
    columns: [
      text("name", "Dataset", "minmax(90px, 1fr)", { wide: true }),
      { name: "operator", title: "Operator or reader", width: "minmax(120px, 1.6fr)", cell: (row) => html`<span title="${row.operator} (${row.name})">${row.name !== row.operator && html`<span class="narrow">${row.name}, </span>`}${row.operator}</span>` },
      { name: "position", title: "Rows", width: "minmax(120px, 1fr)", cell: (row) => html`<${Bar} value=${row.position} of=${row.total} />` },
      { name: "rows_per_second", title: "Rows/s", width: "84px", right: true, cell: (row) => number(row.rows_per_second) },
      { name: "bytes_in_flight", title: "In flight", width: "84px", right: true, wide: true, cell: (row) => bytes(row.bytes_in_flight) },
      { name: "running", title: "Calls", width: "72px", right: true, wide: true, cell: (row) => number(row.running) },
      text("waits_for", "Waits for", "100px", { wide: true }),
      pid,
      { name: "wait_seconds", title: "Waited", width: "84px", right: true, cell: (row) => seconds(row.wait_seconds) },
    ],
    open: (row) => (row.run_id ? `#/run/${row.run_id}` : null),
    empty: html`No dataset is being executed or read. Each operator of one shows here its rows per second and what it waits for; each rank of a run, how far it is and how long it has waited for data.`,
  },
};

/** Equal texts in a row as one with its count. */
function folded(texts) {
  const counts = new Map();
  for (const each of texts) counts.set(each, (counts.get(each) ?? 0) + 1);
  return [...counts].map(([each, count]) => (count > 1 ? `${count} × ${each}` : each)).join("; ");
}

function Progress({ row }) {
  const states = [["finished", "ok"], ["failed", "bad"], ["running", "run"], ["waiting", "wait"]];
  return html`<span class="progress">${states.map(([name, look]) => row[name] > 0 && html`<i key=${name} class=${look} title="${number(row[name])} ${name}" style=${{ flexGrow: row[name] }} />`)}</span>`;
}

export const isTable = (name) => name in TABLES;
export const Table = ({ name }) => html`<${TopicPage} key=${name} topic=${name} ...${TABLES[name]} />`;
