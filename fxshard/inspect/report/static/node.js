"use strict";
// The chosen node: what it is, its tensor on the mesh, producers and readers, and what other layouts would cost.

R.choose = (k, output = 0) => {
  R.chosen = k;
  const node = R.nodes[k], detail = R.get("detail");
  detail.hidden = false;
  detail.dataset.node = node.name;
  R.noTip();
  detail.replaceChildren();
  R.fill(detail, {}, [
    R.el("button", { class: "close", onclick: () => R.unchoose(), title: "Esc", "aria-label": "Close" }, "×"),
    R.el("h2", {}, node.user),
    R.el("p", { class: "quiet" }, node.kind || node.op, node.user === node.name ? "" : `, node ${node.name}`, node.back ? ", in the backward" : ""),
    R.breadcrumb(node),
    node.line && R.el("p", { class: "line" }, node.line),
    R.outputs(node, output),
    R.el("h3", {}, "Reads"), R.readsTable(node),
    R.el("h3", {}, `Read by ${R.plural(node.readers.length, "node")}`), R.readersTable(node),
    R.el("h3", {}, "Other layouts"), R.answer(node)]);
  detail.scrollTop = 0;
  if (R.drawn) {
    const id = R.reveal(k, R.view);
    if (id) {
      R.view.focus = id;
      R.drawGraph(false);
      const at = R.tab === "graph" && R.drawn.g.node(id);
      if (at) R.bringIntoView(at);
    }
  }
  R.resized();
};

R.unchoose = () => {
  R.chosen = null;
  R.get("detail").hidden = true;
  if (R.drawn) R.markFocus();
  R.resized();
};

R.breadcrumb = (node) => R.el("p", { class: "crumbs" },
  node.module && ["in ", R.el("a", { href: "#", onclick: (e) => { e.preventDefault(); R.open("graph"); R.showModule(node.module); } }, node.module), " · "],
  R.el("a", { href: "#", onclick: (e) => { e.preventDefault(); R.open("graph"); R.choose(node.k); } }, "show in the graph"));

R.showModule = (path) => {
  for (let at = R.tree.get(path); at; at = at.parent) R.view.open.add(at.path);
  R.view.focus = `m:${path}`;
  R.drawGraph(false);
  R.showFirst(path);
};

R.outputs = (node, output) => {
  if (!node.outs.length) return "";
  const [shape, layout, dtype] = node.outs[output];
  const g = R.data.graph;
  const picks = node.outs.length > 1 && R.el("p", {}, node.outs.map((_, k) =>
    R.el("button", { "aria-pressed": k === output, onclick: () => R.choose(node.k, k) }, `result ${k}`)));
  const cuts = R.cuts.get(`${shape},${layout}`);
  const local = cuts && R.rangesOf(g.shapes[shape], cuts, 0).map((pieces) => pieces.reduce((sum, [, n]) => sum + n, 0));
  const rows = [
    ["layout", [R.layoutTag(layout), ` ${R.layoutWords(layout)}`]],
    ["shape", `${R.shape(g.shapes[shape])} ${g.dtypes[dtype]}`],
    local && ["on rank 0", R.shape(local)],
    ["compute", R.cost(node.cost)],
    node.moves.length && ["redistributions", `${R.cost(node.moved)}${node.moves.some((m) => m.hidden) ? `, and ${R.time(node.moves.reduce((s, m) => s + m.hidden, 0))} hidden` : ""}`],
  ].filter(Boolean);
  return [picks, R.facts(rows), R.picture(shape, layout)].filter(Boolean);
};

R.facts = (rows) => R.el("table", { class: "facts" }, rows.map(([name, value]) => R.el("tr", {}, R.el("th", {}, name), R.el("td", {}, value))));

R.moveText = (move, layout) => {
  if (!move || !move.steps.length) return R.el("span", { class: "quiet" }, "as it is");
  const ahead = move.cost || move.hidden ? `, ${R.cost(move.cost)}` : "";
  return R.el("span", { class: "moved" }, `${R.layoutText[move.source]} → ${R.layoutText[move.target]}: ${R.steps(move)}, ${move.sent ? R.bytes(move.sent) : "nothing is sent"}${ahead}`);
};

