"use strict";
// R: the report. This file unpacks the data, and has what all panes use: elements, numbers as text, colours, tips.
const R = { panes: {}, chosen: null, tab: null };

// Okabe and Ito's colours, then some of Tol's: people with the common kinds of colour blindness tell them apart. Grey stands for replicated
// and for the rest; wherever a colour means a layout, its text stands beside it.
R.PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#882255", "#44AA99", "#999933", "#332288"];
R.GREY = "#8b929a";
R.MOVE = "#D55E00";
// Samples of viridis, which grows in lightness: it reads in grey too.
R.VIRIDIS = [[68, 1, 84], [70, 50, 127], [54, 92, 141], [39, 127, 142], [31, 161, 135], [74, 194, 109], [159, 218, 58], [253, 231, 37]];

R.fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
};
R.el = (tag, attributes, ...children) => R.fill(document.createElement(tag), attributes, children);
R.svg = (tag, attributes, ...children) => R.fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
R.get = (id) => document.getElementById(id);

R.unpack = async () => {
  const packed = Uint8Array.from(atob(R.get("data").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

// Numbers as text, as in fxshard's tables: three or four digits and a unit.
R.bytes = (size) => {
  for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) {
    const value = size / factor;
    if (Math.abs(value) >= 0.9995) return `${value.toFixed(Math.abs(value) < 9.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0)} ${unit}`;
  }
  return size === 1 ? "1 byte" : `${Math.round(size)} bytes`;
};
R.time = (us) => {
  for (const [unit, factor] of [["s", 1e6], ["ms", 1e3]]) {
    if (Math.abs(us) >= 0.99995 * factor) return `${Number((us / factor).toPrecision(4)).toLocaleString("en")} ${unit}`;
  }
  return Math.abs(us) >= 1e-6 ? `${Number(us.toPrecision(4))} us` : "0 us";
};
R.cost = (value) => (R.data.unit === "bytes" ? R.bytes(value) : R.time(value));
R.percent = (part) => `${(100 * part).toFixed(part < 0.0995 ? 1 : 0)} %`;
R.shape = (shape) => (shape.length ? `[${shape.map((s) => (s < 0 ? "?" : s)).join(", ")}]` : "scalar");
R.plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// aten.mul.Tensor -> mul
R.short = (op) => {
  const parts = op.split(".");
  return parts.length > 1 ? parts[1] : op;
};

R.css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

R.viridis = (part) => {
  const at = Math.max(0, Math.min(1, part)) * (R.VIRIDIS.length - 1);
  const k = Math.min(R.VIRIDIS.length - 2, Math.floor(at));
  const [a, b] = [R.VIRIDIS[k], R.VIRIDIS[k + 1]];
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * (at - k))).join(",")})`;
};
// Black or white, whichever is legible on a colour.
R.ink = (colour) => {
  const hex = colour.match(/^#(..)(..)(..)$/);
  const [r, g, b] = hex ? hex.slice(1).map((v) => parseInt(v, 16)) : colour.match(/[\d.]+/g).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#111" : "#fff";
};

R.prepare = (data) => {
  R.data = data;
  const g = data.graph;
  R.layoutText = g.layouts.map((placements) => placements.join(""));
  R.nodes = g.nodes.map(([name, user, kind, op, module, back, outs, ins, cost, line], k) => ({
    k, name, user, kind, op: g.ops[op], module: g.modules[module], back, outs, ins, cost, line: g.lines[line], readers: [], moves: [], moved: 0,
  }));
  R.nodes.forEach((node) => node.ins.forEach(([from, output], operand) => {
    if (from >= 0) R.nodes[from].readers.push({ node: node.k, operand, output });
  }));
  R.moves = g.redistributions.map(([node, output, source, target, steps, cost, hidden, readers], k) => ({
    k, node, output, source, target, steps, cost, hidden, readers, sent: steps.reduce((sum, s) => sum + s[2], 0),
  }));
  R.moveOf = new Map();
  R.moves.forEach((move) => {
    if (move.node >= 0) {
      R.nodes[move.node].moves.push(move);
      R.nodes[move.node].moved += move.cost;
    }
    move.readers.forEach(([node, operand]) => {
      R.moveOf.set(`${node}:${operand}`, move);
      // a plan without edges knows those of its redistributions
      if (!g.edges && move.node >= 0 && node >= 0) {
        R.nodes[move.node].readers.push({ node, operand, output: move.output });
        R.nodes[node].ins[operand][0] = move.node;
        R.nodes[node].ins[operand][1] = move.output;
      }
    });
  });
  R.cuts = new Map(g.pictures.map(([shape, layout, cuts]) => [`${shape},${layout}`, cuts]));
  R.answers = new Map(data.answers.map((one) => [one.node, one]));
  R.layoutColours = R.coloursOf();
};

// The most frequent layouts have colours of their own.
R.coloursOf = () => {
  const counts = R.layoutText.map(() => 0);
  R.nodes.forEach((node) => node.outs.forEach((out) => (counts[out[1]] += 1)));
  const whole = (k) => R.data.graph.layouts[k].every((p) => p === "R");
  const ranked = counts.map((count, k) => k).filter((k) => counts[k] && !whole(k)).sort((a, b) => counts[b] - counts[a]);
  const colours = R.layoutText.map(() => R.GREY);
  ranked.slice(0, R.PALETTE.length).forEach((k, i) => (colours[k] = R.PALETTE[i]));
  R.layoutLegend = [...ranked.slice(0, R.PALETTE.length), ...counts.map((c, k) => k).filter((k) => counts[k] && whole(k))];
  R.otherLayouts = ranked.length - Math.min(ranked.length, R.PALETTE.length);
  return colours;
};

R.layoutTag = (layout) => {
  const colour = R.layoutColours[layout];
  return R.el("span", { class: "tag", style: `background:${colour};color:${R.ink(colour)}` }, R.layoutText[layout]);
};
// A layout with the names of its axes: S(0) on dp, R on tp.
R.layoutWords = (layout) => R.data.graph.layouts[layout].map((p, i) => `${R.data.mesh.axes[i]}: ${p}`).join(", ");

R.steps = (move) => move.steps.map(([kind, axis]) => `${kind.replaceAll("_", "-")} on ${R.data.mesh.axes[axis]}`).join(", then ") || "local";

R.tip = (event, content) => {
  const tip = R.get("tip");
  tip.replaceChildren(...[content].flat());
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(4, event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18)}px`;
};
R.noTip = () => (R.get("tip").hidden = true);

R.nodeLink = (k, text) => {
  if (k < 0) return R.el("span", {}, text || "unknown");
  const node = R.nodes[k];
  return R.el("a", { href: "#", class: "node-link", onclick: (e) => { e.preventDefault(); R.choose(k); } }, text || node.user);
};

R.missing = (pane) => R.el("p", { class: "missing" }, R.data.missing[pane] || "The report was made without this part.");
