// Looking into a process, a rank or a whole run: stacks, CPU and memory flame graphs, logs.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { get, post, usePolled } from "./live.js";
import { flameGraph } from "./flame.js";
import { Command, Empty, Problem } from "./parts.js";

const SECONDS = 5;

/** The one flame graph component, on this page. */
export function Flame({ tree, unit }) {
  const place = useRef(null);
  useEffect(() => {
    const graph = flameGraph(place.current, tree, unit);
    return () => graph.remove();
  }, [tree, unit]);
  return html`<div ref=${place} />`;
}

/** Frames as Python prints them: the innermost last. */
export const Frames = ({ of }) => html`<ol class="frames">${of.map((frame, n) => html`<li key=${n} class=${n === of.length - 1 ? "last" : ""}>${frame}</li>`)}</ol>`;

function Stacks({ answer }) {
  if (!answer.groups?.length) return html`<${Empty}>No thread of it runs Python code now.<//>`;
  return html`<div class="stacks">${answer.groups.map((group, n) => html`<section key=${n}><h3>${group.who.join(", ")}${group.who.length > 1 && html` <span class="dim">· ${group.who.length} have this stack</span>`}</h3>${group.stack.length ? html`<${Frames} of=${group.stack} />` : html`<p class="dim">waits for work</p>`}</section>`)}</div>`;
}

const WAYS = {
  stack: { title: "Stack trace", path: "stack", body: {}, busy: "Asking for the stack" },
  cpu: { title: "CPU flame graph", path: "profile", body: { kind: "cpu", seconds: SECONDS }, unit: "seconds", busy: `Sampling for ${SECONDS} s` },
  memory: { title: "Memory flame graph", path: "profile", body: { kind: "memory", seconds: SECONDS }, unit: "bytes", busy: `Recording allocations for ${SECONDS} s` },
};

/** Buttons that look into what `of` ({of, rank?}) names, and what they found. `live`: it can be asked; else `ended` says why not. */
export function Inspect({ of, live = true, ended = "It has ended: stacks and profiles are of processes that live.", why }) {
  const [shown, setShown] = useState(null);
  const turn = useRef(0);
  const ask = async (kind) => {
    const way = WAYS[kind];
    const own = ++turn.current;
    setShown({ kind, busy: true });
    const next = await post(way.path, { ...of, ...way.body }).then((answer) => ({ kind, answer }), (error) => ({ kind, error: error.message }));
    if (own === turn.current) setShown(next);
  };
  const way = shown && WAYS[shown.kind];
  const tree = shown?.answer?.tree;
  const notes = shown?.answer?.notes ?? [];
  return html`<div class="inspect">
    <div class="tools">${Object.entries(WAYS).map(([kind, { title }]) => html`<button type="button" key=${kind} disabled=${!live || shown?.busy} aria-pressed=${shown?.kind === kind} onClick=${() => ask(kind)}>${title}</button>`)}${why && html`<a class="button" href=${why}>Why does it wait?</a>`}
      ${!live && html`<span class="dim">${ended}</span>`}</div>
    <${Problem} of=${shown?.error} />
    ${shown?.busy && html`<div class="busy" role="status">${way.busy}<i class=${shown.kind === "stack" ? "" : "long"} /></div>`}
    ${shown?.answer && html`<section class="found"><header><h2>${way.title}</h2><span class="dim">${shown.answer.way && `by ${shown.answer.way}`}</span><button type="button" class="quiet" onClick=${() => ask(shown.kind)}>again</button><button type="button" class="quiet" onClick=${() => setShown(null)}>close</button></header>
      ${notes.map((note) => html`<p class="note" key=${note}>${note}</p>`)}
      ${shown.kind === "stack" ? html`<${Stacks} answer=${shown.answer} />` : tree?.value ? html`<${Flame} tree=${tree} unit=${shown.answer.unit ?? way.unit} />` : !notes.length && html`<${Empty}>${shown.kind === "cpu" ? `It used no CPU in these ${SECONDS} s.` : `It allocated nothing in these ${SECONDS} s.`}<//>`}
    </section>`}
  </div>`;
}

const LEVEL = /\b(error|exception|traceback|critical|fatal)\b/i;

/** The last lines of a log, renewed while it can be seen. `choices`: [{name, of}] where there are several; `live`: more may come. */
export function Logs({ of, choices, live = true }) {
  const [chosen, setChosen] = useState(0);
  const [grep, setGrep] = useState("");
  const [follow, setFollow] = useState(true);
  const box = useRef(null);
  const asked = choices?.[chosen]?.of ?? of;
  const { value, error } = usePolled(() => get("logs", { ...asked, tail: 400, grep }), follow ? 2 : 0, [JSON.stringify(asked), grep, follow]);
  const lines = value?.lines ?? [];
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines.length, lines.at(-1), follow]);
  return html`<div class="logs">
    <div class="tools">
      ${choices?.length > 1 && html`<select aria-label="Log of" onChange=${(event) => setChosen(Number(event.target.value))}>${choices.map((choice, n) => html`<option key=${n} value=${n}>${choice.name}</option>`)}</select>`}
      <input type="search" placeholder="Only lines with" aria-label="Only lines with" value=${grep} spellcheck=${false} onInput=${(event) => setGrep(event.target.value)} />
      <label><input type="checkbox" checked=${follow} onChange=${(event) => setFollow(event.target.checked)} /> follow</label>
      ${value?.more && html`<${Command} text=${value.more} />`}
    </div>
    <${Problem} of=${error} />
    ${lines.length ? html`<pre ref=${box} tabindex="0">${lines.map((line, n) => html`<span key=${n} class=${LEVEL.test(line) ? "bad" : ""}>${line}${"\n"}</span>`)}</pre>` : value && html`<${Empty}>${grep ? html`No line has “${grep}” in it.` : live ? "It has printed nothing yet. What a process prints appears here as it is written." : "It has printed nothing."}<//>`}
  </div>`;
}
