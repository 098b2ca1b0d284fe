"use strict";
// What the run's files say becomes text nodes, never HTML.

const WORDS = {
  en: {
    loss: "Loss", lr: "Rate", grad_norm: "Gradient norm", tokens_per_s: "Tokens per second",
    memory: "Peak memory, GiB (largest rank)", evaluations: "Evaluations", events: "Events", quarantine: "Skipped samples",
    none: "None.", running: "running", finished: "finished", quiet: "quiet", starting: "starting", step: "step",
    left: t => `${t} left`, last: t => `last line ${t} ago`, taken: t => `As of ${t}.`, thinned: n => `Every ${n}th step is shown.`,
    leftOut: n => `Updates left out (points): ${n}.`, unreadable: n => `Lines that cannot be read: ${n}.`, name: "name",
    rows: (n, all) => n < all ? `The last ${n} of ${all}` : `${all} in all`, unreached: "litchi watch does not answer; still trying.",
    otherLanguage: "中文: switch to Chinese",
  },
  zh: {
    loss: "损失", lr: "学习率", grad_norm: "梯度范数", tokens_per_s: "每秒词元数",
    memory: "显存/内存峰值，GiB（最大的进程）", evaluations: "评测", events: "事件", quarantine: "跳过的样本",
    none: "无。", running: "运行中", finished: "已完成", quiet: "无输出", starting: "启动中", step: "步",
    left: t => `剩余 ${t}`, last: t => `上一行在 ${t} 前`, taken: t => `截至 ${t}。`, thinned: n => `每 ${n} 步显示一步。`,
    leftOut: n => `${n} 次更新被略过（圆点）`, unreadable: n => `${n} 行无法读取`, name: "名称",
    rows: (n, all) => n < all ? `共 ${all} 条，最后 ${n} 条` : `共 ${all} 条`, unreached: "litchi watch 没有应答，仍在尝试。",
    otherLanguage: "English: 切换到英文",
  },
};
const FILES = ["metrics", "eval", "events", "quarantine"];
const ROWS = 200, POINTS = 600, EVERY_MS = 2000;
const at = id => document.getElementById(id);
const known = Object.fromEntries(FILES.map(name => [name, []]));
let language = "en", head = {};

function make(name, className, ...inside) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...inside);
  return node;
}
function svg(name, facts, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in facts) node.setAttribute(key, facts[key]);
  if (text !== undefined) node.textContent = text;
  return node;
}
const say = name => WORDS[language][name];
const number = value => typeof value !== "number" ? String(value)
  : value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e6) ? value.toExponential(3) : String(+value.toPrecision(5));
function span(seconds) {
  const s = Math.round(seconds), two = n => String(n).padStart(2, "0");
  return s < 60 ? `${s} s` : s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)} min` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)} h`;
}

// ---- Plots

