// A flame graph on a canvas: search, zoom by click and keyboard. Imports nothing, so that a saved
// HTML file can contain it as it is. Its colours are the page's where that has any.

const ROW = 19;
const FONT = "11.5px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

const UNITS = {
  seconds: (v) => (v < 1 ? `${Math.round(1000 * v)} ms` : `${v.toFixed(2)} s`),
  bytes: (v) => {
    const names = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    for (; Math.abs(v) >= 1024 && at < 4; at++) v /= 1024;
    return `${at ? v.toFixed(1) : Math.round(v)} ${names[at]}`;
  },
  samples: (v) => `${Math.round(v).toLocaleString("en-US")} samples`,
};

/** The frames of a tree, each with its place in the whole (0..1), its depth and its own value. */
function laidOut(root) {
  const frames = [];
  const whole = root.value || 1;
  const stack = [[root, 0, 0, null]];
  while (stack.length) {
    const [node, from, depth, parent] = stack.pop();
    const children = [...(node.children ?? [])].sort((a, b) => b.value - a.value);
    const inner = children.reduce((sum, child) => sum + child.value, 0);
    const frame = { name: String(node.name), value: node.value, own: Math.max(0, node.value - inner), from, to: from + node.value / whole, depth, parent, children: [] };
    parent?.children.push(frame);
    frames.push(frame);
    let at = from;
    const next = [];
    for (const child of children) {
      next.push([child, at, depth + 1, frame]);
      at += child.value / whole;
    }
    stack.push(...next.reverse());
  }
  return frames;
}

const HUES = [28, 205, 48, 165, 12, 255, 95, 335, 225];

/** A colour by the file of a frame, so that what belongs together looks alike. */
function tone(name, dark) {
  const file = /\(([^():]*)/.exec(name)?.[1] || name;
  let hash = 2166136261;
  for (const letter of file) hash = Math.imul(hash ^ letter.codePointAt(0), 16777619);
  hash >>>= 0;
  const shade = (hash >>> 8) % 6;
  return dark ? `hsl(${HUES[hash % 9]} ${22 + 2 * shade}% ${29 + shade}%)` : `hsl(${HUES[hash % 9]} ${36 + 3 * shade}% ${85 - shade}%)`;
}

// A style sheet that a strict content security policy allows, and that a saved file has too.
const sheet = new CSSStyleSheet();
sheet.replaceSync(`
.flame { display: flex; flex-direction: column; gap: 8px; min-width: 0; }
.flame-bar { display: flex; gap: 10px; align-items: center; flex-wrap: wrap; }
.flame-bar input { width: 240px; max-width: 100%; }
.flame-scroll { overflow: hidden auto; max-height: 70vh; }
.flame canvas { display: block; width: 100%; cursor: pointer; }
.flame-found, .flame-status { color: var(--dim, GrayText); font-size: 12px; overflow-wrap: anywhere; }
.flame-status { min-height: 18px; font-family: var(--mono, monospace); }
.flame-hottest { list-style: none; display: grid; gap: 1px; font-size: 12px; margin: 0; padding: 0; }
.flame-hottest:not(:empty)::before { content: "Most by itself"; font-weight: 600; }
.flame-hottest li { display: flex; gap: 12px; min-width: 0; }
.flame-hottest span { flex: 0 0 130px; color: var(--dim, GrayText); font-variant-numeric: tabular-nums; }
.flame-hottest button { border: 0; background: none; color: inherit; cursor: pointer; padding: 0; font: 12px/18px var(--mono, monospace); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; text-align: left; }
`);
document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];

const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

/**
 * Draw a tree of {name, value, children} into an element.
 *
 * `unit` is "seconds", "bytes" or "samples". Returns {remove}.
 */
