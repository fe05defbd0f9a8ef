"use strict";
// The predicted timeline: compute and the link of each axis as lanes, on uPlot's time axis. Drag to zoom, double click to see all.

R.KIND_COLOURS = { all_gather: "#56B4E9", reduce_scatter: "#E69F00", all_reduce: "#CC79A7", all_to_all: "#009E73", shift: "#F0E442", zigzag: "#F0E442", dispatch: "#009E73", combine: "#009E73" };
R.COMPUTE = "#0072B2";
R.LANE = 50;

R.panes.timeline = {
  title: "Timeline",
  make: (pane) => {
    const t = R.data.timeline;
    if (!t) {
      pane.append(R.missing("timeline"));
      return;
    }
    const waited = t.lanes.slice(1).map((name, k) => {
      const events = t.events.filter((e) => e[2] === k + 1);
      return R.el("span", {}, R.el("b", {}, name), ` busy ${R.time(events.reduce((s, e) => s + e[4], 0))}, waited for ${R.time(events.reduce((s, e) => s + e[5], 0))}`);
    });
    const kinds = [...new Set(t.events.filter((e) => e[2] > 0).map((e) => t.operators[e[1]]))];
    pane.append(
      R.el("div", { class: "bar" }, R.el("b", {}, `Predicted step ${R.time(t.total)}`), R.el("span", {}, R.el("b", {}, "compute"), ` ${R.time(t.computing)}`), waited,
        R.el("button", { onclick: () => R.zoomTime(0, t.total) }, "Fit")),
      R.data.missing.timeline ? R.missing("timeline") : "",
      R.el("div", { class: "bar" }, R.swatch(R.COMPUTE, "operators"), kinds.map((kind) => R.swatch(R.KIND_COLOURS[kind] || R.GREY, kind.replaceAll("_", "-"))), R.swatch("waiting", "the device waits")),
      R.el("div", { id: "lanes", tabindex: 0, "aria-label": "Timeline: + and - zoom, arrows move, 0 shows all" }),
      R.el("p", { class: "quiet" }, `Drag to zoom, double click to see all. Times are those of the cost model${R.data.missing.timeline ? "" : ", on the first rank"}.`));
    R.get("lanes").addEventListener("keydown", R.timeKey);
    R.lanes = t.lanes.map((_, lane) => t.events.filter((e) => e[2] === lane).sort((a, b) => a[3] - b[3]));
    R.makeTimeline();
    R.eventTable = R.table(pane, R.eventRows(), [
      { title: "Operator or collective", field: "operator", widthGrow: 1, minWidth: 160 },
      { title: "Of", field: "of", widthGrow: 2, minWidth: 160 },
      { title: "Lane", field: "lane", width: 100 },
      R.number("Start", "start", R.time), R.number("Takes", "takes", R.time), R.number("Device waits", "waits", (us) => (us ? R.time(us) : "")),
    ], [{ column: "takes", dir: "desc" }, { column: "waits", dir: "desc" }]);
  },
  show: () => R.timePlot && (R.timePlot.setSize(R.timeSize()), R.eventTable.redraw()),
  redraw: () => R.timePlot && R.makeTimeline(),
};

// A node by its name and module; a parameter's name says its module.
R.nameOf = (k, otherwise) => (k < 0 ? otherwise : R.nodes[k].kind || !R.nodes[k].module ? R.nodes[k].user : `${R.nodes[k].user} in ${R.nodes[k].module}`);

R.eventRows = () => R.data.timeline.events.map(([name, operator, lane, start, takes, waits, node]) => ({
  k: node, operator: R.data.timeline.operators[operator].replace(/^aten\./, ""), of: R.nameOf(node, R.data.timeline.names[name]),
  lane: R.data.timeline.lanes[lane], start, takes, waits,
}));

R.swatch = (colour, text) => R.el("span", { class: "swatch" }, R.el("i", colour === "waiting" ? { class: "waiting" } : { style: `background:${colour}` }), text);

R.timeSize = () => ({ width: Math.max(300, R.get("lanes").clientWidth), height: R.data.timeline.lanes.length * (R.LANE + 14) + 50 });

