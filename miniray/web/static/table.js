// Tables of any length: the server sorts, searches and cuts the window; only visible rows are drawn.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";
import { useLive } from "./live.js";
import { Empty, Problem, kindOf } from "./parts.js";

const ROW = 30;
/** Rows asked for beyond those that are seen, so that scrolling rarely waits. */
const MARGIN = 40;

/** What the keys act on: the table that was used last, else the first one, and the search field. */
let keyed = null;
let field = null;
export const act = (what) => (what === "search" ? field?.focus() : keyed?.[what]?.());

/** What the address says after "?": search and order survive a reload and can be shared. */
export function addressed() {
  return Object.fromEntries(new URLSearchParams(location.hash.split("?")[1] ?? ""));
}

function address(values) {
  const kept = new URLSearchParams(Object.entries({ ...addressed(), ...values }).filter(([, v]) => v));
  const text = kept.toString();
  history.replaceState(null, "", `${location.hash.split("?")[0] || "#/"}${text ? `?${text}` : ""}`);
}

/** The tracks of the columns; on a narrow screen all give way. */
const grid = (columns, narrow) => {
  const tracks = columns.map((column) => column.width ?? "minmax(0, 1fr)").join(" ");
  return narrow ? tracks.replace(/minmax\(\d+px/g, "minmax(0").replace(/\b\d{2,}px/g, (size) => `${0.82 * parseInt(size, 10)}px`) : tracks;
};

/**
 * Rows in a grid. A column: {name, title, width, cell, sort, right, wide}; `wide` ones are left out
 * on narrow screens. `rows` begin at row `start` of `total`.
 */
export function Rows({ columns, rows, start = 0, total = rows.length, open, sort, onSort, onWindow, onChoose, label, height }) {
  const [place, setPlace] = useState({ top: 0, height: 600 });
  const [chosen, setChosen] = useState(-1);
  const scroller = useRef(null);
  const narrow = matchMedia("(max-width: 760px)").matches;
  const shown = columns.filter((column) => !(narrow && column.wide));

  const measure = () => {
    const { scrollTop: top, clientHeight: height, clientWidth: width } = scroller.current;
    setPlace((old) => (old.top === top && old.height === height && old.width === width ? old : { top, height, width }));
  };
  useLayoutEffect(() => {
    measure();
    const watch = new ResizeObserver(measure);
    watch.observe(scroller.current);
    return () => watch.disconnect();
  }, []);

  const first = Math.max(0, Math.floor(place.top / ROW) - 4);
  const last = Math.min(total, Math.ceil((place.top + place.height) / ROW) + 4);
  useEffect(() => onWindow?.(first, last), [first, last, total]);

  const choose = (at) => {
    setChosen(at);
    onChoose?.(rows[at - start]);
  };
  const move = (by) => {
    const next = Math.max(0, Math.min(total - 1, chosen + by));
    choose(next);
    const box = scroller.current;
    if (next * ROW < box.scrollTop) box.scrollTop = next * ROW;
    if ((next + 2) * ROW > box.scrollTop + box.clientHeight) box.scrollTop = (next + 2) * ROW - box.clientHeight;
  };
  const visit = (row) => {
    const to = row && open?.(row);
    if (to) location.hash = to;
  };
  const keys = useRef({}).current;
  Object.assign(keys, { next: () => move(1), previous: () => move(-1), enter: () => visit(rows[chosen - start]) });
  useLayoutEffect(() => {
    keyed ??= keys;
    return () => (keyed = keyed === keys ? null : keyed);
  }, []);

  const drawn = [];
  for (let at = first; at < last; at++) {
    const row = rows[at - start];
    const style = { top: `${at * ROW}px`, gridTemplateColumns: grid(shown, narrow) };
    const click = (event) => {
      choose(at);
      if (!event.target.closest("a, button, input") && !String(getSelection())) visit(row);
    };
    drawn.push(html`<div class="row ${at === chosen ? "chosen" : ""} ${row && open?.(row) ? "opens" : ""}" role="row" key=${row?.key ?? `at ${at}`} aria-rowindex=${at + 2} style=${style} onClick=${click}>
      ${row ? shown.map((column) => html`<div role="cell" class=${column.right ? "right" : ""} key=${column.name}>${column.cell ? column.cell(row) : (row[column.name] ?? "–")}</div>`) : html`<div role="cell" class="dim">…</div>`}
    </div>`);
  }
  const heading = (column) => {
    const title = column.title ?? column.name;
    const order = sort === column.name ? "ascending" : sort === `-${column.name}` ? "descending" : undefined;
    const sortable = onSort && column.sort !== false;
    const next = order === "ascending" ? `-${column.name}` : order === "descending" ? "" : column.name;
    return html`<div role="columnheader" class=${column.right ? "right" : ""} key=${column.name} aria-sort=${order}>
      ${sortable ? html`<button type="button" onClick=${() => onSort(next)}>${title}${order && html`<span class="arrow">${order === "ascending" ? "▲" : "▼"}</span>`}</button>` : title}
    </div>`;
  };
  return html`<div class="table" role="table" aria-label=${label} aria-rowcount=${total + 1} ref=${scroller} onScroll=${measure} onFocusIn=${() => (keyed = keys)} tabindex="0" style=${height ? { maxHeight: `${height}px` } : null}>
    <div class="row head" role="row" style=${{ gridTemplateColumns: grid(shown, narrow) }}>${shown.map(heading)}</div>
    <div class="body" role="rowgroup" style=${{ height: `${total * ROW}px` }}>${drawn}</div>
  </div>`;
}

/** How many rows are in each state. */
export const counted = (summary) => summary.state ?? summary.status ?? summary.severity ?? {};

/** The search field and the counts by state, each of which narrows the table down. */
export function Search({ value, onInput, counts = {} }) {
  const own = useRef(null);
  useLayoutEffect(() => {
    field = own.current;
    return () => (field = null);
  }, []);
  const states = Object.entries(counts).filter(([, count]) => typeof count === "number");
  return html`<div class="search">
    ${states.map(([state, count]) => html`<button type="button" key=${state} class="chip ${kindOf(state)}" aria-pressed=${value === state} onClick=${() => onInput(value === state ? "" : state)}>${state.toLowerCase().replaceAll("_", " ")} <b>${count.toLocaleString("en-US")}</b></button>`)}
    <input ref=${own} type="search" placeholder="Search  /" aria-label="Search" value=${value} spellcheck=${false} onInput=${(event) => onInput(event.target.value)} />
  </div>`;
}

/** A page that is one topic as a table; `tell`: what is said in full of the row that is chosen. */
export function TopicPage({ topic, title, note, columns, open, tell, empty, first = "" }) {
  const [told, setTold] = useState("");
  const [search, setSearch] = useState(addressed().search ?? "");
  const [asked, setAsked] = useState({ search, sort: addressed().sort ?? first, from: 0, size: 2 * MARGIN });
  const at = useLive(topic, asked)(topic);

  useEffect(() => {
    const timer = setTimeout(() => setAsked((old) => (old.search === search ? old : { ...old, search, from: 0 })), 120);
    address({ search });
    return () => clearTimeout(timer);
  }, [search]);
  const sorted = (sort) => {
    address({ sort });
    setAsked((old) => ({ ...old, sort, from: 0 }));
  };
  const moved = useRef(0);
  const onWindow = (from, to) => {
    clearTimeout(moved.current);
    const inside = from >= asked.from && Math.min(to, at.total) <= asked.from + asked.size;
    if (inside) return;
    const next = { from: Math.max(0, from - MARGIN), size: to - from + 2 * MARGIN };
    moved.current = setTimeout(() => setAsked((old) => ({ ...old, ...next })), 40);
  };
  useEffect(() => () => clearTimeout(moved.current), []);

  useEffect(() => {
    if (at.rows.length) performance.mark("rows"); // how long it takes is measured by this
  }, [at.rows.length > 0]);
  const none = at.ready && !at.total;
  return html`<div class="page fills">
    <header class="top"><h1>${title}${at.ready && html`<span class="count">${at.total.toLocaleString("en-US")}</span>`}</h1>
      <${Search} value=${search} onInput=${setSearch} counts=${counted(at.summary)} /></header>
    <${Problem} of=${at.error} />
    ${none && asked.search ? html`<${Empty}>Nothing has “${asked.search}” in it. <button type="button" onClick=${() => setSearch("")}>Show all</button><//>` : none ? html`<${Empty}>${empty}<//>` : html`<${Rows} label=${title} columns=${columns} open=${open} rows=${at.rows} start=${at.start} total=${at.total} sort=${asked.sort} onSort=${sorted} onWindow=${onWindow} onChoose=${(row) => setTold((row && tell?.(row)) || "")} />`}
    ${told && html`<p class="told" aria-live="polite">${told}</p>`}
    ${note && html`<p class="note">${note}</p>`}
  </div>`;
}
