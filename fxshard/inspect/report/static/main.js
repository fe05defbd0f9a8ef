"use strict";
// Starts the page: tabs, search, keyboard, theme.

R.ORDER = ["overview", "graph", "parameters", "communication", "timeline", "memory"];

R.open = (name) => {
  R.tab = name;
  for (const other of R.ORDER) {
    R.get(`tab-${other}`).setAttribute("aria-selected", other === name);
    R.get(`tab-${other}`).tabIndex = other === name ? 0 : -1;
    R.get(`pane-${other}`).hidden = other !== name;
  }
  const pane = R.get(`pane-${name}`);
  if (!pane.dataset.made) {
    pane.dataset.made = "yes";
    R.panes[name].make(pane);
    if (name === "graph" && R.chosen !== null) R.choose(R.chosen);
  } else R.panes[name].show();
  R.noTip();
};

R.resized = () => {
  if (R.tab && R.get(`pane-${R.tab}`).dataset.made) R.panes[R.tab].show();
};

R.makeTabs = () => {
  R.get("tabs").append(...R.ORDER.map((name, k) => R.el("button", { role: "tab", id: `tab-${name}`, "aria-controls": `pane-${name}`, title: `${k + 1}`, onclick: () => R.open(name) }, R.panes[name].title)));
  R.get("panes").append(...R.ORDER.map((name) => R.el("div", { role: "tabpanel", id: `pane-${name}`, class: `pane ${name}`, "aria-labelledby": `tab-${name}`, hidden: true })));
};

// Search over nodes by any of their names, modules and operators; modules come first, then what begins with the text.
R.find = (text) => {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const fits = (name) => words.every((word) => name.toLowerCase().includes(word));
  const rank = (name) => (name.toLowerCase().startsWith(words[0]) ? 0 : 1);
  const modules = [...R.tree.keys()].filter((path) => path && !R.tree.get(path).group && fits(path)).map((path) => ({ text: path, kind: "module", rank: rank(path), act: () => { R.open("graph"); R.showModule(path); } }));
  const nodes = R.nodes.filter((n) => n.op !== "output" && fits(`${n.user} ${n.name} ${n.module} ${n.op}`)).map((n) => (
    { text: n.user, kind: n.kind || `${R.short(n.op)}${n.module ? ` in ${n.module}` : ""}`, rank: rank(n.user) + (fits(`${n.user} ${n.name}`) ? 0 : 2), act: () => R.choose(n.k) }));
  const best = (found, count) => found.sort((a, b) => a.rank - b.rank || a.text.length - b.text.length).slice(0, count);
  return [...best(modules, 6), ...best(nodes, 24)];
};

R.makeSearch = () => {
  const input = R.get("search"), list = R.get("found");
  let found = [], at = 0;
  const close = () => { list.hidden = true; input.setAttribute("aria-expanded", "false"); };
  const mark = () => [...list.children].forEach((item, k) => { item.setAttribute("aria-selected", k === at); if (k === at) item.scrollIntoView({ block: "nearest" }); });
  const take = (k) => { if (found[k]) { close(); input.blur(); found[k].act(); } };
  const update = () => {
    found = R.find(input.value);
    at = 0;
    list.replaceChildren(...found.map((one, k) => R.el("li", { role: "option", onmousedown: (e) => { e.preventDefault(); take(k); } }, R.el("b", {}, one.text), R.el("span", { class: "quiet" }, ` ${one.kind}`))));
    if (input.value.trim() && !found.length) list.replaceChildren(R.el("li", { class: "quiet" }, "nothing found"));
    list.hidden = !input.value.trim();
    input.setAttribute("aria-expanded", String(!list.hidden));
    mark();
  };
  input.addEventListener("input", update);
  input.addEventListener("focus", () => input.value.trim() && update());
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (e) => {
    e.stopPropagation();
    if (e.key === "ArrowDown") at = Math.min(found.length - 1, at + 1);
    else if (e.key === "ArrowUp") at = Math.max(0, at - 1);
    else if (e.key === "Enter") take(at);
    else if (e.key === "Escape") { input.value = ""; close(); input.blur(); }
    else return;
    e.preventDefault();
    mark();
  });
};

R.KEYS = [["1 – 6", "the panes"], ["/", "search"], ["Esc", "closes the chosen node"], ["↑ ↓ ← →", "in the graph: to the next node; in the timeline: earlier and later"],
  ["Enter", "in the graph: opens a module, or shows a node"], ["Backspace", "in the graph: closes the module"], ["+ – 0", "zoom, and show all"],
  ["c", "colour by layout or by cost"], ["f", "forward or backward"], ["t", "light or dark"], ["?", "this list"]];

R.makeKeys = () => {
  const dialog = R.get("keys");
  dialog.append(R.el("h3", {}, "Keyboard"), R.facts(R.KEYS.map(([key, text]) => [R.el("kbd", {}, key), text])), R.el("button", { onclick: () => dialog.close() }, "Close"));
  R.get("help").addEventListener("click", () => dialog.showModal());
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches("input:not([type=checkbox]), textarea, select")) return;
    if (/^[1-6]$/.test(e.key)) R.open(R.ORDER[Number(e.key) - 1]);
    else if (e.key === "/") R.get("search").focus();
    else if (e.key === "Escape" && !dialog.open) R.unchoose();
    else if (e.key === "?") dialog.showModal();
    else if (e.key === "t") R.otherTheme();
    else if (R.tab === "graph" && (e.key === "c" || (e.key === "f" && R.data.train && R.data.graph.edges))) {
      if (e.key === "c") R.view.colour = R.view.colour === "cost" ? "layout" : "cost";
      else R.view.half = R.view.half === "forward" ? "backward" : "forward";
      R.drawGraph(e.key === "f");
    } else if (R.tab === "graph" && e.target === document.body) return R.graphKey(e);
    else return;
    e.preventDefault();
  });
};

R.otherTheme = () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  for (const name of R.ORDER) if (R.get(`pane-${name}`).dataset.made && R.panes[name].redraw) R.panes[name].redraw();
};

R.start = async () => {
  R.prepare(await R.unpack());
  const { title, mesh } = R.data;
  R.get("title").textContent = title;
  R.get("chips").append(...mesh.axes.map((name, k) => R.el("span", { class: "chip" }, `${name} ${mesh.shape[k]}`)), R.el("span", { class: "chip" }, mesh.hardware), R.el("span", { class: "chip" }, R.data.gap ? `gap ${(100 * R.data.gap).toFixed(3)} %` : "proven optimal"));
  R.buildTree();
  R.makeTabs();
  R.makeSearch();
  R.makeKeys();
  R.get("theme").addEventListener("click", R.otherTheme);
  addEventListener("resize", R.resized);
  R.open("overview");
  document.documentElement.dataset.ready = "yes";
};

R.start().catch((error) => {
  R.get("panes").append(R.el("p", { class: "missing" }, `The page could not be shown: ${error.message}. It needs a browser of 2023 or newer.`));
  throw error;
});