R.makeTimeline = () => {
  const t = R.data.timeline, ink = R.css("--ink"), line = R.css("--faint");
  const range = R.timePlot && [R.timePlot.scales.x.min, R.timePlot.scales.x.max];
  R.get("lanes").replaceChildren();
  R.timePlot = new uPlot({
    ...R.timeSize(),
    legend: { show: false },
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: true } },
    scales: { x: { time: false, range: (u, min, max) => (min === null || max === null || min === max ? [0, t.total] : [Math.max(0, min), Math.min(t.total, max)]) }, y: { range: [0, t.lanes.length] } },
    axes: [
      { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, values: (u, ticks) => ticks.map(R.time), space: 90 },
      { stroke: ink, grid: { show: false }, ticks: { show: false }, size: 70, splits: () => t.lanes.map((_, k) => t.lanes.length - k - 0.5), values: () => t.lanes },
    ],
    series: [{}, { paths: () => null, points: { show: false } }],
    hooks: { draw: [R.drawLanes] },
  }, [[0, t.total], [0, 0]], R.get("lanes"));
  if (range) R.zoomTime(...range);
  const over = R.timePlot.over;
  over.addEventListener("mousemove", (e) => {
    const event = R.eventAt(e.offsetX, e.offsetY);
    over.style.cursor = event ? "pointer" : "crosshair";
    if (!event) R.noTip();
    else R.tip(e, R.eventTip(event));
  });
  over.addEventListener("mouseleave", R.noTip);
  over.addEventListener("click", (e) => {
    const event = R.eventAt(e.offsetX, e.offsetY);
    if (event && event[6] >= 0) R.choose(event[6]);
  });
};

R.drawLanes = (u) => {
  const t = R.data.timeline, ctx = u.ctx, { min, max } = u.scales.x;
  const x = (time) => u.valToPos(time, "x", true), y = (lane) => u.valToPos(t.lanes.length - lane, "y", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  ctx.clip();
  const height = y(1) - y(0), pad = height * 0.14, page = R.css("--page");
  R.lanes.forEach((events, lane) => {
    let drawn = -1;
    for (const [, operator, , start, length, waited] of events) {
      if (start + length < min || start > max) continue;
      const left = x(start), right = x(start + length);
      if (lane && waited) R.drawWait(ctx, x(start + length - waited), right, y(0) + pad, height - 2 * pad);
      if (right < drawn + 0.5) continue; // under what is drawn already
      const width = Math.max(0.7, right - left);
      ctx.fillStyle = lane ? R.KIND_COLOURS[t.operators[operator]] || R.GREY : R.COMPUTE;
      ctx.fillRect(left, y(lane) + pad, width, height - 2 * pad);
      if (width > 5) {
        ctx.fillStyle = page;
        ctx.fillRect(right - 0.6, y(lane) + pad, 0.6, height - 2 * pad);
      }
      drawn = left + width;
    }
  });
  ctx.restore();
};

R.drawWait = (ctx, left, right, top, height) => {
  ctx.strokeStyle = ctx.fillStyle = R.MOVE;
  ctx.lineWidth = 1;
  if (right - left < 5) {
    ctx.globalAlpha = 0.55;
    ctx.fillRect(left, top, Math.max(0.7, right - left), height);
    ctx.globalAlpha = 1;
    return;
  }
  ctx.strokeRect(left + 0.5, top + 0.5, Math.max(0.5, right - left - 1), height - 1);
  ctx.beginPath();
  for (let at = left + 4; at < right; at += 6) {
    ctx.moveTo(at, top);
    ctx.lineTo(Math.max(left, at - 6), top + height);
  }
  ctx.stroke();
};

R.eventAt = (px, py) => {
  const u = R.timePlot, t = R.data.timeline;
  const lane = Math.floor(t.lanes.length - u.posToVal(py, "y")), time = u.posToVal(px, "x");
  const near = u.posToVal(px + 2, "x") - time;
  return (R.lanes[lane] || []).find((e) => e[3] - near <= time && time <= e[3] + e[4] + near);
};

R.eventTip = (event) => {
  const t = R.data.timeline, [name, operator, lane, start, length, waited, node] = event;
  return [
    R.el("b", {}, `${t.operators[operator]}${lane ? ` on ${t.lanes[lane]}` : ""}`),
    R.el("div", {}, `${lane ? "of " : ""}${R.nameOf(node, t.names[name])}`),
    R.el("div", {}, `${R.time(start)} to ${R.time(start + length)}: ${R.time(length)}${waited ? `; the device waits ${R.time(waited)}` : ""}`),
  ];
};

R.zoomTime = (min, max) => R.timePlot.setScale("x", { min, max });

R.timeKey = (e) => {
  const { min, max } = R.timePlot.scales.x, span = max - min, total = R.data.timeline.total;
  const to = (a, b) => R.zoomTime(Math.max(0, a), Math.min(total, b));
  if (e.key === "+" || e.key === "=") to(min + span / 4, max - span / 4);
  else if (e.key === "-") to(min - span / 2, max + span / 2);
  else if (e.key === "ArrowRight") to(Math.min(min + span / 4, total - span), Math.min(max + span / 4, total));
  else if (e.key === "ArrowLeft") to(Math.max(0, min - span / 4), Math.max(span, max - span / 4));
  else if (e.key === "0") to(0, total);
  else return;
  e.preventDefault();
  e.stopPropagation();
};
