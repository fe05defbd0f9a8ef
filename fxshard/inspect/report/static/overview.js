"use strict";
// The first screen: how good the plan is, where the step's time goes, what fills the memory, what communicates most, how modules lie.

R.stack = (parts, total, text) => R.el("div", { class: "stack", role: "img", "aria-label": text }, parts.filter((p) => p.value > 0).map((p) =>
  R.el("span", { style: `flex:${p.value / total} 0 0;background:${p.colour}`, title: `${p.name} ${p.text}`, onmousemove: (e) => R.tip(e, `${p.name}: ${p.text}, ${R.percent(p.value / total)}`), onmouseleave: R.noTip })));

R.stackLegend = (parts, total) => R.el("table", { class: "facts" }, parts.filter((p) => p.value > 0).map((p) => R.el("tr", {},
  R.el("td", {}, R.swatch(p.colour, p.name)), R.el("td", { class: "number" }, p.text), R.el("td", { class: "number quiet" }, R.percent(p.value / total)))));

R.panes.overview = {
  title: "Overview",
  make: (pane) => {
    const colours = [R.COMPUTE, "#E69F00", "#CC79A7", "#56B4E9", "#009E73", "#D55E00"];
    const split = R.data.split.map(([name, value, text], k) => ({ name: k ? `communication on ${name}` : name, value, text, colour: name === "local copies" ? R.GREY : colours[Math.min(k, colours.length - 1)] }));
    const total = split.reduce((s, p) => s + p.value, 0) || 1;
    const kinds = Object.entries(R.data.memory.kinds).map(([name, value]) => ({ name, value, text: R.bytes(value), colour: R.MEMORY_COLOURS[name] || R.GREY })).sort((a, b) => b.value - a.value);
    const peak = kinds.reduce((s, p) => s + p.value, 0), limit = R.data.memory.limit;
    pane.append(R.el("div", { class: "cards" },
      R.el("section", {}, R.el("h3", {}, R.data.unit === "bytes" ? "Bytes sent" : "Step"), R.el("p", { class: "big" }, R.cost(R.data.objective)),
        R.el("p", { class: "quiet" }, R.gapText()), R.stack(split, total, "what the step is spent on"), R.stackLegend(split, total)),
      peak > 0 && R.el("section", {}, R.el("h3", {}, "Memory of a device"), R.el("p", { class: "big" }, R.bytes(peak)),
        R.el("p", { class: "quiet" }, limit ? `at its peak, of a limit of ${R.bytes(limit)}` : "at its peak, no limit given"),
        R.stack(limit && limit > peak ? [...kinds, { name: "free", value: limit - peak, text: R.bytes(limit - peak), colour: "var(--faint)" }] : kinds, Math.max(peak, limit || 0), "memory by kind"),
        R.stackLegend(kinds, peak)),
      R.el("section", {}, R.el("h3", {}, "Collectives"), R.trafficTable()),
      R.el("section", { class: "wide" }, R.el("h3", {}, "What costs most to communicate"), R.worst()),
      R.el("section", { class: "wide" }, R.el("h3", {}, "Layouts of parameters"), R.layoutsTable()),
      R.el("section", { class: "wide" }, R.el("h3", {}, "The plan"), R.facts(R.data.facts),
        R.data.graph.fallbacks.length > 0 && R.el("details", {}, R.el("summary", {}, `${R.plural(R.data.graph.fallbacks.length, "node")} replicated, or run as several operators`),
          R.el("ul", {}, R.data.graph.fallbacks.slice(0, 100).map(([k, reason]) => R.el("li", {}, R.nodeLink(k), `: ${reason}`)))))));
  },
  show: () => {},
};

R.gapText = () => (R.data.gap ? `at most ${(100 * R.data.gap).toFixed(3)} % above the best plan (proven)` : "proven optimal");

R.trafficTable = () => {
  if (!R.data.traffic.length) return R.el("p", { class: "quiet" }, "none");
  return R.el("table", { class: "rows" }, R.el("tr", {}, ["kind", "axis", "count", "sent by a rank"].map((t, k) => R.el("th", { class: k > 1 ? "number" : "" }, t))),
    R.data.traffic.map(([kind, axis, count, bytes]) => R.el("tr", {}, R.el("td", {}, kind.replaceAll("_", "-")), R.el("td", {}, axis), R.el("td", { class: "number" }, count.toLocaleString("en")), R.el("td", { class: "number" }, R.bytes(bytes)))));
};

R.worst = () => {
  if (!R.data.costliest.length) return R.el("p", { class: "quiet" }, "nothing is communicated");
  const head = ["cost", "times", "collective", "each", "where", "why"].map((t, k) => R.el("th", { class: k < 2 || k === 3 ? "number" : "" }, t));
  return R.el("table", { class: "rows" }, R.el("tr", {}, head), R.data.costliest.map((g) => R.el("tr", {},
    R.el("td", { class: "number" }, g.cost), R.el("td", { class: "number" }, g.count), R.el("td", {}, `${g.kind.replaceAll("_", "-")} on ${g.axis}`),
    R.el("td", { class: "number" }, R.bytes(g.bytes)), R.el("td", {}, R.nodeLink(g.node, g.where)), R.el("td", {}, g.why))));
};

R.layoutsTable = () => {
  const rows = R.parameterRows(true).slice(0, 40);
  return R.el("table", { class: "rows" }, R.el("tr", {}, ["parameter", "count", "layout", "shape", "on a device"].map((t, k) => R.el("th", { class: k === 1 || k === 4 ? "number" : "" }, t))),
    rows.map((r) => R.el("tr", {}, R.el("td", {}, R.nodeLink(r.k, r.name)), R.el("td", { class: "number" }, r.count), R.el("td", {}, R.layoutTag(R.nodes[r.k].outs[0][1])), R.el("td", {}, r.shape), R.el("td", { class: "number" }, r.bytes === null ? "" : R.bytes(r.bytes)))));
};
