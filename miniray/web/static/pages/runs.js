// Training: the list of runs, one run from start to end, and several over each other.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js";
import { useLive } from "../live.js";
import { Inspect, Logs } from "../inspect.js";
import { Chart, useTheme } from "../charts.js";
import { Rows, TopicPage } from "../table.js";
import { Ago, Card, Empty, Facts, Id, Problem, State, bytes, clock, number, seconds, workerHref } from "../parts.js";

const latest = (metrics) => Object.entries(metrics ?? {}).filter(([, v]) => typeof v === "number").slice(0, 4).map(([name, v]) => `${name} ${number(v)}`).join("  ");
const took = (row) => (row.ended ? seconds(row.ended - row.started) : html`<${Ago} time=${row.started} />`);

export function Runs() {
  const [picked, setPicked] = useState([]);
  const toggle = (id) => setPicked((old) => (old.includes(id) ? old.filter((each) => each !== id) : [...old, id]));
  const columns = [
    { name: "pick", title: "", width: "24px", sort: false, cell: (row) => html`<input type="checkbox" aria-label="Compare ${row.name}" checked=${picked.includes(row.run_id)} onChange=${() => toggle(row.run_id)} />` },
    { name: "name", title: "Run", width: "minmax(120px, 1.4fr)", cell: (row) => html`<a href="#/run/${row.run_id}" title=${row.path}><b>${row.name}</b></a>` },
    { name: "state", title: "State", width: "minmax(92px, 0.8fr)", cell: (row) => html`<span title=${row.error || row.path}><${State} of=${row.state} /></span>` },
    { name: "metrics", title: "Newest report, or error", width: "minmax(150px, 2.8fr)", wide: true, sort: false, cell: (row) => html`<span class=${row.error ? "bad" : "numbers"} title=${row.error || latest(row.metrics)}>${row.error || latest(row.metrics) || "–"}</span>` },
    { name: "reports", title: "Reports", width: "64px", right: true, wide: true, cell: (row) => number(row.reports) },
    { name: "checkpoints", title: "Checkpoints", width: "94px", right: true, wide: true, cell: (row) => number(row.checkpoints) },
    { name: "workers", title: "Workers", width: "64px", right: true, wide: true },
    { name: "attempts", title: "Attempts", width: "68px", right: true, wide: true },
    { name: "started", title: "Started", width: "144px", wide: true, cell: (row) => clock(row.started) },
    { name: "took", title: "Took", width: "100px", right: true, sort: false, cell: took },
  ];
  const empty = html`No run yet. <code>TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2)).fit()</code> is one; it appears here when it starts, and stays after its end.`;
  return html`<${TopicPage} topic="runs" title="Train runs" columns=${columns} first="-started" open=${(row) => `#/run/${row.run_id}`} empty=${empty}
    note=${picked.length > 0 && html`<a class="button primary" href="#/compare/${picked.map(encodeURIComponent).join(",")}">Show ${picked.length} ${picked.length > 1 ? "runs over each other" : "run's charts"}</a> <button type="button" class="quiet" onClick=${() => setPicked([])}>none</button>`} />`;
}

const metricNames = (series) => Object.keys(series ?? {}).filter((name) => name !== "step" && series[name].some((v) => typeof v === "number"));

/** The charts of one run, one metric each. */
function Charts({ series }) {
  const charts = useMemo(() => metricNames(series).map((name) => ({ name, lines: [{ name, values: series[name].map((v) => (typeof v === "number" ? v : null)) }] })), [series]);
  if (!charts.length) return html`<${Empty}>Numbers that <code>report({"loss": …})</code> is given are drawn here, step by step.<//>`;
  return html`<div class="charts">${charts.map(({ name, lines }) => html`<${Chart} key=${name} title=${name} x=${series.step} lines=${lines} />`)}</div>`;
}