export function flameGraph(element, tree, unit = "seconds") {
  const show = UNITS[unit] ?? UNITS.samples;
  const frames = laidOut(tree);
  const root = frames[0];
  const deepest = frames.reduce((most, frame) => Math.max(most, frame.depth), 0);
  let zoomed = root;
  let chosen = null;
  let pattern = "";

  element.classList.add("flame");
  const field = make("input", { type: "search", placeholder: "Search frames", spellcheck: false });
  field.setAttribute("aria-label", "Search frames");
  const found = make("span", { className: "flame-found" });
  const reset = make("button", { type: "button", textContent: "Show all", hidden: true });
  const canvas = make("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Flame graph. Arrow keys move, enter zooms, escape shows all.");
  const status = make("div", { className: "flame-status" });
  status.setAttribute("aria-live", "polite");
  const scroller = make("div", { className: "flame-scroll" }, canvas);
  const hottest = make("ol", { className: "flame-hottest" });
  element.replaceChildren(make("div", { className: "flame-bar" }, field, found, reset), scroller, status, hottest);

  const matches = (frame) => pattern && frame.name.toLowerCase().includes(pattern);
  const style = (name, otherwise) => getComputedStyle(element).getPropertyValue(name).trim() || otherwise;
  const x = (place, width) => ((place - zoomed.from) / (zoomed.to - zoomed.from || 1)) * width;
  const within = (frame, outer) => frame.from >= outer.from - 1e-12 && frame.to <= outer.to + 1e-12;
  const visible = (frame) => (frame.depth < zoomed.depth ? within(zoomed, frame) : within(frame, zoomed));

  function describe(frame) {
    if (!frame) return void (status.textContent = `${show(root.value)} in all. Click a frame, or choose it with the arrow keys and press enter, to zoom.`);
    const share = ((100 * frame.value) / (root.value || 1)).toFixed(1);
    status.textContent = `${frame.name} — ${show(frame.value)}, ${share} %${frame.own ? `; itself ${show(frame.own)}` : ""}`;
  }

  function draw() {
    const width = scroller.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    const height = (deepest + 1) * ROW;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    const c = canvas.getContext("2d");
    c.scale(scale, scale);
    c.font = FONT;
    c.textBaseline = "middle";
    const dark = style("--dark", matchMedia("(prefers-color-scheme: dark)").matches ? "1" : "0") === "1";
    const ink = dark ? "#f0f2f5" : "#1d232c";
    const letter = c.measureText("m").width;
    for (const frame of frames) {
      if (!visible(frame)) continue;
      const left = Math.max(0, x(frame.from, width));
      const wide = Math.min(width, x(frame.to, width)) - left;
      if (wide < 0.4) continue;
      const top = frame.depth * ROW;
      const faint = frame.depth < zoomed.depth || (pattern && !matches(frame));
      c.globalAlpha = faint ? 0.4 : 1;
      c.fillStyle = matches(frame) ? style("--accent", "#2459c4") : frame === root ? (dark ? "#39414c" : "#d6dae1") : tone(frame.name, dark);
      c.fillRect(left, top, Math.max(0.6, wide - 0.6), ROW - 1);
      const room = Math.floor((wide - 8) / letter);
      if (room > 2) {
        c.fillStyle = matches(frame) ? style("--on-accent", "#fff") : frame === root ? (dark ? "#dde3ea" : "#1c2430") : ink;
        c.fillText(frame.name.length > room ? `${frame.name.slice(0, room - 1)}…` : frame.name, left + 4, top + ROW / 2);
      }
      c.globalAlpha = 1;
      if (frame === chosen) {
        c.strokeStyle = style("--text", dark ? "#fff" : "#000");
        c.lineWidth = 1.5;
        c.strokeRect(left + 0.75, top + 0.75, Math.max(1, wide - 1.5), ROW - 2.5);
      }
    }
    reset.hidden = zoomed === root;
  }

  function zoom(frame) {
    zoomed = frame;
    draw();
  }
  function choose(frame) {
    if (!frame) return;
    chosen = frame;
    if (!visible(frame)) zoomed = frame;
    const top = frame.depth * ROW;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    if (top + ROW > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + ROW - scroller.clientHeight;
    describe(frame);
    draw();
  }
  function at(event) {
    const box = canvas.getBoundingClientRect();
    const place = zoomed.from + ((event.clientX - box.left) / box.width) * (zoomed.to - zoomed.from);
    const depth = Math.floor((event.clientY - box.top) / ROW);
    return frames.find((frame) => frame.depth === depth && frame.from <= place && place < frame.to) ?? null;
  }
  function search(text) {
    pattern = text.trim().toLowerCase();
    let sum = 0;
    const count = (frame) => {
      if (matches(frame)) sum += frame.value;
      else frame.children.forEach(count);
    };
    if (pattern) count(root);
    found.textContent = pattern ? `${((100 * sum) / (root.value || 1)).toFixed(1)} % in frames that match` : "";
    draw();
  }

  canvas.addEventListener("mousemove", (event) => {
    const frame = at(event);
    if (frame !== chosen) {
      chosen = frame;
      describe(frame);
      draw();
    }
  });
  canvas.addEventListener("click", (event) => {
    const frame = at(event);
    if (frame) zoom(frame);
  });
  canvas.addEventListener("keydown", (event) => {
    const now = chosen ?? zoomed;
    const beside = now.parent?.children ?? [];
    const moves = {
      ArrowUp: () => choose(now.parent),
      ArrowDown: () => choose(now.children[0]),
      ArrowLeft: () => choose(beside[beside.indexOf(now) - 1]),
      ArrowRight: () => choose(beside[beside.indexOf(now) + 1]),
      Enter: () => zoom(now),
      Escape: () => zoom(root),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    moves[event.key]();
  });
  field.addEventListener("input", () => search(field.value));
  reset.addEventListener("click", () => zoom(root));

  const own = new Map();
  for (const frame of frames) if (frame !== root && frame.own > 0) own.set(frame.name, (own.get(frame.name) ?? 0) + frame.own);
  for (const [name, value] of [...own].sort((a, b) => b[1] - a[1]).slice(0, 8)) {
    const button = make("button", { type: "button", textContent: name, title: name });
    button.addEventListener("click", () => search((field.value = name)));
    hottest.append(make("li", {}, make("span", { textContent: `${show(value)}, ${((100 * value) / (root.value || 1)).toFixed(1)} %` }), button));
  }

  const watch = new ResizeObserver(draw);
  watch.observe(scroller);
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", draw);
  addEventListener("theme", draw);
  describe(null);
  return {
    remove() {
      watch.disconnect();
      media.removeEventListener("change", draw);
      removeEventListener("theme", draw);
      element.replaceChildren();
    },
  };
}
