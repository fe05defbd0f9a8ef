"use strict";
// The pane of the graph: laid out by dagre, drawn as SVG; modules open and close; pan, zoom, and the keyboard.

R.view = { open: new Set(), half: "forward", colour: "layout", focus: null, x: 0, y: 0, scale: 1 };

R.panes.graph = {
  title: "Graph",
  make: (pane) => {
    const view = R.view;
    const choice = (name, key, options) => R.el("span", { class: "choice", role: "radiogroup", "aria-label": name }, options.map(([value, text]) =>
      R.el("button", { role: "radio", "data-choice": `${key}:${value}`, onclick: () => { view[key] = value; R.drawGraph(true); } }, text)));
    pane.append(
      R.el("div", { class: "bar" },
        R.data.train && R.data.graph.edges && choice("Half", "half", [["forward", "Forward"], ["backward", "Backward"]]),
        choice("Colour", "colour", [["layout", "By layout"], ["cost", "By cost"]]),
        R.el("button", { onclick: () => { view.open.clear(); R.drawGraph(true); } }, "Close all"),
        R.el("button", { onclick: () => R.fitGraph(), title: "0" }, "Fit"),
        R.el("span", { id: "legend" })),
      R.el("div", { id: "canvas", tabindex: 0, "aria-label": "Graph: arrow keys move, Enter opens a module or shows a node, Backspace closes" },
        R.svg("svg", { id: "drawing" })));
    if (!R.data.graph.edges) pane.prepend(R.missing("graph"));
    R.makePannable(R.get("canvas"));
    R.get("canvas").addEventListener("keydown", R.graphKey);
    R.drawGraph(true);
  },
  show: () => R.drawn && R.applyView(),
  redraw: () => R.drawGraph(false),
};

R.sizeOf = (item) => {
  const [first, second] = R.labelOf(item);
  const width = Math.max(8.4 * (first.length + (item.module ? 2 : 0)), 6.6 * second.length) + 24;
  return item.module ? { width: Math.max(120, width), height: 54 } : { width: Math.max(70, width), height: 40 };
};

R.labelOf = (item) => {
  const [first, second] = R.ownLabel(item);
  return [first, item.more ? `${second}, read by ${item.more} more` : second];
};

R.ownLabel = (item) => {
  if (item.module) return [`${item.module.name}`, R.moduleText(item.module, item.nodes)];
  const node = item.node;
  const out = node.outs[0];
  const name = node.kind ? node.user.slice(node.kind === "parameter" || node.kind === "buffer" ? node.user.lastIndexOf(".") + 1 : 0) : R.short(node.op);
  return [name, out ? `${R.layoutText[out[1]]} ${R.shape(R.data.graph.shapes[out[0]])}` : ""];
};

R.layOut = (seen) => {
  const g = new dagre.graphlib.Graph({ compound: true, multigraph: false });
  g.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 34, edgesep: 8, marginx: 20, marginy: 20 });
  g.setDefaultEdgeLabel(() => ({}));
  for (const cluster of seen.clusters) g.setNode(cluster.id, {});
  for (const item of seen.items.values()) g.setNode(item.id, R.sizeOf(item));
  const parent = (id, path) => path && g.hasNode(`m:${path}`) && g.setParent(id, `m:${path}`);
  for (const cluster of seen.clusters) parent(cluster.id, cluster.module.parent.path);
  for (const item of seen.items.values()) parent(item.id, item.parent);
  for (const edge of seen.edges) {
    const text = R.edgeText(edge);
    g.setEdge(edge.from, edge.to, text ? { width: 6.2 * text.length + 8, height: 16, labelpos: "c" } : {});
  }
  dagre.layout(g);
  return g;
};

R.edgeText = (edge) => {
  if (!edge.moves.size) return "";
  if (edge.moves.size > 1) return R.plural(edge.moves.size, "redistribution");
  const steps = [...edge.moves][0].steps, kinds = new Set(steps.map(([kind]) => kind.replaceAll("_", "-")));
  const axes = steps.map(([, axis]) => R.data.mesh.axes[axis]).join(", ");
  return kinds.size === 1 ? `${[...kinds][0]} ${axes}` : steps.length === 2 ? steps.map(([kind, axis]) => `${kind.replaceAll("_", "-")} ${R.data.mesh.axes[axis]}`).join(", ") : `${steps.length} collectives`;
};

