"use strict";
// Memory over time by kind, stacked, and the tensors that are alive at a step.

R.MEMORY_COLOURS = { parameter: "#0072B2", buffer: "#8b929a", optimizer: "#56B4E9", input: "#CC79A7", gradient: "#E69F00", output: "#F0E442", mutation: "#B8A9C9", activation: "#009E73", gathered: "#D55E00", temporary: "#B5B5B5" };

// Bytes of each kind at each step, from the tensors' lives.
R.memorySeries = () => {
  const m = R.data.profile, count = m.steps.length;
  const series = m.kinds.map((kind) => new Float64Array(count).fill(m.static[kind] || 0));
  const changes = m.kinds.map(() => new Float64Array(count + 1));
  m.tensors.forEach(([, kind, bytes, birth, death]) => {
    changes[kind][birth] += bytes;
    changes[kind][death + 1] -= bytes;
  });
  changes.forEach((change, kind) => {
    let alive = 0;
    for (let step = 0; step < count; step += 1) series[kind][step] += alive += change[step];
  });
  m.workspace.forEach(([step, bytes]) => { series[m.kinds.indexOf("temporary")][step] += bytes; });
  return series;
};

R.panes.memory = {
  title: "Memory",
  make: (pane) => {
    const m = R.data.profile;
    if (!m) {
      pane.append(R.missing("memory"));
      return;
    }
    R.series = R.memorySeries();
    R.shownKinds = m.kinds.map((_, k) => k).filter((k) => R.series[k].some((v) => v > 0));
    const limit = R.data.memory.limit;
    pane.append(
      R.el("div", { class: "bar" }, R.el("b", { id: "peak" }, `Peak ${R.bytes(m.peak)}`), limit && R.el("span", {}, `limit ${R.bytes(limit)}`),
        R.shownKinds.map((k) => R.swatch(R.MEMORY_COLOURS[m.kinds[k]], m.kinds[k])),
        R.el("button", { onclick: () => { R.memoryPlot.setScale("x", { min: 0, max: m.steps.length - 1 }); } }, "Fit")),
      m.unknown.length ? R.el("p", { class: "quiet" }, `Not counted, because only running tells their size: ${m.unknown.join(", ")}`) : "",
      R.el("div", { id: "memory-plot" }),
      R.el("h3", { id: "alive" }),
      R.el("div", { class: "table", id: "alive-table" }));
    R.makeMemory();
    R.aliveTable = new Tabulator("#alive-table", {
      data: [], layout: "fitColumns", height: "100%", initialSort: [{ column: "bytes", dir: "desc" }], columns: [
        { title: "Tensor", field: "name", widthGrow: 3 }, { title: "Kind", field: "kind", width: 110 }, { title: "Layout", field: "layout", width: 110 },
        R.number("Bytes", "bytes", R.bytes), { title: "Alive during steps", field: "life", width: 170 }],
    });
    R.aliveTable.on("tableBuilt", () => R.showAlive(m.peak_step));
  },
  show: () => R.memoryPlot && (R.memoryPlot.setSize(R.memorySize()), R.aliveTable.redraw()),
  redraw: () => R.memoryPlot && R.makeMemory(),
};

R.memorySize = () => ({ width: Math.max(300, R.get("memory-plot").clientWidth), height: Math.max(200, Math.min(380, innerHeight * 0.42)) });

R.makeMemory = () => {
  const m = R.data.profile, ink = R.css("--ink"), line = R.css("--faint");
  const steps = Float64Array.from(m.steps, (_, k) => k);
  let below = new Float64Array(steps.length);
  const stacked = R.shownKinds.map((k) => (below = R.series[k].map((v, i) => v + below[i])));
  R.total = below;
  // the highest first, so that lower ones are drawn over it
  const order = R.shownKinds.map((_, i) => i).reverse();
  R.get("memory-plot").replaceChildren();
  R.memoryPlot = new uPlot({
    ...R.memorySize(),
    legend: { show: false },
    cursor: { y: false, points: { show: false } },
    scales: { x: { time: false }, y: { range: (u, min, max) => [0, Math.max(m.peak, R.data.memory.limit && R.data.memory.limit < 2 * m.peak ? R.data.memory.limit : 0) * 1.05 || 1] } },
    axes: [
      { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, label: "step", labelSize: 20 },
      { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, values: (u, ticks) => ticks.map(R.bytes), size: 74 },
    ],
    series: [{}, ...order.map((i) => {
      const colour = R.MEMORY_COLOURS[m.kinds[R.shownKinds[i]]];
      return { label: m.kinds[R.shownKinds[i]], fill: colour, stroke: colour, width: 0, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) };
    })],
    hooks: { draw: [R.drawMarks] },
  }, [steps, ...order.map((i) => stacked[i])], R.get("memory-plot"));
  const over = R.memoryPlot.over;
  const stepAt = (e) => Math.max(0, Math.min(m.steps.length - 1, Math.floor(R.memoryPlot.posToVal(e.offsetX, "x"))));
  over.addEventListener("mousemove", (e) => R.tip(e, R.memoryTip(stepAt(e))));
  over.addEventListener("mouseleave", R.noTip);
  over.addEventListener("click", (e) => R.showAlive(stepAt(e)));
};

R.memoryTip = (step) => {
  const m = R.data.profile;
  return [R.el("b", {}, `step ${step}: ${m.steps[step]}`), R.el("div", {}, `${R.bytes(R.total[step])} in all`),
    ...[...R.shownKinds].reverse().filter((k) => R.series[k][step]).map((k) => R.el("div", {}, R.swatch(R.MEMORY_COLOURS[m.kinds[k]], `${m.kinds[k]} ${R.bytes(R.series[k][step])}`)))];
};

R.drawMarks = (u) => {
  const m = R.data.profile, ctx = u.ctx;
  ctx.save();
  ctx.strokeStyle = R.css("--ink");
  ctx.setLineDash([5, 4]);
  ctx.lineWidth = devicePixelRatio;
  const at = u.valToPos(R.aliveStep === undefined ? m.peak_step : R.aliveStep, "x", true);
  ctx.beginPath();
  ctx.moveTo(at, u.bbox.top);
  ctx.lineTo(at, u.bbox.top + u.bbox.height);
  if (R.data.memory.limit) {
    const y = u.valToPos(R.data.memory.limit, "y", true);
    ctx.moveTo(u.bbox.left, y);
    ctx.lineTo(u.bbox.left + u.bbox.width, y);
  }
  ctx.stroke();
  ctx.restore();
};

R.showAlive = (step) => {
  const m = R.data.profile;
  R.aliveStep = step;
  R.get("alive").textContent = `Alive at step ${step}, ${m.steps[step]}${step === m.peak_step ? ", the peak" : ""}: ${R.bytes(R.total[step])}`;
  R.aliveTable.setData(m.tensors.filter(([, , , birth, death]) => birth <= step && step <= death).map(([name, kind, bytes, birth, death, layout]) => (
    { name: m.names[name], kind: m.kinds[kind], bytes, layout: m.layouts[layout], life: `${birth} to ${death}` })));
  R.memoryPlot.redraw();
};