/** By how many seconds each rank came after the first one, report by report: who is slow is a warm row. */
function Heat({ heat }) {
  const canvas = useRef(null);
  const [told, setTold] = useState("");
  const theme = useTheme();
  const rows = heat?.seconds ?? [];
  const columns = rows[0]?.length ?? 0;
  const cell = Math.max(5, Math.min(18, Math.floor(260 / Math.max(1, rows.length))));
  const most = useMemo(() => Math.max(0.5, ...rows.flat().filter((lag) => lag != null)), [heat]);
  useEffect(() => {
    const box = canvas.current;
    if (!box || !columns) return;
    const scale = devicePixelRatio || 1;
    const wide = Math.min(22, box.parentElement.clientWidth / columns);
    box.width = wide * columns * scale;
    box.height = rows.length * cell * scale;
    Object.assign(box.style, { width: `${wide * columns}px`, height: `${rows.length * cell}px` });
    const c = box.getContext("2d");
    c.scale(scale, scale);
    const dark = getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
    rows.forEach((row, rank) => row.forEach((lag, n) => {
      if (lag == null) return;
      for (const [look, strength] of [[dark ? "#26303d" : "#e4eaf3", 1], [dark ? "#f2784b" : "#d9480f", Math.min(1, lag / most)]]) {
        c.fillStyle = look;
        c.globalAlpha = strength;
        c.fillRect(n * wide, rank * cell, Math.max(0.5, wide - (wide > 3 ? 1 : 0)), cell - 1);
      }
    }));
  }, [heat, theme]);
  const over = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const rank = Math.floor((event.clientY - box.top) / cell);
    const n = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const lag = rows[rank]?.[n];
    setTold(lag == null ? "" : `Rank ${rank}, report ${heat.reports[n]}: ${lag ? `${seconds(lag)} after the first rank` : "the first"}.`);
  };
  if (!columns) return html`<${Empty}>While a run goes on, this shows by how much each rank comes after the first one: a slow rank stands out as a row.<//>`;
  return html`<div class="heat"><div class="axis"><span>rank 0</span>${rows.length > 1 && html`<span>rank ${rows.length - 1}</span>`}</div><div><canvas ref=${canvas} role="img" aria-label="Seconds by which each rank came after the first, report by report" onMouseMove=${over} onMouseLeave=${() => setTold("")} /></div></div>
    <p class="dim" aria-live="polite">${told || `Each row is a rank, each column a report (${heat.reports[0]} to ${heat.reports.at(-1)}); the warmer, the later it came after the first rank. Full colour: by ${seconds(most)}.`}</p>`;
}

const rankHref = (row) => workerHref(row) && `${workerHref(row)}/${row.run_id}/${row.rank}`;
const does = (row) => [row.problem, row.doing].filter(Boolean).join("; ");
const RANKS = [
  { name: "rank", title: "Rank", width: "48px", cell: (row) => (workerHref(row) ? html`<a href=${rankHref(row)}><b>${row.rank}</b></a>` : html`<b>${row.rank}</b>`) },
  { name: "state", title: "State", width: "90px", cell: (row) => html`<${State} of=${row.state} />` },
  { name: "node_id", title: "Node", width: "76px", wide: true, cell: (row) => html`<span title=${row.node_id}>${row.node_id?.slice(0, 8) ?? "–"}</span>` },
  { name: "pid", title: "Process", width: "60px", right: true, wide: true },
  { name: "reports", title: "Reports", width: "70px", right: true },
  { name: "behind", title: "Behind", width: "66px", right: true, cell: (row) => html`<span class=${row.behind > 1 ? "warn" : ""}>${number(row.behind)}</span>` },
  { name: "last_report", title: "Last report", width: "80px", right: true, wide: true, cell: (row) => html`<${Ago} time=${row.last_report} />` },
  { name: "data_wait", title: "Data wait", width: "70px", right: true, wide: true, cell: (row) => seconds(row.data_wait) },
  { name: "blocked", title: "In report()", width: "76px", right: true, wide: true, cell: (row) => seconds(row.blocked) },
  { name: "device_memory", title: "Device memory", width: "100px", right: true, wide: true, cell: (row) => bytes(row.device_memory) },
  { name: "doing", title: "Does", width: "minmax(100px, 2fr)", wide: true, cell: (row) => html`<span class=${row.problem ? "warn" : ""} title=${does(row)}>${does(row) || "–"}</span>` },
];

