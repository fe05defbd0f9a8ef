"use strict";
// Tables of parameters and of redistributions, by Tabulator: sorted by a click on a heading, filtered by the field above.

R.localBytes = (out) => {
  const [shape, layout, dtype] = out, cuts = R.cuts.get(`${shape},${layout}`), name = R.data.graph.dtypes[dtype];
  if (!cuts) return null;
  const bits = name === "bool" ? 8 : name.startsWith("complex") ? Number(name.slice(7)) : Number((name.match(/\d+/) || [32])[0]);
  const count = R.rangesOf(R.data.graph.shapes[shape], cuts, 0).reduce((n, pieces) => n * pieces.reduce((sum, p) => sum + p[1], 0), 1);
  return (count * bits) / 8;
};

// layers.12.wq -> layers.*.wq
R.starred = (name) => name.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");

R.parameterRows = (merge) => {
  const gradients = new Map();
  const last = R.nodes.find((n) => n.op === "output");
  if (last) last.ins.forEach(([from], k) => R.data.graph.outputs[k] && R.data.graph.outputs[k][0] === "gradient" && gradients.set(R.data.graph.outputs[k][1], [from, k, last.k]));
  const groups = new Map();
  for (const k of R.data.graph.parameters) {
    const node = R.nodes[k], out = node.outs[0], gradient = gradients.get(node.user);
    if (!out) continue;
    const reduced = gradient ? R.moveOf.get(`${gradient[2]}:${gradient[1]}`) : null;
    const row = {
      k, name: node.user, count: 1, layout: R.layoutText[out[1]], colour: R.layoutColours[out[1]], shape: R.shape(R.data.graph.shapes[out[0]]),
      dtype: R.data.graph.dtypes[out[2]], bytes: R.localBytes(out), cost: node.moved + (reduced ? reduced.cost : 0),
      sent: node.moves.reduce((s, m) => s + m.sent, 0) + (reduced ? reduced.sent : 0),
      moves: [...new Set([...node.moves.map(R.steps), ...(reduced ? [R.steps(reduced)] : [])])].join("; "),
    };
    const key = merge ? [R.starred(row.name), row.layout, row.shape, row.dtype, row.moves].join("|") : row.name;
    const known = groups.get(key);
    if (!known) groups.set(key, row);
    else {
      known.count += 1;
      known.name = R.starred(row.name);
      for (const sum of ["bytes", "cost", "sent"]) known[sum] += row[sum];
    }
  }
  return [...groups.values()];
};

R.moveRows = () => R.moves.filter((m) => m.steps.length).map((m) => ({
  k: m.node, name: R.nameOf(m.node, "?"), from: R.layoutText[m.source], to: R.layoutText[m.target], steps: R.steps(m), sent: m.sent,
  cost: m.cost, hidden: m.hidden, readers: m.readers.map(([node, operand]) => R.readerName(node, operand)).join(", "),
  half: m.readers.every(([node]) => node >= 0 && (R.nodes[node].back || R.nodes[node].op === "output")) ? "backward" : "forward",
}));

R.readerName = (node, operand) => {
  if (node < 0) return "?";
  const end = R.nodes[node].op === "output" && R.data.graph.outputs[operand];
  return end ? `${end[0]} ${end[1]}` : R.nodes[node].user;
};

R.tag = (cell) => {
  const row = cell.getData();
  return R.el("span", { class: "tag", style: row.colour ? `background:${row.colour};color:${R.ink(row.colour)}` : "" }, cell.getValue());
};
R.as = (text) => (cell) => (cell.getValue() === null ? "" : text(cell.getValue()));
// Numbers: the largest first.
R.number = (title, field, text) => ({ title, field, formatter: R.as(text), sorter: "number", hozAlign: "right", headerHozAlign: "right", headerSortStartingDir: "desc", width: 118 });

R.table = (pane, rows, columns, sort, extra) => {
  const place = R.el("div", { class: "table" });
  const count = R.el("span", { class: "quiet" });
  const filter = R.el("input", { type: "search", placeholder: "Filter", "aria-label": "Filter", oninput: () => table.setFilter(matches) });
  const matches = (row) => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = columns.map((c) => row[c.field]).join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  };
  pane.append(R.el("div", { class: "bar" }, filter, extra, count), place);
  const table = new Tabulator(place, {
    data: rows, columns, columnDefaults: { tooltip: true }, layout: "fitColumns", height: "100%", initialSort: sort, placeholder: "nothing matches", renderVerticalBuffer: 300,
    rowFormatter: (row) => row.getElement().classList.toggle("chosen", R.chosen !== null && row.getData().k === R.chosen),
  });
  table.on("rowClick", (event, row) => row.getData().k >= 0 && R.choose(row.getData().k));
  table.on("dataFiltered", (filters, found) => { count.textContent = R.plural(found.length, "row"); });
  return table;
};

R.panes.parameters = {
  title: "Parameters",
  make: (pane) => {
    const merged = R.el("input", { type: "checkbox", checked: true, onchange: () => R.parameters.replaceData(R.parameterRows(merged.checked)) });
    R.parameters = R.table(pane, R.parameterRows(true), [
      { title: "Parameter", field: "name", widthGrow: 3, minWidth: 200 },
      R.number("Count", "count", (n) => n),
      { title: "Layout", field: "layout", formatter: R.tag, width: 110 },
      { title: "Shape", field: "shape", width: 140 },
      { title: "Dtype", field: "dtype", width: 90 },
      R.number("On a device", "bytes", R.bytes),
      R.number("Sent", "sent", R.bytes),
      R.number("Cost", "cost", R.cost),
      { title: "Redistributions of it and its gradient", field: "moves", widthGrow: 2, minWidth: 160 },
    ].map((c) => (c.field === "count" ? { ...c, width: 80 } : c)), [{ column: "bytes", dir: "desc" }],
    R.el("label", {}, merged, " merge alike layers"));
  },
  show: () => R.parameters.redraw(true),
};

R.panes.communication = {
  title: "Communication",
  make: (pane) => {
    R.communication = R.table(pane, R.moveRows(), [
      { title: "Value", field: "name", widthGrow: 2, minWidth: 160 },
      { title: "From", field: "from", width: 100 },
      { title: "To", field: "to", width: 100 },
      { title: "Steps", field: "steps", widthGrow: 2, minWidth: 150 },
      { title: "Half", field: "half", width: 90 },
      R.number("Sent by a rank", "sent", R.bytes),
      R.number("Cost", "cost", R.cost),
      R.number("Hidden", "hidden", (us) => (us ? R.time(us) : "")),
      { title: "For", field: "readers", widthGrow: 2, minWidth: 160 },
    ].map((c) => (c.field === "sent" ? { ...c, width: 140 } : c)), [{ column: "cost", dir: "desc" }]);
  },
  show: () => R.communication.redraw(true),
};
