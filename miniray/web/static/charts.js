// Charts by uPlot, which is loaded when the first chart is drawn.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { clock, inUnit, number } from "./parts.js";

let loading = null;
const uplot = () =>
  (loading ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = "static/vendor/uPlot.iife.min.js";
    script.onload = () => done(window.uPlot);
    script.onerror = () => failed(new Error("static/vendor/uPlot.iife.min.js can't be loaded"));
    const style = document.createElement("link");
    style.rel = "stylesheet";
    style.href = "static/vendor/uPlot.min.css";
    document.head.append(style, script);
  }));

/** What marks of an axis of steps are apart by. */
const WHOLE = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));
/** The same of bytes, which are shown in KiB, MiB and so on. */
const DOUBLED = [...Array(60).keys()].map((power) => 2 ** power);
const newest = (values) => values.findLast((v) => v !== null);
const HUES = [215, 25, 150, 320, 45, 265, 0, 185];
const dark = () => getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
/** The colour of the n-th line of a chart. */
export const colour = (n) => `hsl(${HUES[n % HUES.length]} ${n < HUES.length ? 65 : 30}% ${dark() ? 66 : 44}%)`;

/** Draw again when the colours of the page change. */
export function useTheme() {
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const change = () => setTheme((n) => n + 1);
    const media = matchMedia("(prefers-color-scheme: dark)");
    media.addEventListener("change", change);
    addEventListener("theme", change);
    return () => {
      media.removeEventListener("change", change);
      removeEventListener("theme", change);
    };
  }, []);
  return theme;
}

/**
 * A chart of lines over one x: `lines` are [{name, values}], gaps are null.
 * `time`: x is seconds since the epoch.
 */
export function Chart({ title, x, lines, unit = "count", time = false, height = 150, xName = "step" }) {
  const place = useRef(null);
  const chart = useRef(null);
  const caption = useRef(null);
  const tell = useRef(null);
  const alone = lines.length === 1;
  const theme = useTheme();
  const names = lines.map((line) => line.name).join("\n");
  const show = inUnit(unit);

  useEffect(() => {
    let gone = false;
    const style = getComputedStyle(document.documentElement);
    const axis = {
      stroke: style.getPropertyValue("--dim"), font: "11px system-ui, sans-serif",
      grid: { stroke: style.getPropertyValue("--line"), width: 1 }, ticks: { show: false },
    };
    const where = (v) => (time ? clock(v) : number(v));
    const told = () => {
      const plot = chart.current;
      const { idx } = plot.cursor;
      const [all, values] = plot.data;
      return idx == null ? show(newest(values)) : `${time ? "" : `${xName} `}${where(all[idx])}: ${show(values[idx])}`;
    };
    const options = {
      width: place.current.clientWidth || 300, height,
      scales: { x: { time }, y: { range: (_, low, high) => spread(low, high, unit) } },
      axes: [{ ...axis, size: 24, space: 60, ...(time ? { values: (_, all) => all.map((at) => clock(at).slice(-8, all.at(-1) - all[0] < 600 ? undefined : -3)) } : { incrs: WHOLE }) }, { ...axis, size: 62, space: 32, values: (_, all) => all.map(show), ...(unit.startsWith("bytes") ? { incrs: DOUBLED } : {}) }],
      cursor: { y: false, points: { size: 5 } },
      legend: { show: !alone },
      hooks: { setCursor: [tell.current = () => alone && chart.current && (caption.current.textContent = told())] },
      series: [
        { label: time ? "time" : xName, value: (plot, v, n, at) => where(at == null ? plot.data[0].at(-1) : v) },
        ...lines.map((line, n) => ({ label: line.name, stroke: colour(n), width: 1.5, spanGaps: !time, value: (plot, v, n, at) => show(at == null ? newest(plot.data[n]) : v), points: { show: x.length < 3 } })),
      ],
    };
    uplot().then((Plot) => {
      if (gone) return;
      chart.current = new Plot(options, [x, ...lines.map((line) => line.values)], place.current);
      tell.current();
    }, () => {});
    const watch = new ResizeObserver(() => chart.current?.setSize({ width: place.current.clientWidth, height }));
    watch.observe(place.current);
    return () => {
      gone = true;
      watch.disconnect();
      chart.current?.destroy();
      chart.current = null;
    };
  }, [names, unit, height, theme, x.length < 3]);
  useEffect(() => {
    chart.current?.setData([x, ...lines.map((line) => line.values)]);
    tell.current?.();
  }, [x, lines]);
  return html`<figure class="chart"><figcaption><b>${title}</b><span ref=${caption} /></figcaption><div ref=${place} /></figure>`;
}

/** The range of y: from 0 where that loses little, and never of no height. */
function spread(low, high, unit) {
  if (low === null || (low === 0 && high === 0)) return [0, unit.startsWith("bytes") ? 1024 : 1];
  if (unit === "ratio") return [0, Math.max(1, high)];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low < high / 2 ? 0 : low - room, high + room];
}