const CHECKPOINTS = [
  { name: "name", title: "Checkpoint", width: "minmax(130px, 1.4fr)", cell: (row) => html`<b title=${row.path}>${row.name}</b>` },
  { name: "number", title: "Report", width: "64px", right: true, wide: true },
  { name: "size", title: "Size", width: "88px", right: true, cell: (row) => bytes(row.size) },
  { name: "seconds", title: "Took", width: "84px", right: true, cell: (row) => seconds(row.seconds) },
  { name: "time", title: "Age", width: "104px", right: true, wide: true, cell: (row) => html`<${Ago} time=${row.time} />` },
  { name: "metrics", title: "Metrics", width: "minmax(100px, 2fr)", wide: true, cell: (row) => html`<span class="numbers">${latest(row.metrics)}</span>` },
];

const ATTEMPTS = [
  { name: "number", title: "Attempt", width: "66px", right: true },
  { name: "state", title: "State", width: "minmax(80px, 100px)", cell: (row) => html`<${State} of=${row.state ?? (row.ended ? "ended" : "running")} />` },
  { name: "workers", title: "Workers", width: "70px", right: true, wide: true },
  { name: "started", title: "Started", width: "136px", wide: true, cell: (row) => clock(row.started) },
  { name: "took", title: "Took", width: "96px", right: true, cell: took },
  { name: "reason", title: "Why it ended", width: "minmax(140px, 3fr)", cell: (row) => html`<span title=${row.reason}>${row.reason || "–"}</span>` },
];

const keyed = (rows, field) => (rows ?? []).map((row, n) => ({ key: String(row[field] ?? n), ...row }));
const List = ({ title, columns, rows, empty, open, note }) =>
  html`<${Card} title=${title} note=${note}>${rows.length ? html`<${Rows} label=${title} columns=${columns} rows=${rows} open=${open} height=${Math.min(340, 34 + 30 * rows.length)} />` : html`<${Empty}>${empty}<//>`}<//>`;