// fit: show everything again; otherwise the view stays, and what has the focus stays where it is.
R.drawGraph = (fit) => {
  R.noTip();
  const view = R.view, seen = R.visible(view.open, view.half), g = R.layOut(seen);
  const before = R.drawn && view.focus && R.drawn.g.node(view.focus);
  R.drawn = { seen, g };
  if (!seen.items.has(view.focus) && !seen.clusters.some((c) => c.id === view.focus)) view.focus = null;
  R.most = Math.max(...[...seen.items.values()].map((item) => R.costOf(item.nodes)), 1e-12);
  const layer = R.svg("g", { id: "world" });
  for (const cluster of seen.clusters) layer.append(R.clusterShape(cluster, g.node(cluster.id)));
  for (const edge of seen.edges) layer.append(R.edgeShape(edge, g.edge(edge.from, edge.to)));
  for (const item of seen.items.values()) layer.append(R.itemShape(item, g.node(item.id)));
  R.get("drawing").replaceChildren(R.arrowHeads(), layer);
  document.querySelectorAll("[data-choice]").forEach((button) => {
    const [key, value] = button.dataset.choice.split(":");
    button.setAttribute("aria-checked", view[key] === value);
  });
  R.get("legend").replaceChildren(...R.legend());
  const after = view.focus && g.node(view.focus);
  if (!fit && before && after) {
    view.x += (before.x - after.x) * view.scale;
    view.y += (before.y - after.y) * view.scale;
  }
  if (fit) R.fitGraph();
  else R.applyView();
  R.markFocus();
};

R.arrowHeads = () => R.svg("defs", {}, [["arrow", "var(--line)"], ["arrow-move", R.MOVE]].map(([id, colour]) =>
  R.svg("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto" },
    R.svg("path", { d: "M0 0 L8 4 L0 8 z", style: `fill:${colour}` }))));

// Room for an open module's name above what it holds.
R.HEAD = 14;

R.clusterShape = (cluster, at) => {
  const [x, y] = [at.x - at.width / 2, at.y - at.height / 2 - R.HEAD];
  const toggle = () => R.toggle(cluster.module.path);
  return R.svg("g", { class: "cluster", "data-id": cluster.id },
    R.svg("rect", { x, y, width: at.width, height: at.height + R.HEAD, rx: 8 }),
    R.svg("g", { class: "cluster-name", onclick: toggle },
      R.svg("title", {}, "Close this module"),
      R.svg("rect", { x, y, width: 7.6 * R.clusterName(cluster.module).length + 34, height: 18, rx: 7 }),
      R.svg("text", { x: x + 10, y: y + 13 }, `▾ ${R.clusterName(cluster.module)}`)));
};

R.clusterName = (module) => (module.group ? module.name : module.path);

R.edgeShape = (edge, at) => {
  const move = edge.moves.size > 0;
  const sent = [...edge.moves].reduce((sum, m) => sum + m.sent, 0);
  const points = at.points;
  let d = `M${points[0].x} ${points[0].y}`;
  for (let i = 1; i < points.length - 1; i += 1) {
    const [p, q] = [points[i], points[i + 1]];
    const end = i === points.length - 2 ? q : { x: (p.x + q.x) / 2, y: (p.y + q.y) / 2 };
    d += ` Q${p.x} ${p.y} ${end.x} ${end.y}`;
  }
  const width = move ? Math.min(5, 1.5 + Math.log10(1 + sent / 1e5)) : 1.1;
  const shape = R.svg("g", { class: move ? "edge move" : "edge" },
    R.svg("path", { d, "stroke-width": width, "marker-end": move ? "url(#arrow-move)" : "url(#arrow)" }));
  if (move) {
    const text = R.edgeText(edge);
    shape.append(R.svg("rect", { class: "edge-back", x: at.x - 3.1 * text.length - 4, y: at.y - 8, width: 6.2 * text.length + 8, height: 16, rx: 4 }),
      R.svg("text", { x: at.x, y: at.y + 4 }, text));
    shape.addEventListener("mousemove", (e) => R.tip(e, R.edgeTip(edge, sent)));
    shape.addEventListener("mouseleave", R.noTip);
    shape.addEventListener("click", () => R.choose([...edge.moves][0].node));
  }
  return shape;
};

R.edgeTip = (edge, sent) => [
  R.el("b", {}, `${R.plural(edge.moves.size, "redistribution")}, ${R.bytes(sent)} sent by each rank`),
  ...[...edge.moves].slice(0, 6).map((m) => R.el("div", {}, `${m.node < 0 ? "" : R.nodes[m.node].user}: ${R.layoutText[m.source]} → ${R.layoutText[m.target]}, ${R.steps(m)}, ${R.cost(m.cost)}`)),
  edge.moves.size > 6 && R.el("div", {}, `and ${edge.moves.size - 6} more`),
].filter(Boolean);

