// The cluster at a glance: what there is, who has which part of which device, and the nodes.
import { html, useState } from "../vendor/preact-htm.js";
import { get, post, useLive, usePolled } from "../live.js";
import { Frames } from "../inspect.js";
import { Rows, counted } from "../table.js";
import { Chart } from "../charts.js";
import { Ago, Bar, Card, Empty, Facts, Problem, State, bytes, hue, number, percent } from "../parts.js";

const holderHref = (held) => (held.kind === "actor" && held.id ? `#/actor/${held.id}` : held.pid && held.node_id ? `#/worker/${held.node_id}/${held.pid}` : null);

/** One device: who has which share of it, what is free, and below it how much is really used. */
function Device({ row, use, small }) {
  const held = row.held ?? [];
  const { utilization_ratio: busy, memory_used_bytes: memory, memory_size_bytes: size } = use;
  const told = held.map((each) => `${number(each.share)} ${each.name}`).join("\n");
  const facts = [
    `${row.node_name ?? row.node_id}: ${row.resource} ${row.device}`, told,
    row.quarantined ? `out of service: ${row.quarantined}` : row.free ? `${number(row.free)} free` : "nothing free",
    busy != null ? `busy ${percent(busy)}` : "", size ? `memory ${bytes(memory)} of ${bytes(size)}` : "",
    use.temperature_celsius != null ? `${number(use.temperature_celsius)} °C` : "", use.power_watts != null ? `${number(use.power_watts)} W` : "",
  ].filter(Boolean).join("\n");
  const part = (each, n) => {
    const style = { flexGrow: each.share, "--hue": hue(each.name) };
    const text = small ? null : html`<b>${each.name}</b><i>${number(each.share)}</i>`;
    const href = holderHref({ node_id: row.node_id, ...each });
    return href ? html`<a key=${n} class="part" href=${href} style=${style}>${text}</a>` : html`<span key=${n} class="part" style=${style}>${text}</span>`;
  };
  return html`<div class="device ${small ? "small" : ""} ${row.quarantined ? "quarantined" : ""}" title=${facts} data-device=${row.key}>
    ${!small && html`<div class="name"><span>${row.resource} ${row.device}</span><span class="dim">${row.quarantined ? "quarantined" : row.free ? `${number(row.free)} free` : "full"}</span></div>`}
    <div class="shares">${held.map(part)}${!row.quarantined && row.free > 0 && html`<span class="free" style=${{ flexGrow: row.free }} />`}${row.quarantined && html`<span class="out">${!small && "out of service"}</span>`}</div>
    ${busy != null && html`<div class="real" title="busy ${percent(busy)}"><span style=${{ width: `${100 * busy}%` }} /></div>`}
    ${size > 0 && html`<div class="real memory" title="memory ${bytes(memory)} of ${bytes(size)}"><span style=${{ width: `${(100 * (memory ?? 0)) / size}%` }} /></div>`}
  </div>`;
}