R.readsTable = (node) => {
  if (!node.ins.length) return R.el("p", { class: "quiet" }, "nothing");
  const rows = node.ins.map(([from, output, layout], operand) => {
    const name = from < 0 ? `operand ${operand}` : `${R.nodes[from].user}${R.nodes[from].outs.length > 1 ? `[${output}]` : ""}`;
    return R.el("tr", {}, R.el("td", {}, R.nodeLink(from, name)), R.el("td", {}, R.layoutTag(layout)), R.el("td", {}, R.moveText(R.moveOf.get(`${node.k}:${operand}`))));
  });
  return R.el("table", { class: "rows" }, R.el("tr", {}, ["value", "as", "redistribution"].map((t) => R.el("th", {}, t))), rows);
};

R.readersTable = (node) => {
  if (!node.readers.length) return "";
  const rows = node.readers.slice(0, 40).map(({ node: k, operand, output }) => {
    const reader = R.nodes[k], layout = reader.ins[operand][2];
    const end = reader.op === "output" && R.data.graph.outputs[operand];
    const name = end ? `${end[0]} ${end[1]}` : reader.user;
    return R.el("tr", {}, R.el("td", {}, R.nodeLink(k, name), node.outs.length > 1 ? R.el("span", { class: "quiet" }, ` (result ${output})`) : ""),
      R.el("td", {}, R.layoutTag(layout)), R.el("td", {}, R.moveText(R.moveOf.get(`${k}:${operand}`))));
  });
  return [R.el("table", { class: "rows" }, R.el("tr", {}, ["reader", "as", "redistribution"].map((t) => R.el("th", {}, t))), rows),
    node.readers.length > 40 && R.el("p", { class: "quiet" }, `and ${node.readers.length - 40} more`)].filter(Boolean);
};

R.answer = (node) => {
  const answer = R.answers.get(node.k);
  if (!answer) return R.notAsked(node);
  const most = Math.max(...answer.choices.map((c) => Math.abs(c.more || 0)), 1e-12);
  return R.el("div", { class: "answer" }, answer.choices.map((c) => {
    if (c.total === undefined) return R.el("div", { class: "other" }, R.el("span", { class: "tag plain" }, c.layout), R.el("span", { class: "quiet" }, ` ${c.reason}`));
    const details = R.el("details", {},
      R.el("summary", {},
        R.el("span", { class: "tag plain" }, c.layout),
        R.el("span", { class: "total" }, c.text),
        R.el("span", { class: "meter" }, R.el("span", { class: c.more < 0 ? "less" : "", style: `width:${(100 * Math.abs(c.more)) / most}%` })),
        R.el("span", { class: "more" }, c.chosen ? "the plan's own" : c.more_text)),
      !c.chosen && R.el("p", {}, `here ${c.here}, elsewhere ${c.elsewhere}; proven within ${(100 * c.gap).toFixed(3)} %`),
      R.el("ul", {}, c.differences.map(([name, near, text]) => R.el("li", {}, `${text} ${name}${near ? " (here)" : ""}`)), c.others > 0 && R.el("li", {}, `and ${c.others} smaller ones`)));
    return R.el("div", { class: c.chosen ? "other own" : "other" }, details);
  }));
};

R.notAsked = (node) => {
  const asked = R.data.answers.filter((one) => one.node >= 0);
  const quoted = `'${node.user.replaceAll("'", "'\\''")}'`;
  const parts = [R.el("p", { class: "quiet" }, R.data.missing.alternatives || "The report did not ask about this value. To ask:")];
  if (!R.data.missing.alternatives) parts.push(R.el("code", {}, `fxshard plan … --explain ${quoted}`));
  if (asked.length) parts.push(R.el("p", { class: "quiet" }, "It asked about: ", asked.map((one, i) => [i ? ", " : "", R.nodeLink(one.node, one.name)])));
  return parts;
};