// A long run is drawn by the mean, the least and the most of so many steps.
function thin(points) {
  const size = Math.ceil(points.length / POINTS), out = [];
  for (let i = 0; i < points.length; i += size) {
    const part = points.slice(i, i + size), values = part.map(p => p[1]);
    out.push([part[part.length - 1][0], values.reduce((a, b) => a + b) / values.length, Math.min(...values), Math.max(...values)]);
  }
  return out;
}
function smooth(points) {
  const weight = Math.min(0.9, points.length / 100);
  let mean = points[0][1];
  return points.map(p => [p[0], mean = weight * mean + (1 - weight) * p[1]]);
}
function plot(title, points, leftOut, smoothed) {
  const W = 400, H = 200, L = 56, B = 24, T = 10, R = 10;
  const drawn = thin(points), last = points[points.length - 1];
  let low = Math.min(...drawn.map(p => p[2])), high = Math.max(...drawn.map(p => p[3]));
  if (low === high) { low -= Math.abs(low) * 0.05 || 1; high += Math.abs(high) * 0.05 || 1; }
  const first = drawn[0][0], end = Math.max(last[0], first + 1);
  const x = step => L + (step - first) / (end - first) * (W - L - R), y = value => H - B - (value - low) / (high - low) * (H - B - T);
  const line = list => list.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}: ${number(last[1])} (${say("step")} ${last[0]})` });
  for (const value of [low, (low + high) / 2, high]) {
    picture.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { x: L - 6, y: y(value) + 4, "text-anchor": "end" }, String(number(+value.toPrecision(3)))));
  }
  picture.append(svg("text", { x: L, y: H - 6 }, String(first)), svg("text", { x: W - R, y: H - 6, "text-anchor": "end" }, String(last[0])));
  if (smoothed) picture.append(svg("polyline", { class: "raw", points: line(drawn) }));
  picture.append(svg("polyline", { class: "curve", points: line(smoothed ? smooth(drawn) : drawn) }));
  for (const step of leftOut) picture.append(svg("circle", { class: "left-out", cx: x(step), cy: H - B, r: 3 }));
  return make("figure", "card", make("figcaption", "", make("strong", "", title), ` ${number(last[1])}`), picture);
}

// ---- The page

function table(records, names) {
  const cell = value => typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value);
  return make("table", "", make("thead", "", make("tr", "", ...names.map(name => make("th", "", name)))),
    make("tbody", "", ...records.map(r => make("tr", "", ...names.map(name => make("td", "", r[name] === undefined ? "" : cell(r[name])))))));
}
function listed(id, records, names) {
  const shown = records.slice(-ROWS).reverse();
  at(id).replaceChildren(...(shown.length ? [make("p", "quiet", say("rows")(shown.length, records.length)), table(shown, names)] : [say("none")]));
}
function total() {
  if (head.steps) return head.steps;
  const second = known.metrics.find(r => r.epoch >= 1);  // its step says how long an epoch is
  return head.epochs && second ? Math.round(head.epochs * (second.step - 1) / second.epoch) : null;
}
function show() {
  const steps = known.metrics.filter(r => Number.isFinite(r.step)), last = steps[steps.length - 1], all = total();
  at("name").textContent = head.name || "";
  document.title = `${head.name} · Litchi`;
  const parts = [say(head.state)];
  if (last) parts.push(`${say("step")} ${last.step}${all ? ` / ${all}` : ""}`);
  if (last && all && head.state !== "finished") {
    const lately = steps.slice(-50), mean = lately.reduce((sum, r) => sum + r.step_s + (r.data_wait_s || 0), 0) / lately.length;
    if (all > last.step) parts.push(say("left")(span(mean * (all - last.step))));
  }
  if (head.state === "quiet") parts.push(say("last")(span(head.quiet_s)));
  at("progress-text").textContent = parts.join(" · ");
  at("progress").value = head.state === "finished" ? 1 : last && all ? last.step / all : 0;
  const leftOut = steps.filter(r => r.skipped).map(r => r.step);
  const unreadable = FILES.reduce((n, name) => n + known[name].filter(r => r.unreadable !== undefined).length, 0);
  at("note").textContent = [head.taken && say("taken")(head.taken), head.every && say("thinned")(head.every),
    leftOut.length && say("leftOut")(leftOut.length), unreadable && say("unreadable")(unreadable)].filter(Boolean).join(" ");
  const of = { memory: r => Math.max(...(r.peak_bytes || [])) / 2 ** 30 };
  at("plots").replaceChildren(...["loss", "lr", "grad_norm", "tokens_per_s", "memory"].flatMap(name => {
    const points = steps.map(r => [r.step, (of[name] || (s => s[name]))(r)]).filter(p => Number.isFinite(p[1]));
    return points.length ? [plot(say(name), points, name === "loss" ? leftOut : [], name === "loss")] : [];
  }));
  const metrics = [...new Set(known.eval.flatMap(r => Object.keys(r.metrics || {})))];
  const rows = known.eval.filter(r => r.metrics).map(r => ({ [say("step")]: r.step, [say("name")]: r.name, ...r.metrics }));
  listed("evaluations", rows, [say("step"), say("name"), ...metrics]);
  listed("events", known.events.map(({ event, step, decided, ...facts }) => ({ step, event, facts: Object.entries(facts)
    .map(([k, v]) => `${k}=${typeof v === "string" ? v : JSON.stringify(v)}`).join("  ") })), ["step", "event", "facts"]);
  listed("quarantine", known.quarantine, [...new Set(["file", "line", "reason", ...known.quarantine.flatMap(Object.keys)])]);
}
function add(data) {
  head = data;
  for (const name of FILES) {
    if (data[name].anew) known[name] = [];
    for (const record of data[name].records) known[name].push(record);
  }
}
function setLanguage(chosen) {
  language = chosen;
  document.documentElement.lang = chosen === "zh" ? "zh-CN" : "en";
  for (const node of document.querySelectorAll("[data-say]")) node.textContent = say(node.dataset.say);
  at("language").textContent = chosen === "zh" ? "English" : "中文";
  at("language").setAttribute("aria-label", say("otherLanguage"));
  if (head.state) show();
}
async function poll() {
  let more = false;
  try {
    const marks = new URLSearchParams(FILES.map(name => [name, head[name] ? head[name].mark : ""]));
    const reply = await fetch(`data?${marks}`);
    if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
    const data = await reply.json();
    const changed = !head.state || data.state !== head.state || data.state === "quiet" || FILES.some(n => data[n].anew || data[n].records.length);
    more = data.more;
    add(data);
    at("problem").hidden = true;
    if (changed && !more) show();
  } catch {
    at("problem").hidden = false;
    at("problem").textContent = say("unreached");
  }
  setTimeout(poll, more ? 0 : EVERY_MS);
}

function remembered() {
  try { return localStorage.getItem("language"); } catch { return null; }
}
at("language").addEventListener("click", () => {
  const other = language === "zh" ? "en" : "zh";
  try { localStorage.setItem("language", other); } catch { /* storage is switched off: not remembered */ }
  setLanguage(other);
});
if (at("data")) add(JSON.parse(at("data").textContent));
setLanguage(remembered() || ((navigator.language || "").startsWith("zh") ? "zh" : "en"));
if (!at("data")) poll();
