// What stands beside a plan: changes that would make it faster, the best layouts, and layouts that were kept to compare.
//
// The first two take the planner seconds. They are asked for when no control has been turned for a moment; until they come, what is
// shown of them belongs to the plan before, and their heading ends with dots.
(() => {
  "use strict";
  const bench = globalThis.shardwise.bench, { state, pins } = bench;
  const QUIET = 350;
  const kept = new Map();
  const REPLACED = [{ message: "Another tab of this workbench asked after this one, and the newest question is answered. Change a key to ask again." }];
  let timer = 0, rankedFor = null, shown = null, newest = 0;

  function element(tag, text, attributes) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    return made;
  }
  function signed(share) { return (share >= 0 ? "+" : "\u2212") + Math.abs(100 * share).toFixed(1) + "%"; }
  function gib(bytes) { return (bytes / 2 ** 30).toFixed(1) + " GiB"; }
  function three(value) {
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  }
  function seconds(value) {
    const [unit, name] = [[1, "s"], [1e-3, "ms"], [1e-6, "\u00b5s"]].find((each) => value >= each[0]) || [1e-6, "\u00b5s"];
    return three(value / unit) + " " + name;
  }

  const chips = document.querySelector("#changes .chips");
  async function askBeside() {
    if (state.answers) {  // an exported page knows those of the run that it began with
      const first = Object.keys(bench.keys()).length === 0;
      document.getElementById("changes").hidden = !first;
      if (first) drawChanges(state.changes);
      return rankedFor === null ? (rankedFor = "", drawRanking(state.ranking)) : undefined;
    }
    const asked = JSON.stringify(bench.question()), mine = ++newest;
    const still = () => mine === newest && asked === JSON.stringify(bench.question());
    try {
      const found = await (await bench.post("/api/changes", bench.question())).json();
      if (found.memory_error) bench.memoryError(found.memory_error);
      if (still()) drawChanges(found.changes || [], found.superseded ? REPLACED : found.problems);
      const free = JSON.stringify(Object.entries(bench.keys()).filter(([key]) => !key.startsWith("layout.")).toSorted());
      if (free !== rankedFor && still()) {
        rankedFor = null;  // what is shown is of the question before
        document.getElementById("ranking").classList.add("late");
        document.querySelector("#ranking .remark").textContent = "Searching\u2026";
        const ranked = await (await bench.post("/api/ranking", bench.question())).json();
        if (!ranked.superseded) { rankedFor = free; drawRanking(ranked); }
        else if (still()) drawRanking({ problems: REPLACED });
      }
    } catch { bench.said("the server does not answer; is its command still running?"); }
  }

  function sentence(problems) { return problems.map((problem) => problem.message).join("; "); }

  function drawChanges(changes, problems) {
    const section = document.getElementById("changes");
    section.classList.remove("late");
    section.querySelector("h2").textContent = shown && !shown.plan.fits ? "What would make this fit" : "What would make this faster";
    chips.replaceChildren(...changes.map((each) => {
      const chip = element("button", undefined, { type: "button", class: each.fits ? "chip" : "chip over" });
      chip.append(element("b", each.what), element("span", signed(each.gain) + ", " + each.memory_gib.toFixed(1) + " GiB"
        + (each.fits ? "" : ": does not fit")));
      chip.addEventListener("click", () => bench.change(each.keys));
      return chip;
    }));
    if (!changes.length) {
      chips.replaceChildren(element("p", problems ? sentence(problems) : "No change of one choice does.", { class: "remark" }));
    }
  }

  function drawRanking(found) {
    const section = document.getElementById("ranking");
    section.classList.remove("late");
    const remark = section.querySelector(".remark"), place = section.querySelector(".body");
    if (found.problems) {
      remark.textContent = sentence(found.problems);
      return place.replaceChildren();
    }
    remark.textContent = found.searched.toLocaleString("en") + " layouts of this model, batch and cluster considered, "
      + found.simulated.toLocaleString("en") + " simulated; best first.";
    const table = element("table", undefined, { class: "wide" }), head = element("tr"), body = element("tbody");
    head.append(...["layout", "step", "MFU", "memory", "cost", "limited by"].map((text, at) =>
      element("th", text, at > 0 && at < 5 ? { class: "n" } : {})), element("th", "choose"));
    found.rows.forEach((row) => {
      const line = element("tr"), use = element("button", "Use", { type: "button", class: "use", "aria-label": "Use " + row.layout });
      use.addEventListener("click", () => bench.exchange(row.keys));
      const cell = element("td");
      cell.append(use);
      line.append(element("td", row.layout), element("td", seconds(row.step_seconds), { class: "n" }),
        element("td", (100 * row.mfu).toFixed(1) + "%", { class: "n" }), element("td", gib(row.memory), { class: "n" }),
        element("td", row.usd ? "$" + three(row.usd) : "\u2013", { class: "n" }), element("td", row.binds), cell);
      body.append(line);
    });
    const top = element("thead");
    top.append(head);
    table.append(top, body);
    const scroll = element("div", undefined, { class: "scroll" });
    scroll.append(table);
    place.replaceChildren(scroll);
  }

  // Side by side: a column for each layout that was kept, the last one is what the controls say now.
  const ROWS = [
    ["devices", "devices", three, 0],
    ["memory", "memory.peak", gib, -1],
    ["step", "step_seconds", seconds, -1],
    ["tokens a second", "tokens_per_s", three, 1],
    ["MFU", "mfu", (value) => (100 * value).toFixed(1) + "%", 1],
    ["days", "cost.days", three, -1],
    ["cost", "cost.usd", (value) => value ? "$" + three(value) : "\u2013", -1],
  ];
  function valueAt(plan, path) { return path.split(".").reduce((value, name) => value[name], plan); }

  async function drawCompared() {
    const section = document.getElementById("compared");
    section.hidden = pins.length === 0;
    if (!pins.length || !shown) return;
    const now = shown, columns = [];
    for (const pin of pins) {
      const name = JSON.stringify(pin);
      if (!kept.has(name)) kept.set(name, await bench.answered({ changes: pin, run: state.run }));
      columns.push({ pin, answer: kept.get(name) });
    }
    if (now !== shown) return;
    columns.push({ answer: now });
    const sound = columns.filter((each) => each.answer.plan), first = sound[0].answer.plan;
    const table = element("table", undefined, { class: "wide compare" }), head = element("tr");
    head.append(element("th", "layout"), ...sound.map((each) => {
      const cell = element("th", each.answer.layout);
      if (each.pin) cell.append(columnButton("Use", () => bench.replaceAll(each.pin)), columnButton("Remove", () => unpin(each.pin)));
      else cell.append(element("span", "now", { class: "quiet" }));
      return cell;
    }));
    const body = element("tbody");
    for (const [label, path, words, better] of ROWS) {
      const row = element("tr"), base = valueAt(first, path);
      row.append(element("th", label, { scope: "row" }), ...sound.map((each, n) => {
        const value = valueAt(each.answer.plan, path), share = value / base - 1;
        const cell = element("td", words(value), { "data-quantity": path, "data-value": JSON.stringify(value) });
        if (n && Math.abs(share) > 5e-4 && Number.isFinite(share)) {
          cell.append(element("span", signed(share), { class: better && share * better < 0 ? "worse" : "quiet" }));
        }
        return cell;
      }));
      body.append(row);
    }
    body.append(barRow("memory", sound, (plan) => plan.memory.stages.reduce((a, b) => sum(b) > sum(a) ? b : a), gib),
      barRow("time", sound, (plan) => plan.breakdown, seconds));
    const top = element("thead");
    top.append(head);
    table.append(top, body);
    const scroll = element("div", undefined, { class: "scroll" });
    scroll.append(table);
    section.querySelector(".body").replaceChildren(scroll);
  }
  function sum(parts) { return Object.values(parts).reduce((a, b) => a + b, 0); }
  function columnButton(text, action) {
    const button = element("button", text, { type: "button", class: "use" });
    button.addEventListener("click", action);
    return button;
  }
  // A stacked bar in each column, all on one scale.
  function barRow(label, sound, parts, words) {
    const row = element("tr"), most = Math.max(...sound.map((each) => sum(parts(each.answer.plan))));
    row.append(element("th", label + " by part", { scope: "row" }), ...sound.map((each) => {
      const cell = element("td"), bar = element("div", undefined, { class: "stack" });
      for (const [name, value] of Object.entries(parts(each.answer.plan))) {
        if (value <= 0) continue;
        const piece = element("span", undefined, { "data-tip": name + ": " + words(value) });
        piece.style.width = (100 * value / most).toFixed(2) + "%";
        piece.style.background = state.colors[name] || "#8b8f98";
        bar.append(piece);
      }
      cell.append(bar);
      return cell;
    }));
    return row;
  }
  function unpin(pin) {
    pins.splice(pins.indexOf(pin), 1);
    bench.remember();
    drawCompared();
  }
  bench.actions.pin = () => {
    if (!shown) return bench.said("this run has a mistake; correct it first");
    const keys = bench.keys(), name = JSON.stringify(keys);
    if (pins.some((pin) => JSON.stringify(pin) === name)) return bench.said("this one is kept already; change something to compare with it");
    kept.set(name, shown);
    pins.push(keys);
    bench.remember();
    bench.said("kept; change something to compare with it");
    drawCompared();
  };

  bench.heard((answer) => {
    shown = answer;
    drawCompared();
    document.getElementById("changes").classList.add("late");
    clearTimeout(timer);
    timer = setTimeout(askBeside, QUIET);
  });
})();