export function Run({ id }) {
  const topic = `run:${id}`;
  const at = useLive(topic, { size: 1000 })(topic);
  const { run = {}, series, checkpoints, attempts, heat, notes = [] } = at.summary;
  const [of, setOf] = useState("all");
  const live = !run.ended && !/FINISHED|ERRORED|ABORTED|LOST/.test(run.state ?? "");
  const named = { of: id };
  const one = at.rows.find((row) => String(row.rank) === of);
  const whom = one ? { of: `${one.node_id}:${one.pid}` } : named;
  const top = html`<header class="top"><h1><a class="up" href="#/runs">Train runs</a>${run.name ?? id} ${run.state && html`<${State} of=${run.state} />`}</h1>${run.name && html`<a class="button" href="#/compare/${encodeURIComponent(id)}">Compare</a>`}</header>`;
  if (at.error && !run.name) return html`<div class="page">${top}<${Problem} of=${at.error} /></div>`;
  const controller = run.actor_id ? [{ name: "controller", of: { of: run.actor_id } }] : [];
  const choices = [{ name: "all ranks", of: named }, ...controller, ...at.rows.map((row) => ({ name: `rank ${row.rank}`, of: { ...named, rank: row.rank } }))];
  return html`<div class="page">
    ${top}
    <${Problem} of=${at.error} />
    ${run.error && html`<p class="cause">${run.error}</p>`}
    ${[run.problem, ...notes].filter(Boolean).map((note) => html`<p class="note" key=${note}>${note}</p>`)}
    <${Facts} of=${[
      ["Framework", run.framework], ["Workers", at.rows.length || run.workers], ["Reports", run.reports], ["Attempts", run.attempts], ["Started", run.started && clock(run.started)],
      ["Took", run.started && took(run)], ["Controller", run.actor_id && html`<${Id} of=${run.actor_id} href="#/actor/${run.actor_id}" />`], ["Folder", run.path && html`<code>${run.path}</code>`],
    ]} />
    <${Charts} series=${series} />
    <${List} title="Ranks" columns=${RANKS} rows=${at.rows.map((row) => ({ ...row, run_id: id }))} open=${rankHref} empty=${live ? "No rank has started yet: the run waits for its placement group, or starts its processes." : "The run has ended, and its ranks with it."} />
    <${Card} title="Look inside" note="of all ranks at once, equal stacks together"><div class="tools"><label>of <select aria-label="Rank" value=${of} onChange=${(event) => setOf(event.target.value)}><option value="all">all ranks</option>${at.rows.map((row) => html`<option key=${row.key} value=${row.rank}>rank ${row.rank}</option>`)}</select></label></div>
      <${Inspect} key=${of} of=${whom} live=${live} /><//>
    <${Card} title="Slow ranks"><${Heat} heat=${heat} /><//>
    <${List} title="Checkpoints" columns=${CHECKPOINTS} rows=${keyed(checkpoints, "name").reverse()} empty=${live ? "None is complete yet. One is, when every rank's files are in the run's folder." : "None is complete."} />
    <${List} title="Attempts" columns=${ATTEMPTS} rows=${keyed(attempts, "number").reverse()} empty="The first attempt begins when the run's workers are placed." />
    ${run.config && Object.keys(run.config).length > 0 && html`<${Card} title="Configuration"><pre>${JSON.stringify(run.config, null, 2)}</pre><//>`}
    ${run.name && html`<${Card} title="Log" wide><${Logs} key=${choices.length} choices=${choices} of=${named} live=${live} /><//>`}
  </div>`;
}

/** Lines of several runs over one axis: the union of their steps, gaps where a run has none. */
function overlaid(runs) {
  const names = [...new Set(runs.flatMap((run) => metricNames(run.series)))];
  const steps = [...new Set(runs.flatMap((run) => run.series.step ?? []))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, n) => [step, n]));
  const line = (run, metric) => {
    const values = new Array(steps.length).fill(null);
    run.series.step.forEach((step, n) => (values[place.get(step)] = typeof run.series[metric]?.[n] === "number" ? run.series[metric][n] : null));
    return { name: run.name, values };
  };
  return { steps, charts: names.map((name) => ({ name, lines: runs.filter((run) => run.series[name]).map((run) => line(run, name)) })) };
}

/** Runs that are drawn over each other, at most: a stream has one topic more. */
const MOST = 11;

export function Compare({ ids }) {
  const picked = ids.split(",").filter(Boolean);
  const topics = picked.slice(0, MOST).map((id) => `run:${id}`);
  const live = useLive(["runs", ...topics].join(","), { size: 100, sort: "-started" });
  const runs = live("runs");
  const told = topics.map(live);
  const drawn = overlaid(told.filter((at) => at.summary.run).map(({ summary }) => ({ name: summary.run.name, series: summary.series })));
  const toggle = (id) => (location.hash = `#/compare/${(picked.includes(id) ? picked.filter((each) => each !== id) : [...picked, id]).map(encodeURIComponent).join(",")}`);
  return html`<div class="page">
    <header class="top"><h1><a class="up" href="#/runs">Train runs</a>Compare</h1></header>
    <${Problem} of=${told.find((at) => at.error)?.error} />
    ${picked.length > MOST && html`<p class="note">The first ${MOST} are drawn.</p>`}
    <div class="chips">${runs.rows.map((row) => html`<button type="button" class="chip" key=${row.key} aria-pressed=${picked.includes(row.run_id)} onClick=${() => toggle(row.run_id)}>${row.name}</button>`)}</div>
    <div class="charts">${drawn.charts.map(({ name, lines }) => html`<${Chart} key=${name} title=${name} x=${drawn.steps} lines=${lines} height=${220} />`)}</div>
    ${runs.ready && !drawn.charts.length && html`<${Empty}>Choose runs above: each metric is one chart, each run a line in it.<//>`}
  </div>`;
}
