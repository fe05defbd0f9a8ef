"use strict";
// A tensor on the mesh: its blocks, and the devices that hold them. Two dims are drawn as rows and columns, others that are cut as panels.

R.meshSize = () => R.data.mesh.shape.reduce((a, b) => a * b, 1);

R.coordinate = (rank) => {
  const place = [];
  for (let i = R.data.mesh.shape.length - 1; i >= 0; i -= 1) {
    place[i] = rank % R.data.mesh.shape[i];
    rank = Math.floor(rank / R.data.mesh.shape[i]);
  }
  return place;
};

// The index of a rank's pieces in a cut: the place on the cut's axes, the last one fastest.
R.pieceIndex = ([, axes], place) => axes.reduce((index, axis) => index * R.data.mesh.shape[axis] + place[axis], 0);

// Which combination of pieces each rank holds: ranks with equal keys hold the same block.
R.blockKey = (cuts, rank) => {
  const place = R.coordinate(rank);
  return cuts.map((cut) => R.pieceIndex(cut, place)).join(",");
};

R.blocksOf = (cuts) => {
  const blocks = new Map();
  for (let rank = 0; rank < R.meshSize(); rank += 1) {
    const key = R.blockKey(cuts, rank);
    if (!blocks.has(key)) blocks.set(key, []);
    blocks.get(key).push(rank);
  }
  return blocks;
};

// The index ranges of a rank's block in each dim, as text: what a test compares with DTensor.
R.rangesOf = (shape, cuts, rank) => {
  const place = R.coordinate(rank);
  return shape.map((size, dim) => {
    const cut = cuts.find((c) => c[0] === dim);
    return cut ? cut[2][R.pieceIndex(cut, place)] : [[0, size]];
  });
};

R.picture = (shapeIndex, layoutIndex) => {
  const shape = R.data.graph.shapes[shapeIndex], placements = R.data.graph.layouts[layoutIndex];
  const cuts = R.cuts.get(`${shapeIndex},${layoutIndex}`);
  if (!cuts) return R.el("p", { class: "quiet" }, "Which elements a rank holds is known only when the program runs.");
  const blocks = R.blocksOf(cuts), keys = [...blocks.keys()];
  const colours = new Map(keys.map((key, k) => [key, R.viridis(keys.length > 1 ? 0.12 + (0.82 * k) / (keys.length - 1) : 0.45)]));
  const figure = R.el("div", { class: "picture" });
  const show = (key) => figure.querySelectorAll("[data-block]").forEach((shape) => shape.classList.toggle("dim", key !== null && shape.dataset.block !== key));
  const told = R.el("p", { class: "told" }, "Point at a block or a device.");
  const hover = (key, rank) => ({
    "data-block": key,
    onmouseenter: () => { show(key); told.textContent = R.tell(shape, cuts, blocks, key, rank); },
    onmouseleave: () => show(null),
  });
  figure.append(
    R.el("div", { class: "two" },
      R.el("div", {}, R.el("h4", {}, `The tensor ${R.shape(shape)}`), R.tensorPanels(shape, cuts, blocks, colours, hover)),
      R.el("div", {}, R.el("h4", {}, `The mesh ${R.data.mesh.shape.map((n, i) => `${R.data.mesh.axes[i]} ${n}`).join(" × ")}`), R.meshPanels(cuts, colours, hover))),
    told,
    R.el("ul", { class: "says" }, placements.map((p, i) => R.el("li", {}, R.el("b", {}, R.data.mesh.axes[i]), ` ${p}: `, R.placementWords(p, R.data.mesh.shape[i])))));
  return figure;
};

