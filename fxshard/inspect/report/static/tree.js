"use strict";
// The modules as a tree, and the graph between what is visible of it: modules that are closed, and the nodes of those that are open.

R.buildTree = () => {
  const root = { path: "", name: "model", parent: null, modules: new Map(), nodes: [], all: [] };
  R.tree = new Map([["", root]]);
  const module = (path) => {
    if (R.tree.has(path)) return R.tree.get(path);
    const cut = path.lastIndexOf(".");
    const parent = module(cut < 0 ? "" : path.slice(0, cut));
    const made = { path, name: path.slice(cut + 1), parent, modules: new Map(), nodes: [], all: [] };
    parent.modules.set(made.name, made);
    R.tree.set(path, made);
    return made;
  };
  for (const node of R.nodes) {
    if (node.op === "output") continue;
    const own = module(node.module);
    node.home = own.path;
    own.nodes.push(node);
    for (let at = own; at; at = at.parent) at.all.push(node);
  }
  for (const one of [...R.tree.values()]) if (one.modules.size) R.groupRuns(one);
};

// Operators that a module with submodules runs itself, one after another, are a group that opens and closes like a module.
R.RUN = 5;
R.groupRuns = (module) => {
  const runs = [];
  let last = null;
  for (const node of module.all) {
    if (node.kind) continue;
    const own = node.home === module.path;
    if (own && last && last.back === node.back) runs[runs.length - 1].push(node);
    else if (own) runs.push([node]);
    last = own ? node : null;
  }
  runs.filter((run) => run.length >= R.RUN).forEach((run, k) => {
    const name = `${R.short(run[0].op)} … ${R.short(run[run.length - 1].op)}`;
    const path = `${module.path}${module.path ? "." : ""}${name} (${k + 1})`;
    const group = { path, name, parent: module, modules: new Map(), nodes: run, all: run, group: true };
    module.modules.set(path, group);
    R.tree.set(path, group);
    const inside = new Set(run);
    module.nodes = module.nodes.filter((n) => !inside.has(n));
    run.forEach((n) => { n.home = path; });
  });
};

// The nodes of a half: the forward with parameters and inputs, or the backward.
R.inHalf = (node, half) => (half === "backward" ? node.back === 1 : node.back === 0);

// What is visible: items (closed modules and nodes) with their parent module, open modules, and the edges between items.
R.visible = (open, half) => {
  const items = new Map(), clusters = [], itemOf = new Map();
  const walk = (module) => {
    for (const child of module.modules.values()) {
      const nodes = child.all.filter((n) => R.inHalf(n, half));
      if (!nodes.length) continue;
      if (open.has(child.path)) {
        clusters.push({ id: `m:${child.path}`, module: child, nodes });
        walk(child);
      } else {
        const id = `m:${child.path}`;
        items.set(id, { id, module: child, parent: module.path, nodes });
        nodes.forEach((n) => itemOf.set(n.k, id));
      }
    }
    for (const node of module.nodes) {
      // a parameter that nothing reads in this half stays out, and so does what has no reader at all
      if (!R.inHalf(node, half) || (node.kind && !node.readers.some((r) => R.inHalf(R.nodes[r.node], half)))) continue;
      const id = `n:${node.k}`;
      items.set(id, { id, node, parent: module.path, nodes: [node] });
      itemOf.set(node.k, id);
    }
  };
  walk(R.tree.get(""));
  return R.withoutFans({ items, clusters, edges: R.edgesBetween(itemOf) });
};

R.edgesBetween = (itemOf) => {
  const edges = new Map();
  for (const node of R.nodes) {
    const to = itemOf.get(node.k);
    if (to === undefined) continue;
    node.ins.forEach(([from, output], operand) => {
      const start = from < 0 ? undefined : itemOf.get(from);
      if (start === undefined || start === to) return;
      const key = `${start}>${to}`;
      if (!edges.has(key)) edges.set(key, { key, from: start, to, moves: new Set(), count: 0 });
      const edge = edges.get(key);
      edge.count += 1;
      const move = R.moveOf.get(`${node.k}:${operand}`);
      if (move && move.steps.some(([kind]) => R.data.collectives.includes(kind))) edge.moves.add(move);
    });
  }
  return [...edges.values()];
};

// What many items read, such as a mask, would fill the drawing with edges: only the first of them are drawn, the item says how many more.
R.FAN = 4;
R.withoutFans = (seen) => {
  const read = new Map();
  seen.edges = seen.edges.filter((edge) => {
    read.set(edge.from, (read.get(edge.from) || 0) + 1);
    return read.get(edge.from) <= R.FAN;
  });
  read.forEach((count, id) => { seen.items.get(id).more = Math.max(0, count - R.FAN); });
  return seen;
};

R.costOf = (nodes) => nodes.reduce((sum, n) => sum + n.cost + n.moved, 0);

// The module's text: what it holds.
R.moduleText = (module, nodes) => {
  const count = [...module.modules.values()].filter((m) => !m.group).length;
  return count ? `${R.plural(count, "module")}, ${R.plural(nodes.length, "node")}` : R.plural(nodes.length, module.group ? "operator" : "node");
};

// Opens all modules around a node, and shows the half that it is in.
R.reveal = (k, view) => {
  const node = R.nodes[k];
  if (node.op === "output") return null;
  if (!R.inHalf(node, view.half)) view.half = node.back ? "backward" : "forward";
  for (let at = R.tree.get(node.home); at; at = at.parent) view.open.add(at.path);
  return `n:${k}`;
};
