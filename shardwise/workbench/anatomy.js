// The model and the mesh as pictures: the blocks of the network with shapes, parameters and operations; and every rank as a cell,
// grouped by machine, which tells what it holds and lights up those that it talks to.
(() => {
  "use strict";
  const { bench, tooltip } = globalThis.shardwise, { colors } = bench.state;
  const OWNERS = {
    embedding: "#8a8200", attention: "#306bac", ffn: "#d8843a", experts: "#d8843a", shared_experts: "#a5561d", router: "#ad385a",
    norm: "#8b8f98", head: "#c32420", scores: "#5bb8fe",
  };
  const AXES = ["tensor", "context", "shard", "replicate", "pipeline", "expert"];
  const MOST = 65536;
  let shown = null, at = 0, cells = null;

  function element(tag, text, attributes) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    return made;
  }
  function count(value) {
    const [unit, name] = [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " k"], [1, ""]].find((each) => value >= each[0]) || [1, ""];
    return Number((value / unit).toPrecision(3)) + name;
  }
  function size(bytes) {
    const [unit, name] = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]
      .find((each) => bytes >= each[0]) || [1, "B"];
    return Number((bytes / unit).toPrecision(3)) + " " + name;
  }

  function flopsOf(block) { return block.times * block.pieces.reduce((sum, piece) => sum + piece.flops, 0); }
  function parametersOf(block) { return block.times * block.pieces.reduce((sum, piece) => sum + piece.parameters, 0); }

  function drawModel(blocks, run) {
    const flops = blocks.reduce((sum, block) => sum + flopsOf(block), 0);
    const parameters = blocks.reduce((sum, block) => sum + parametersOf(block), 0);
    document.querySelector("#model .remark").textContent = count(parameters) + " parameters; " + count(flops)
      + " FLOPs of a token's forward pass at a length of " + run.train.seq_len.toLocaleString("en")
      + ". Thin bars: where the operations are. What an axis cuts is named beside its shape.";
    document.querySelector("#model .body").replaceChildren(...blocks.map((block) => {
      const box = element("div", undefined, { class: "block" });
      const title = element("h3", block.title + (block.times > 1 ? " \u00d7 " + block.times : ""));
      title.append(element("span", count(parametersOf(block)) + " parameters, " + count(flopsOf(block)) + " FLOPs a token ("
        + (100 * flopsOf(block) / flops).toFixed(1) + "%)"));
      const pieces = element("div", undefined, { class: "pieces" });
      pieces.append(...block.pieces.map((piece) => {
        const made = element("div", undefined, { class: "piece" });
        made.style.borderColor = OWNERS[piece.owner] || "#8b8f98";
        const cuts = piece.cuts.map(([axis, dim]) => axis + " cuts " + piece.shape[dim].toLocaleString("en")).join(", ");
        made.append(element("b", piece.name + (piece.frozen ? " (frozen)" : "")), element("span", piece.shape.join(" \u00d7 ")),
          element("span", [piece.parameters ? count(piece.parameters) : "", piece.flops ? count(piece.flops) + " FLOPs" : "", cuts]
            .filter(Boolean).join(", ")));
        return made;
      }));
      const thin = element("div", undefined, { class: "thin" });
      thin.style.width = Math.max(0.5, 100 * flopsOf(block) / flops) + "%";
      for (const piece of block.pieces) {
        const part = element("span");
        part.style.width = (100 * block.times * piece.flops / (flopsOf(block) || 1)) + "%";
        part.style.background = OWNERS[piece.owner] || "#8b8f98";
        thin.append(part);
      }
      box.append(title, pieces, thin);
      return box;
    }));
  }

  const canvas = document.querySelector("#mesh canvas"), pen = canvas.getContext("2d");
  function index(rank, group) {
    const [many, stride] = shown.anatomy.mesh.spans[group];
    return Math.floor(rank / stride) % many;
  }
  function inGroup(rank, other, group) {
    const [many, stride] = shown.anatomy.mesh.spans[group], first = rank - index(rank, group) * stride;
    return many > 1 && other >= first && other < first + many * stride && (other - first) % stride === 0;
  }

  // Cells as large as fit into the width, machine beside machine.
  function place() {
    const { world, per_node: node } = shown.anatomy.mesh, many = Math.min(world, MOST), wide = canvas.clientWidth || 800;
    const machines = Math.ceil(many / node);
    let cell = 26;
    for (; cell > 3; cell--) {
      const across = Math.max(1, Math.floor(wide / (node * cell + 5)));
      if (Math.ceil(machines / across) * (cell + 4) <= 340) break;
    }
    const fits = Math.max(1, Math.floor((wide - 5) / cell)), row = Math.min(node, fits), lines = Math.ceil(node / row);
    const across = Math.max(1, Math.floor(wide / (row * cell + 5)));
    cells = { cell, row, lines, across, many, node, height: Math.ceil(machines / across) * (lines * cell + 4) + 2 };
  }
  function spot(rank) {
    const { cell, row, lines, across, node } = cells, machine = Math.floor(rank / node), inside = rank % node;
    return [(machine % across) * (row * cell + 5) + (inside % row) * cell,
      Math.floor(machine / across) * (lines * cell + 4) + Math.floor(inside / row) * cell];
  }
  function rankAt(x, y) {
    const { cell, row, lines, across, node, many } = cells;
    const column = Math.floor(x / (row * cell + 5)), line = Math.floor(y / (lines * cell + 4));
    const inX = Math.floor((x - column * (row * cell + 5)) / cell), inY = Math.floor((y - line * (lines * cell + 4)) / cell);
    if (x < 0 || y < 0 || column >= across || inX >= row || inY >= lines) return -1;
    const rank = (line * across + column) * node + inY * row + inX;
    return rank < many && inY * row + inX < node ? rank : -1;
  }

  function drawMesh() {
    if (!shown || !canvas.clientWidth) return;
    place();
    const ratio = devicePixelRatio || 1, night = matchMedia("(prefers-color-scheme: dark)").matches;
    canvas.style.height = cells.height + "px";
    canvas.width = Math.round(canvas.clientWidth * ratio); canvas.height = Math.round(cells.height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const stages = shown.anatomy.mesh.spans.pipeline[0], gap = cells.cell > 6 ? 1 : 0.5;
    for (let rank = 0; rank < cells.many; rank++) {
      const [x, y] = spot(rank), share = stages > 1 ? index(rank, "pipeline") / (stages - 1) : 0;
      const axis = rank === at ? "" : AXES.find((each) => inGroup(at, rank, each));
      pen.fillStyle = rank === at ? (night ? "#ffffff" : "#000000") : axis ? colors[axis]
        : night ? `hsl(215 14% ${22 + 20 * share}%)` : `hsl(215 22% ${91 - 17 * share}%)`;
      pen.fillRect(x, y, cells.cell - gap, cells.cell - gap);
    }
    const spans = shown.anatomy.mesh.spans;
    document.querySelector("#mesh .legend").replaceChildren(...AXES.filter((axis) => spans[axis][0] > 1).map((axis) => {
      const key = element("span", axis + " " + spans[axis][0]), mark = element("span", undefined, { class: "mark" });
      mark.style.background = colors[axis];
      key.prepend(mark);
      return key;
    }));
    told();
  }

  function experts(each) {
    const first = index(at, "expert") * each;
    return each === 1 ? "expert " + first : "experts " + first + " to " + (first + each - 1);
  }
  // What the chosen rank holds and whom it talks to.
  function told() {
    const { plan, anatomy: { mesh } } = shown, run = plan.run, stage = index(at, "pipeline"), held = mesh.stages[stage];
    const layers = held.map(([, first, last]) => last > first + 1 ? first + " to " + (last - 1) : last > first ? String(first) : "none").join(", ");
    const ends = ["the embedding", "the head"].filter((_, end) => mesh.ends[stage][end]).join(" and ");
    const parts = [
      "layers " + layers + (ends ? ", " + ends : ""),
      mesh.spans.tensor[0] > 1 ? "part " + (index(at, "tensor") + 1) + " of " + mesh.spans.tensor[0] + " of each matrix" : "",
      mesh.spans.context[0] > 1 ? "part " + (index(at, "context") + 1) + " of " + mesh.spans.context[0] + " of each sequence" : "",
      run.model.experts && mesh.spans.expert[0] > 1 ? experts(run.model.experts / mesh.spans.expert[0]) : "",
    ].filter(Boolean).join("; ");
    const memory = plan.memory.stages[stage], all = Object.values(memory).reduce((a, b) => a + b, 0);
    const owners = Object.entries(memory).filter((each) => each[1] > 0).toSorted((a, b) => b[1] - a[1])
      .map(([owner, bytes]) => owner + " " + size(bytes)).join(", ");
    const table = element("table"), body = element("tbody"), head = element("tr"), top = element("thead");
    head.append(...["axis", "place", "with ranks", "sends in a step"].map((text) => element("th", text)));
    top.append(head);
    for (const axis of AXES) {
      const [many, stride] = mesh.spans[axis];
      if (many < 2) continue;
      const first = at - index(at, axis) * stride, sent = Object.values(plan.traffic[axis] || {}).reduce((a, b) => a + b, 0);
      const some = Array.from({ length: Math.min(many, 6) }, (_, n) => first + n * stride).join(", ") + (many > 6 ? ", \u2026" : "");
      const row = element("tr");
      row.append(element("td", axis), element("td", (index(at, axis) + 1) + " of " + many), element("td", some), element("td", sent ? size(sent) : "\u2013"));
      body.append(row);
    }
    table.append(top, body);
    document.querySelector("#mesh .held").replaceChildren(
      element("b", "Rank " + at + ", machine " + Math.floor(at / mesh.per_node)), element("p", parts), element("p", size(all) + ": " + owners),
      ...(body.rows.length ? [table] : []));
  }

  function choose(rank) {
    if (rank < 0 || rank >= cells.many || rank === at) return;
    at = rank;
    drawMesh();
  }
  canvas.addEventListener("pointermove", (e) => {
    const box = canvas.getBoundingClientRect();
    tooltip("");
    choose(rankAt(e.clientX - box.left, e.clientY - box.top));
  });
  canvas.addEventListener("keydown", (e) => {
    const line = cells.across * cells.node, step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -line, ArrowDown: line }[e.key];
    if (!step) return;
    e.preventDefault();
    choose(at + step);
  });
  addEventListener("resize", drawMesh);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMesh);

  // Both are far down the page and take longer than the numbers: drawn when they are in sight.
  const inSight = { model: false, mesh: false }, drawn = { model: null, mesh: null };
  function draw() {
    if (!shown) return;
    if (inSight.model && drawn.model !== shown) drawModel(shown.anatomy.model, shown.plan.run);
    if (inSight.mesh && drawn.mesh !== shown) drawMesh();
    for (const name of ["model", "mesh"]) if (inSight[name]) drawn[name] = shown;
  }
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) inSight[entry.target.id] = entry.isIntersecting;
    draw();
  }, { rootMargin: "300px" });
  watcher.observe(document.getElementById("model"));
  watcher.observe(document.getElementById("mesh"));
  bench.heard((answer) => {
    shown = answer;
    at = Math.min(at, answer.anatomy.mesh.world - 1);
    requestAnimationFrame(draw);
  });
})();