function DeviceMap({ devices, uses, models, ready, error }) {
  const [only, setOnly] = useState("all");
  const nodes = new Map();
  for (const row of devices) nodes.set(row.node_id, [...(nodes.get(row.node_id) ?? []), row]);
  const fits = { all: () => true, free: (row) => row.free > 0 && !row.quarantined, "out of service": (row) => row.quarantined };
  const small = devices.length > 96;
  const biggest = devices.reduce((most, row) => Math.max(most, row.quarantined ? 0 : (row.free ?? 0)), 0);
  const free = devices.reduce((sum, row) => sum + (row.quarantined ? 0 : (row.free ?? 0)), 0);
  const away = devices.filter((row) => row.quarantined).length;
  const note = devices.length ? `${number(free)} of ${devices.length} free, at most ${number(biggest)} on one${away ? `; ${away} out of service` : ""}` : "";
  const named = new Set([...nodes.values()].map(([row]) => row.node_name)).size === nodes.size;
  const groups = [...nodes].map(([node, rows]) => [node, rows.filter(fits[only])]).filter(([, rows]) => rows.length);
  return html`<${Card} title="Devices" note=${note} id="devices">
    <${Problem} of=${error} />
    ${devices.length > 0 && html`<div class="tools legend"><span class="key"><i class="part" />held, by whom</span><span class="key"><i class="free" />free</span><span class="key"><i class="out" />out of service</span><span class="key"><i class="used" />in use: compute, memory</span>
      <select aria-label="Show devices" value=${only} onChange=${(event) => setOnly(event.target.value)}>${Object.keys(fits).map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></div>`}
    ${groups.map(([node, rows]) => html`<div class="rack" key=${node}><div class="rackname" title=${node}>${rows[0].node_name || node}<span class="dim">${models.get(node)}</span>${!named && html`<span class="dim">${node.slice(0, 8)}</span>`}</div><div class="devices">${rows.map((row) => html`<${Device} key=${row.key} row=${row} use=${uses.get(node)?.devices[`${row.resource}/${row.device}`] ?? {}} small=${small} />`)}</div></div>`)}
    ${ready && !devices.length && html`<${Empty}>No node has devices. GPUs and other accelerators are found when a node starts; <code>--num-gpus N</code> declares some.<//>`}
    ${devices.length > 0 && !groups.length && html`<${Empty}>No device is “${only}”.<//>`}
  <//>`;
}

const NODE_COLUMNS = [
  { name: "node_name", title: "Node", width: "minmax(120px, 2.2fr)", cell: (row) => html`<span title=${row.node_id}><b>${row.node_name || row.node_id}</b> <span class="dim">${row.is_head_node ? "head · " : ""}${row.node_id.slice(0, 8)} · ${row.node_ip}</span></span>` },
  { name: "state", title: "State", width: "minmax(92px, 1fr)", cell: (row) => html`<span title=${row.state_message}><${State} of=${row.state} bad=${row.state === "DEAD" && /lost|silent|heartbeat|ended|killed/i.test(row.state_message ?? "")} /> <span class="dim">${row.state_message}</span></span>` },
  { name: "CPU", title: "CPUs held", width: "96px", wide: true, cell: (row) => html`<${Bar} value=${row.used?.CPU ?? 0} of=${row.total?.CPU} />` },
  { name: "cpu_percent", title: "CPU used", width: "86px", cell: (row) => html`<${Bar} value=${row.cpu_percent} of=${100} show=${(v) => `${Math.round(v)} %`} text=${`${Math.round(row.cpu_percent ?? 0)} %`} />` },
  { name: "memory_used", title: "Memory", width: "140px", wide: true, cell: (row) => html`<${Bar} value=${row.memory_used} of=${row.memory_total} show=${bytes} />` },
  { name: "object_store_used", title: "Object store", width: "140px", wide: true, cell: (row) => html`<${Bar} value=${row.object_store_used} of=${row.object_store_capacity} show=${bytes} />` },
  { name: "disk_free", title: "Disk free", width: "80px", right: true, wide: true, cell: (row) => bytes(row.disk_free) },
  { name: "processes", title: "Processes", width: "72px", right: true, wide: true },
];

const Tile = ({ name, href, children }) => html`<a class="tile" href=${href}><span>${name}</span><b>${children}</b></a>`;

export function Cluster() {
  const live = useLive("nodes,usage,devices,waiting", { size: 200 });
  const [nodes, usage, devices, waiting] = ["nodes", "usage", "devices", "waiting"].map(live);
  const uses = new Map(usage.rows.map((row) => [row.key, row]));
  const rows = nodes.rows.map((row) => ({ ...uses.get(row.key), ...row }));
  const models = new Map(nodes.rows.map((row) => [row.node_id, Object.keys(row.total).find((name) => name.startsWith("accelerator_type:"))?.split(":")[1]]));
  const { name, address, version, since, logs, total = {}, used = {} } = nodes.summary.cluster ?? {};
  const counts = counted(nodes.summary);
  const blocked = waiting.rows.reduce((sum, row) => sum + (row.count ?? 1), 0);
  const resources = Object.keys(total).filter((name) => !/^node:|^accelerator_type:|memory/.test(name)).sort();
  return html`<div class="page">
    <header class="top"><h1>Cluster</h1></header>
    <${Problem} of=${nodes.error} />
    <div class="tiles">
      <${Tile} name="Nodes" href="#/">${nodes.ready ? (counts.ALIVE ?? 0) : "–"}<small>of ${number(nodes.ready && nodes.total)}</small><//>
      ${resources.map((name) => html`<${Tile} key=${name} name="${name} held" href="#/actors">${number(used[name] ?? 0)}<small>of ${number(total[name])}</small><//>`)}
      <${Tile} name="Waiting" href="#/waiting"><span class=${blocked ? "warn" : ""}>${number(waiting.ready && blocked)}</span>${waiting.rows.some((row) => row.infeasible) && html`<small class="bad">some never fit</small>`}<//>
      ${since && html`<${Tile} name="Up for" href="#/events"><${Ago} time=${since} /><//>`}
    </div>
    <${DeviceMap} devices=${devices.rows} uses=${uses} models=${models} ready=${devices.ready} error=${devices.error} />
    <${Card} title="Nodes"><${Rows} label="Nodes" columns=${NODE_COLUMNS} rows=${rows} height=${Math.min(400, 34 + 30 * Math.max(1, rows.length))} /><//>
    <${Facts} of=${[["Cluster", name], ["Address", address], ["miniray", version], ["Logs", logs && html`<code>${logs}</code>`]]} />
  </div>`;
}

/** The last hour, without anything else installed. */
export function Metrics() {
  const { value, error } = usePolled(() => get("metrics"), 10, []);
  const charts = value?.charts ?? [];
  return html`<div class="page">
    <header class="top"><h1>Metrics</h1><span class="dim">the last hour, a point each ${value?.interval ?? 10} s; <code>/metrics</code> has all of them for Prometheus</span></header>
    <${Problem} of=${error} />
    <div class="charts">${charts.map((chart) => html`<${Chart} key=${chart.title} title=${chart.title} unit=${chart.unit} time=${true} x=${value.times} lines=${chart.series} />`)}</div>
    ${value && !charts.length && html`<${Empty}>Nodes keep a point each 10 s from their start on; the first is not there yet.<//>`}
  </div>`;
}

/** The chain from what waits to what it waits for. */
export function Why({ id }) {
  const [text, setText] = useState(id ?? "");
  const { value, error } = usePolled(() => post("why", { of: id ?? "" }), 2, [id]);
  const ask = (event) => {
    event.preventDefault();
    if (text.trim()) location.hash = `#/why/${encodeURIComponent(text.trim())}`;
  };
  return html`<div class="page">
    <header class="top"><h1>Why does it wait?</h1></header>
    <form class="ask" onSubmit=${ask}><input type="search" aria-label="Id or name" placeholder="Id of a ref, task or actor, or a name" value=${text} onInput=${(event) => setText(event.target.value)} /><button type="submit">Show why</button></form>
    <${Problem} of=${error} />
    ${value?.deadlock && html`<div class="problem" role="alert">This is a deadlock: the chain comes back to where it began, so nothing in it can go on.</div>`}
    ${value?.chain && html`<${Chain} of=${value.chain} />`}
    ${(value?.notes ?? []).map((note) => html`<p class="note" key=${note}>${note}</p>`)}
    ${!id && (error || !value?.chain?.length) && html`<${Empty}>From a <code>get</code> that does not return to the ref it waits for, its task, the actor's queue, the method that runs now, and its stack. <code>miniray why ID</code> shows the same.<//>`}
    ${id && value?.chain && !value.chain.length && html`<${Empty}>It waits for nothing.<//>`}
  </div>`;
}

const Chain = ({ of }) => html`<ol class="chain">${of.map((link, n) => html`<li key=${n}>${!link.name.startsWith(link.kind) && html`<span class="dim">${link.kind}</span> `}<b>${link.name}</b><p>${link.text}</p>${link.stack?.length > 0 && html`<${Frames} of=${link.stack} />`}</li>`)}</ol>`;
