// The page: which part of it the address names, navigation, keys, theme and login.
import { html, render, useEffect, useState } from "./vendor/preact-htm.js";
import { login, useLink } from "./live.js";
import { act } from "./table.js";
import { Cluster, Metrics, Why } from "./pages/cluster.js";
import { Actor, Worker } from "./pages/details.js";
import { Compare, Run, Runs } from "./pages/runs.js";
import { Table, isTable } from "./pages/tables.js";

const NAVIGATION = [
  ["", [["", "Cluster"], ["metrics", "Metrics"], ["events", "Events"]]],
  ["Work", [["waiting", "Waiting"], ["actors", "Actors"], ["tasks", "Tasks"], ["jobs", "Jobs"], ["groups", "Placement groups"]]],
  ["Training", [["runs", "Train runs"], ["datasets", "Datasets"]]],
  ["Memory", [["objects", "Objects"]]],
  ["Help", [["why", "Why does it wait?"]]],
];
/** Which entry of the navigation a page belongs to. */
const PARENTS = { actor: "actors", run: "runs", compare: "runs", worker: "" };
const KEYS = [["/", "search"], ["j, k", "next row, previous row"], ["Enter", "open the row"], ["Esc", "leave the field; close this, or the menu"], ["?", "these keys"]];
const THEMES = { "": "as the system", light: "light", dark: "dark" };

const parts = () => location.hash.replace(/^#\/?/, "").split("?")[0].split("/").map(decoded);

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // somebody has written a % there
  }
}

function page([name, ...rest]) {
  if (name === "") return html`<${Cluster} />`;
  if (isTable(name)) return html`<${Table} name=${name} />`;
  if (name === "metrics") return html`<${Metrics} />`;
  if (name === "runs") return html`<${Runs} />`;
  if (name === "run") return html`<${Run} key=${rest[0]} id=${rest[0]} />`;
  if (name === "compare") return html`<${Compare} ids=${rest.join("/")} />`;
  if (name === "actor") return html`<${Actor} key=${rest[0]} id=${rest[0]} />`;
  if (name === "worker") return html`<${Worker} key=${rest.join()} node=${rest[0]} pid=${rest[1]} run=${rest[2]} rank=${rest[3]} />`;
  if (name === "why") return html`<${Why} key=${rest[0]} id=${rest[0]} />`;
  return html`<div class="page"><div class="empty">There is no page “${name}”. <a href="#/">To the cluster</a></div></div>`;
}

function Theme() {
  const [theme, setTheme] = useState(stored());
  const change = (event) => {
    setTheme(event.target.value);
    dress(event.target.value);
    try {
      localStorage.setItem("miniray theme", event.target.value);
    } catch {
      // Without storage the choice lasts as long as the page.
    }
  };
  return html`<label class="theme">Colours <select value=${theme} onChange=${change}>${Object.entries(THEMES).map(([value, name]) => html`<option key=${value} value=${value}>${name}</option>`)}</select></label>`;
}

function stored() {
  try {
    return localStorage.getItem("miniray theme") ?? "";
  } catch {
    return "";
  }
}

function dress(theme) {
  document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("theme"));
}

function Login({ reason }) {
  const [code, setCode] = useState("");
  const enter = async (event) => {
    event.preventDefault();
    if ((await login(code.trim().split("#k=").at(-1))) === null) setCode("");
  };
  return html`<div class="login"><form onSubmit=${enter}><h1>miniray</h1>
    <p>${reason || "This browser has not been let in yet."}</p>
    <p class="dim">Run <code>miniray dashboard</code> on the machine of the cluster: it opens this page with a code that works once, for a minute. Or give its address here.</p>
    <input type="text" aria-label="Address or code" placeholder="Address or code" value=${code} onInput=${(event) => setCode(event.target.value)} />
    <button type="submit" class="primary">Enter</button></form></div>`;
}

const LINKS = { connecting: "connecting", open: "live", lost: "not live, trying again" };

function App() {
  const [at, setAt] = useState(parts());
  const [help, setHelp] = useState(false);
  const [menu, setMenu] = useState(false);
  const link = useLink();
  useEffect(() => {
    const moved = () => {
      if (enterByAddress()) return;
      setAt(parts());
      setMenu(false);
    };
    const key = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
      if (event.key === "Escape") {
        event.target.blur?.();
        setMenu(false);
        return setHelp(false);
      }
      if (typing) return;
      const named = { "/": "search", j: "next", k: "previous" }[event.key];
      if (event.key === "?") setHelp((old) => !old);
      else if (named) act(named);
      else if (event.key === "Enter" && !event.target.closest("a, button, canvas")) act("enter");
      else return;
      event.preventDefault();
    };
    addEventListener("hashchange", moved);
    addEventListener("keydown", key);
    return () => {
      removeEventListener("hashchange", moved);
      removeEventListener("keydown", key);
    };
  }, []);
  const current = at[0] === "worker" && at[3] ? "runs" : (PARENTS[at[0]] ?? at[0]); // a rank's worker
  const title = NAVIGATION.flatMap(([, entries]) => entries).find(([name]) => name === current)?.[1];
  useEffect(() => {
    document.title = title ? `${title} · miniray` : "miniray";
  }, [title]);
  if (link.state === "login") return html`<${Login} reason=${link.reason} />`;
  return html`<nav class="side ${menu ? "opened" : ""}" aria-label="Pages">
      <a class="brand" href="#/">miniray</a><button type="button" class="menu" aria-expanded=${menu} onClick=${() => setMenu(!menu)}>Menu</button>
      <div class="entries">${NAVIGATION.map(([group, entries]) => html`<div key=${group}>${group && html`<h2>${group}</h2>`}${entries.map(([name, text]) => html`<a key=${name} href="#/${name}" aria-current=${name === current ? "page" : undefined}>${text}</a>`)}</div>`)}
        <div class="foot"><span class="link ${link.state}" role="status">${LINKS[link.state]}</span><${Theme} /><button type="button" class="quiet" onClick=${() => setHelp(true)}>Keys ?</button></div></div>
    </nav>
    <main>${link.state === "lost" && html`<div class="problem" role="alert">${link.reason || "The connection to the cluster's page is lost: what is shown is from before. It is tried again."}</div>`}${page(at)}</main>
    ${help && html`<div class="veil" onClick=${() => setHelp(false)}><div class="card help" role="dialog" aria-label="Keys"><h2>Keys</h2><dl>${KEYS.map(([keys, what]) => html`<div key=${keys}><dt><kbd>${keys}</kbd></dt><dd>${what}</dd></div>`)}</dl></div></div>`}`;
}

/** Take the code out of the address, so that no history keeps it, and exchange it. */
function enterByAddress() {
  const code = /^#k=(.+)$/.exec(location.hash)?.[1];
  if (!code) return false;
  history.replaceState(null, "", `${location.pathname}${location.search}#/`);
  login(decoded(code)).then(start);
  return true;
}

function start() {
  const root = document.getElementById("app");
  if (!root.dataset.started) root.replaceChildren();
  root.dataset.started = "1";
  render(html`<${App} />`, root);
}

dress(stored());
if (!enterByAddress()) start();