R.itemShape = (item, at) => {
  const [x, y] = [at.x - at.width / 2, at.y - at.height / 2];
  const [first, second] = R.labelOf(item);
  const colour = R.colourOf(item), part = R.costOf(item.nodes);
  const filled = R.view.colour === "cost" || !item.module;
  const act = () => { R.view.focus = item.id; if (item.module) R.toggle(item.module.path); else R.choose(item.node.k); };
  const kind = item.module ? "module" : item.node.kind ? "input" : "op";
  const shape = R.svg("g", { class: `item ${kind}`, "data-id": item.id, onclick: act },
    R.svg("rect", { x, y, width: at.width, height: at.height, rx: kind === "input" ? at.height / 2 : 7, style: filled ? `fill:${colour}` : "" }),
    R.svg("text", { class: "first", x: at.x, y: y + (item.module ? 20 : 17), style: filled ? `fill:${R.ink(colour)}` : "" }, item.module ? `▸ ${first}` : first),
    R.svg("text", { class: "second", x: at.x, y: y + (item.module ? 35 : 31), style: filled ? `fill:${R.ink(colour)}` : "" }, second));
  if (item.module && !filled) shape.append(R.strip(item, x + 8, y + at.height - 12, at.width - 16));
  shape.addEventListener("mousemove", (e) => R.tip(e, [
    R.el("b", {}, item.module ? item.module.path : item.node.user),
    R.el("div", {}, item.module ? second : `${item.node.kind || item.node.op}`),
    R.el("div", {}, `cost ${R.cost(part)} of ${R.cost(R.data.objective)}`)]));
  shape.addEventListener("mouseleave", R.noTip);
  return shape;
};

R.colourOf = (item) => {
  if (R.view.colour === "cost") return R.viridis(Math.sqrt(R.costOf(item.nodes) / R.most));
  const out = item.node && item.node.outs[0];
  return out ? R.layoutColours[out[1]] : R.GREY;
};

// In a closed module: the layouts of its values, each as wide as its share of them.
R.strip = (item, x, y, width) => {
  const counts = new Map();
  for (const node of item.nodes) {
    for (const out of node.outs) counts.set(R.layoutColours[out[1]], (counts.get(R.layoutColours[out[1]]) || 0) + 1);
  }
  const total = [...counts.values()].reduce((a, b) => a + b, 0) || 1;
  let left = x;
  return R.svg("g", {}, [...counts].sort((a, b) => b[1] - a[1]).map(([colour, count]) => {
    const part = R.svg("rect", { class: "part", x: left, y, width: (width * count) / total, height: 6, style: `fill:${colour}` });
    left += (width * count) / total;
    return part;
  }));
};

R.legend = () => {
  if (R.view.colour === "cost") {
    const stops = [0, 0.25, 0.5, 0.75, 1].map((t) => `${R.viridis(t)} ${100 * t}%`).join(",");
    return [R.el("span", {}, "0 "), R.el("span", { class: "ramp", style: `background:linear-gradient(90deg,${stops})` }), R.el("span", {}, ` ${R.cost(R.most)} (square root)`)];
  }
  const tags = R.layoutLegend.map((k) => R.el("span", { title: R.layoutWords(k) }, R.layoutTag(k)));
  return [R.el("span", { class: "quiet" }, `${R.data.mesh.axes.join(", ")}: `), ...tags, R.otherLayouts ? R.el("span", { class: "quiet" }, ` grey: replicated, and ${R.plural(R.otherLayouts, "rarer layout")}`) : ""];
};

R.toggle = (path) => {
  const view = R.view;
  if (view.open.has(path)) {
    view.open.delete(path);
    view.focus = `m:${path}`;
    R.drawGraph(false);
    return;
  }
  view.open.add(path);
  view.focus = `m:${path}`;
  R.drawGraph(false);
  R.showFirst(path);
};

// Brings an open module into view, or at least what comes first in it.
R.showFirst = (path) => {
  const { g, seen } = R.drawn, box = R.get("canvas").getBoundingClientRect(), whole = g.node(`m:${path}`);
  if (whole && whole.width * R.view.scale < box.width && whole.height * R.view.scale < box.height) {
    R.bringIntoView(whole);
    return;
  }
  const inside = [...seen.items.values()].filter((item) => item.parent === path || item.parent.startsWith(`${path}.`)).map((item) => g.node(item.id));
  if (inside.length) R.bringIntoView(inside.reduce((a, b) => (b.y < a.y ? b : a)));
};