R.placementWords = (p, count) => {
  const dim = p.match(/^S\((\d+)/);
  if (p === "R") return `every rank of the axis holds the same`;
  if (dim) return p.includes(":") ? `each part of dim ${dim[1]} is cut into ${count}` : `dim ${dim[1]} is cut into ${count}`;
  return p === "P" ? `each of ${count} ranks holds an addend; the value is their sum` : `each of ${count} ranks holds a part of a pending reduction ${p}`;
};

R.tell = (shape, cuts, blocks, key, rank) => {
  const ranks = blocks.get(key), one = rank === undefined ? ranks[0] : rank;
  const ranges = R.rangesOf(shape, cuts, one).map((pieces) => pieces.map(([offset, length]) => `${offset}:${offset + length}`).join("+"));
  const held = ranks.length === 1 ? `rank ${ranks[0]}` : `${ranks.length} ranks: ${ranks.slice(0, 12).join(", ")}${ranks.length > 12 ? ", …" : ""}`;
  const place = R.coordinate(one).map((k, i) => `${R.data.mesh.axes[i]} ${k}`).join(", ");
  return `[${ranges.join(", ")}] on ${held}${rank === undefined && ranks.length > 1 ? "" : ` (${place})`}`;
};

// The dims drawn as rows and columns: the last two that are cut, filled up with others; further cut dims become panels.
R.drawnDims = (shape, cuts) => {
  const cut = cuts.map((c) => c[0]);
  if (shape.length === 0) return [null, null];
  if (shape.length === 1) return [null, 0];
  const two = cut.slice(-2);
  for (let dim = shape.length - 1; dim >= 0 && two.length < 2; dim -= 1) if (!two.includes(dim)) two.push(dim);
  return two.sort((a, b) => a - b);
};

// Segments of a dim: [offset, length, index of the pieces in the cut].
R.segments = (shape, cuts, dim) => {
  if (dim === null) return [[0, 1, null]];
  const at = cuts.findIndex((c) => c[0] === dim);
  if (at < 0) return [[0, shape[dim], null]];
  return cuts[at][2].flatMap((pieces, index) => pieces.map(([offset, length]) => [offset, length, index])).filter((s) => s[1] > 0);
};

R.tensorPanels = (shape, cuts, blocks, colours, hover) => {
  const [rowDim, colDim] = R.drawnDims(shape, cuts);
  const others = cuts.map((c, k) => k).filter((k) => cuts[k][0] !== rowDim && cuts[k][0] !== colDim);
  let chosen = [[]];
  for (const k of others) chosen = chosen.flatMap((one) => cuts[k][2].map((_, index) => [...one, index]));
  const small = chosen.length > 1, panels = R.el("div", { class: "panels" });
  chosen.slice(0, 64).forEach((fixed) => {
    const label = others.map((k, i) => `dim ${cuts[k][0]}: ${cuts[k][2][fixed[i]].map(([o, n]) => `${o}:${o + n}`).join("+")}`).join(", ");
    panels.append(R.el("figure", {}, small && R.el("figcaption", {}, label), R.tensorPanel(shape, cuts, blocks, colours, hover, rowDim, colDim, others, fixed, small)));
  });
  if (chosen.length > 64) panels.append(R.el("p", { class: "quiet" }, `and ${chosen.length - 64} more`));
  return panels;
};

R.tensorPanel = (shape, cuts, blocks, colours, hover, rowDim, colDim, others, fixed, small) => {
  const rows = R.segments(shape, cuts, rowDim), cols = R.segments(shape, cuts, colDim);
  const [sizeR, sizeC] = [rowDim === null ? 1 : shape[rowDim], colDim === null ? 1 : shape[colDim]];
  const ratio = rowDim === null ? 0.16 : Math.max(0.45, Math.min(1.5, Math.sqrt(sizeR / sizeC)));
  const width = small ? 120 : ratio > 1 ? 200 : 230, height = width * ratio, left = 34, top = 16;
  const svg = R.svg("svg", { width: width + left + 2, height: height + top + 4, class: "tensor" });
  svg.append(R.svg("text", { x: left + width / 2, y: 11, class: "axis" }, colDim === null ? "scalar" : `dim ${colDim}: ${shape[colDim]}`));
  if (rowDim !== null) svg.append(R.svg("text", { x: 0, y: 0, class: "axis", transform: `translate(12,${top + height / 2}) rotate(-90)` }, `dim ${rowDim}: ${shape[rowDim]}`));
  const at = (dim) => cuts.findIndex((c) => c[0] === dim);
  for (const [y, h, row] of rows) {
    for (const [x, w, col] of cols) {
      const index = cuts.map((c, k) => (k === at(rowDim) ? row : k === at(colDim) ? col : fixed[others.indexOf(k)]));
      const key = index.join(","), ranks = blocks.get(key);
      const box = { x: left + (width * x) / sizeC, y: top + (height * y) / sizeR, width: (width * w) / sizeC, height: (height * h) / sizeR };
      svg.append(R.svg("rect", { ...box, ...hover(key), class: "block", style: `fill:${colours.get(key)}` }));
      const text = R.ranksText(ranks);
      if (box.width > 6.2 * text.length + 3 && box.height > 11) {
        svg.append(R.svg("text", { x: box.x + box.width / 2, y: box.y + box.height / 2 + 4, class: "ranks", style: `fill:${R.ink(colours.get(key))}` }, text));
      }
    }
  }
  return svg;
};

// 0, 0-3, 0 4 8 ...
R.ranksText = (ranks) => {
  const last = ranks[ranks.length - 1];
  if (ranks.length === 1) return `${ranks[0]}`;
  return last - ranks[0] === ranks.length - 1 ? `${ranks[0]}–${last}` : ranks.length <= 4 ? ranks.join(" ") : `${ranks[0]} ${ranks[1]} … ${last}`;
};

// The devices: the last axis runs to the right, the one before it down, others are panels.
R.meshPanels = (cuts, colours, hover) => {
  const shape = R.data.mesh.shape, n = shape.length, size = R.meshSize();
  if (size > 4096) return R.el("p", { class: "quiet" }, `${size} devices are too many to draw.`);
  const cols = shape[n - 1], rows = n > 1 ? shape[n - 2] : 1, count = size / (rows * cols);
  const cell = Math.max(7, Math.min(34, 190 / cols)), panels = R.el("div", { class: "panels" });
  for (let panel = 0; panel < count; panel += 1) {
    const place = R.coordinate(panel * rows * cols);
    const svg = R.svg("svg", { width: cols * cell + 22, height: rows * cell + 18, class: "mesh" });
    svg.append(R.svg("text", { x: 20 + (cols * cell) / 2, y: 11, class: "axis" }, `${R.data.mesh.axes[n - 1]} →`));
    if (n > 1) svg.append(R.svg("text", { x: 0, y: 0, class: "axis", transform: `translate(12,${16 + (rows * cell) / 2}) rotate(-90)` }, `← ${R.data.mesh.axes[n - 2]}`));
    for (let k = 0; k < rows * cols; k += 1) {
      const rank = panel * rows * cols + k, key = R.blockKey(cuts, rank);
      const [x, y] = [20 + (k % cols) * cell, 16 + Math.floor(k / cols) * cell];
      svg.append(R.svg("rect", { x, y, width: cell - 1.5, height: cell - 1.5, rx: 3, ...hover(key, rank), class: "block", style: `fill:${colours.get(key)}` }));
      if (cell > 15) svg.append(R.svg("text", { x: x + cell / 2 - 1, y: y + cell / 2 + 3, class: "ranks", style: `fill:${R.ink(colours.get(key))}` }, rank));
    }
    const label = place.slice(0, Math.max(0, n - 2)).map((p, i) => `${R.data.mesh.axes[i]} ${p}`).join(", ");
    panels.append(R.el("figure", {}, label && R.el("figcaption", {}, label), svg));
  }
  return panels;
};