R.applyView = () => R.get("world").setAttribute("transform", `translate(${R.view.x},${R.view.y}) scale(${R.view.scale})`);

R.fitGraph = () => {
  const { width, height } = R.drawn.g.graph(), box = R.get("canvas").getBoundingClientRect();
  if (!box.width) return;
  const scale = Math.min(1.15, box.width / width, box.height / height);
  R.view.scale = Math.max(0.6, scale);
  R.view.x = (box.width - width * R.view.scale) / 2;
  R.view.y = height * R.view.scale > box.height ? 8 : (box.height - height * R.view.scale) / 2;
  R.applyView();
};

R.bringIntoView = (at) => {
  const box = R.get("canvas").getBoundingClientRect(), view = R.view;
  const [x, y, w, h] = [at.x * view.scale + view.x, at.y * view.scale + view.y, (at.width * view.scale) / 2, (at.height * view.scale) / 2];
  if (x - w < 0 || x + w > box.width) view.x += box.width / 2 - x;
  if (y - h < 0 || y + h > box.height) view.y += h * 2 > box.height ? 20 - (y - h) : box.height / 2 - y;
  R.applyView();
};

R.markFocus = () => document.querySelectorAll("#world [data-id]").forEach((shape) => {
  const id = shape.dataset.id;
  shape.classList.toggle("focus", id === R.view.focus);
  shape.classList.toggle("chosen", R.chosen !== null && id === `n:${R.chosen}`);
});

R.zoom = (factor, x, y) => {
  const view = R.view, scale = Math.max(0.05, Math.min(3, view.scale * factor));
  view.x = x - ((x - view.x) * scale) / view.scale;
  view.y = y - ((y - view.y) * scale) / view.scale;
  view.scale = scale;
  R.applyView();
};

R.makePannable = (canvas) => {
  let from = null;
  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    const box = canvas.getBoundingClientRect();
    R.zoom(Math.exp(-e.deltaY / 400), e.clientX - box.left, e.clientY - box.top);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (e) => { from = { x: e.clientX - R.view.x, y: e.clientY - R.view.y }; });
  window.addEventListener("pointermove", (e) => {
    if (!from || !(e.buttons & 1)) return;
    R.view.x = e.clientX - from.x;
    R.view.y = e.clientY - from.y;
    R.applyView();
  });
  window.addEventListener("pointerup", () => { from = null; });
};

// Arrows move to the nearest item in their direction; Enter opens or chooses; Backspace closes the module around.
R.graphKey = (e) => {
  const way = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[e.key];
  const box = R.get("canvas").getBoundingClientRect(), item = R.drawn.seen.items.get(R.view.focus);
  if (way) R.moveFocus(way);
  else if (e.key === "Enter" && item) item.module ? R.toggle(item.module.path) : R.choose(item.node.k);
  else if (e.key === "Enter" && R.view.focus) R.toggle(R.view.focus.slice(2));
  else if (e.key === "Backspace") {
    const path = item ? item.parent : R.view.focus && R.view.focus.slice(2);
    if (path && R.view.open.has(path)) R.toggle(path);
  } else if (e.key === "+" || e.key === "=") R.zoom(1.25, box.width / 2, box.height / 2);
  else if (e.key === "-") R.zoom(0.8, box.width / 2, box.height / 2);
  else if (e.key === "0") R.fitGraph();
  else return;
  e.preventDefault();
  e.stopPropagation();
};

R.moveFocus = ([dx, dy]) => {
  const { g, seen } = R.drawn, here = R.view.focus && g.node(R.view.focus);
  let best = here ? null : seen.items.keys().next().value, least = Infinity;
  for (const item of seen.items.values()) {
    const at = g.node(item.id);
    if (item.id === R.view.focus || !here) continue;
    const [x, y] = [at.x - here.x, at.y - here.y];
    const ahead = x * dx + y * dy, aside = Math.abs(x * dy) + Math.abs(y * dx);
    if (ahead > 1 && ahead + 2 * aside < least) [best, least] = [item.id, ahead + 2 * aside];
  }
  if (best) {
    R.view.focus = best;
    R.bringIntoView(g.node(best));
    R.markFocus();
  }
};
