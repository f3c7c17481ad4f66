// Runs on charts as they grow. The page asks twice a second what is new; the server sends points for the range in sight only, the
// lowest and the highest of each pixel column, so that a run of a million steps is drawn as fast as one of a thousand.
(() => {
  "use strict";
  const token = new URLSearchParams(location.search).get("token");
  const results = document.getElementById("results"), list = document.getElementById("runs");
  const COLORS = ["#306bac", "#d8843a", "#20a583", "#ad385a", "#7350c8", "#8a8200", "#5bb8fe", "#e391d2"];
  const CHARTS = [
    { title: "Loss", metrics: ["loss", "eval_loss"] },
    { title: "Gradient norm", metrics: ["grad_norm"] },
    { title: "Tokens a second", metrics: ["tokens_per_s"] },
    { title: "MFU", metrics: ["mfu"] },
    { title: "Seconds of a step", metrics: ["seconds"] },
    { title: "Memory, GiB", metrics: ["memory_gib"] },
    { title: "Learning rate", metrics: ["lr"] },
  ];
  const HIDDEN = /^(tokens|slowest|slowest_ratio|goodput|total_seconds|lost_.*)$/;
  const EVENTS = { saved: "checkpoint", training: "start", bad: "bad step", failed: "failure", hang: "hang" };
  const PAUSE = 500;
  let seen = {}, chosen = null, low = null, high = null, last = null, charts = [], shape = "", timer = 0, stopped = false;

  async function ask() {
    const wide = charts.length ? charts[0].holder.clientWidth : innerWidth / 3;
    const question = { seen, low, high, columns: Math.round(Math.min(1600, Math.max(200, wide / 1.5))) };
    if (chosen) question.runs = [...chosen];
    const response = await fetch("/api/follow", {
      method: "POST", body: JSON.stringify(question),
      headers: { "Content-Type": "application/json", "X-Shardwise-Token": token },
    });
    return response.json();
  }

  async function follow(again) {
    clearTimeout(timer);
    let pause = PAUSE;
    try {
      if (again) seen = {};
      const began = performance.now();
      const answer = await ask();
      const wrong = answer.problems || [];
      if (!answer.unchanged && wrong.length === 0) {
        seen = answer.versions;
        last = answer;
        draw();
        // For whoever measures: from the question to the frame that shows the answer.
        requestAnimationFrame(() => setTimeout(() => { results.dataset.milliseconds = (performance.now() - began).toFixed(1); }));
        if (answer.runs.some((run) => run.reading)) pause = 20;
      }
      stopped = false;
      say(wrong.map((problem) => problem.message).join("; "));
    } catch {
      if (!stopped) say("the server does not answer; is its command still running?");
      stopped = true;
    }
    clearTimeout(timer);
    timer = setTimeout(follow, document.hidden ? 4 * PAUSE : pause);
  }
  function say(text) {
    const place = document.getElementById("said");
    if (place.textContent !== text) place.textContent = text;
  }

  function element(tag, text, attributes) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    return made;
  }
  function color(name) { return COLORS[last.runs.findIndex((run) => run.name === name) % COLORS.length]; }
  function shownRuns() { return last.runs.filter((run) => !chosen || chosen.has(run.name)); }

  function draw() {
    drawRuns();
    drawLatest();
    drawCharts();
    drawRanks();
    drawSamples();
    drawEvents();
    const points = last.runs.reduce((sum, run) => sum + run.points, 0);
    document.getElementById("headline").textContent = last.runs.length === 0 ? "no run is here yet"
      : points.toLocaleString("en") + " points" + (last.runs.some((run) => run.reading) ? ", still reading" : "")
      + (last.left_out ? "; the first " + last.runs.length + " runs by name, " + last.left_out.toLocaleString("en") + " more are not shown" : "");
    document.body.dataset.ready = "yes";
  }

  function drawRuns() {
    const names = last.runs.map((run) => run.name + run.state).join("\n");
    if (list.dataset.names === names) return;
    list.dataset.names = names;
    list.replaceChildren(...last.runs.map((run, at) => {
      const row = element("div", undefined, { class: "run" });
      const box = element("input", undefined, { type: "checkbox", id: "run-" + at });
      box.checked = !chosen || chosen.has(run.name);
      box.addEventListener("change", () => {
        chosen = new Set(Array.from(list.querySelectorAll("input")).filter((each) => each.checked)
          .map((each) => last.runs[Number(each.id.slice(4))].name));
        if (chosen.size === 0) chosen.add(run.name);
        follow(true);
      });
      const label = element("label", run.name, { for: "run-" + at });
      const mark = element("span", undefined, { class: "mark" });
      mark.style.background = color(run.name);
      label.prepend(mark);
      const link = element("a", "plan", {
        href: "/?token=" + encodeURIComponent(token) + "&run=" + encodeURIComponent(run.name), "aria-label": "plan of " + run.name,
      });
      row.append(box, label, element("span", run.state, { class: "quiet" }), link);
      return row;
    }));
  }

  function digits(value) {
    if (typeof value !== "number") return value === undefined ? "\u2013" : String(value);
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
    if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
    if (size >= 1e4) return (value / 1e3).toPrecision(3) + " k";
    return size !== 0 && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  }
  function percent(value) { return typeof value === "number" ? (100 * value).toFixed(1) + "%" : "\u2013"; }
  function span(seconds) {
    if (!Number.isFinite(seconds)) return "\u2013";
    if (seconds < 60) return seconds.toFixed(0) + " s";
    if (seconds < 3600) return (seconds / 60).toFixed(1) + " min";
    return seconds < 172800 ? (seconds / 3600).toFixed(1) + " h" : (seconds / 86400).toFixed(1) + " days";
  }

  // The key numbers of the first run in sight, each beside what was planned.
  function drawLatest() {
    const run = shownRuns()[0];
    const place = document.querySelector("#latest .body");
    if (!run) return place.replaceChildren(element("p", "Nothing is here yet; the page shows a run as soon as one begins."));
    const now = run.latest, plan = last.planned[run.name] || {}, steps = plan.steps;
    const planned = (key, words) => plan[key]
      ? "planned: " + words(plan[key][0]) + (plan[key].length > 1 ? ", 80% interval " + words(plan[key][1]) + " to " + words(plan[key][2]) : "")
      : "";
    const left = steps > run.step && now.seconds ? "about " + span((steps - run.step) * now.seconds) + " left" : "";
    const losses = run.goodput ? Object.entries(run.goodput.lost).filter((each) => each[1] > 0.01 * run.goodput.total)
      .toSorted((a, b) => b[1] - a[1]).slice(0, 3).map(([name, lost]) => name + " " + span(lost)).join(", ") : "";
    const figures = [
      ["step", digits(run.step) + (steps ? " of " + digits(steps) : ""), run.state === "training" ? left : run.state],
      ["loss", digits(now.loss), now.eval_loss === undefined ? "" : "evaluated: " + digits(now.eval_loss)],
      ["tokens a second", digits(now.tokens_per_s), planned("tokens_per_s", digits)],
      ["MFU", percent(now.mfu), planned("mfu", percent)],
      ["memory", digits(now.memory_gib) + " GiB", planned("memory_gib", (value) => digits(value) + " GiB")],
      ["goodput", run.goodput ? percent(run.goodput.share) : "\u2013",
        run.goodput ? "of " + span(run.goodput.total) + (losses ? "; lost: " + losses : "") : ""],
    ];
    const rows = figures.map(([label, value, note]) => {
      const box = element("div");
      box.append(element("dt", label), element("dd", value), element("dd", note, { class: "note" }));
      return box;
    });
    const figure = element("dl", undefined, { class: "figures" });
    figure.append(...rows);
    place.replaceChildren(...(last.runs.length > 1 ? [element("p", run.name, { class: "remark" })] : []), figure);
  }

  function metricsInSight() {
    const present = new Set(shownRuns().flatMap((run) => Object.keys(last.series[run.name] || {})));
    const known = new Set(CHARTS.flatMap((chart) => chart.metrics));
    const more = [...present].filter((key) => !known.has(key) && !HIDDEN.test(key))
      .map((key) => ({ title: key.replaceAll("_", " "), metrics: [key] }));
    return [...CHARTS, ...more].filter((chart) => chart.metrics.some((key) => present.has(key)));
  }

  function lines(chart) {
    return shownRuns().flatMap((run) => chart.metrics.filter((key) => (last.series[run.name] || {})[key])
      .map((key) => ({ run: run.name, key, points: last.series[run.name][key] })));
  }

  function drawCharts() {
    const wanted = metricsInSight();
    const now = JSON.stringify(wanted.map((chart) => lines(chart).map((line) => [line.run, line.key])));
    if (now !== shape) {
      shape = now;
      charts.forEach((each) => each.plot.destroy());
      const place = document.querySelector("#charts .body");
      place.replaceChildren();
      charts = wanted.map((chart) => build(chart, place));
    }
    charts.forEach((each) => each.plot.setData(joined(lines(each.chart))));
  }
  function joined(found) { return uPlot.join(found.map((line) => line.points)); }

  function spaced(key) { return key.replaceAll("_", " "); }
  function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

  function build(chart, place) {
    const found = lines(chart);
    const box = element("figure");
    const caption = element("figcaption", chart.title);
    const holder = element("div", undefined, { role: "img", "aria-label": chart.title + " by step" });
    box.append(caption, holder);
    place.append(box);
    const axis = { stroke: () => css("--quiet"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false } };
    const plot = new uPlot({
      width: Math.max(260, holder.clientWidth), height: 220, padding: [null, 18, null, null],
      cursor: { sync: { key: "runs" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      legend: { show: true },
      scales: {
        y: { range: (u, a, b) => reach(chart, a, b) },
        x: { time: false, range: (u, a, b) => [low === null ? a : low, high === null ? b : high] },
      },
      axes: [
        { ...axis, size: 34, values: (u, ticks) => ticks.map(digits) },
        { ...axis, size: 58, values: (u, ticks) => ticks.map(digits) },
      ],
      series: [{ label: "step" }, ...found.map((line) => ({
        label: last.runs.length === 1 ? spaced(line.key) : line.run + (chart.metrics.length > 1 ? " " + spaced(line.key) : ""),
        stroke: color(line.run), width: line.key === "eval_loss" ? 2 : 1.25, dash: line.key === "eval_loss" ? [6, 4] : undefined,
        points: { show: line.points[0].length < 40 }, value: (u, value) => value === null ? "\u2013" : digits(value),
      }))],
      hooks: { draw: [(u) => marks(u, chart)], setSelect: [(u) => zoom(u)] },
    }, joined(found), holder);
    holder.addEventListener("dblclick", whole);
    return { chart, plot, holder };
  }

  // From the lowest to the highest number, what was planned among them.
  function reach(chart, a, b) {
    const planned = shownRuns().flatMap((run) => ((last.planned[run.name] || {})[chart.metrics[0]] || []).slice(0, 1));
    const all = [a, b, ...planned].filter((value) => Number.isFinite(value));
    return all.length ? uPlot.rangeNum(Math.min(...all), Math.max(...all), 0.1, true) : [0, 1];
  }

  // What was planned, as a dashed line within its interval; checkpoints, starts and bad steps as ticks at the bottom.
  function marks(u, chart) {
    const pen = u.ctx, { left, top, width, height } = u.bbox, ratio = devicePixelRatio || 1;
    pen.save();
    pen.beginPath(); pen.rect(left, top, width, height); pen.clip();
    for (const run of shownRuns()) {
      const plan = (last.planned[run.name] || {})[chart.metrics[0]];
      if (plan) {
        pen.strokeStyle = pen.fillStyle = color(run.name);
        if (plan.length > 1) {
          const a = u.valToPos(plan[2], "y", true), b = u.valToPos(plan[1], "y", true);
          pen.globalAlpha = 0.1; pen.fillRect(left, a, width, b - a); pen.globalAlpha = 1;
        }
        const y = u.valToPos(plan[0], "y", true);
        pen.setLineDash([4 * ratio, 4 * ratio]); pen.lineWidth = ratio;
        pen.beginPath(); pen.moveTo(left, y); pen.lineTo(left + width, y); pen.stroke();
        pen.setLineDash([]);
      }
      for (const event of last.events[run.name] || []) {
        if (typeof event.step !== "number" || !EVENTS[event.what]) continue;
        const x = u.valToPos(event.step, "x", true), bad = event.what === "bad" || event.what === "hang";
        pen.fillStyle = bad ? css("--alarm") : color(run.name);
        pen.fillRect(x - ratio / 2, bad ? top : top + height - 7 * ratio, ratio, bad ? height : 7 * ratio);
      }
    }
    pen.restore();
  }

  function zoom(u) {
    if (u.select.width < 4) return;
    low = u.posToVal(u.select.left, "x");
    high = u.posToVal(u.select.left + u.select.width, "x");
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    follow(true);
  }
  function whole() { low = high = null; follow(true); }

  function drawRanks() {
    const section = document.getElementById("ranks"), run = shownRuns().find((each) => last.ranks[each.name].seconds.length);
    section.hidden = !run;
    if (!run) return;
    const { steps, seconds } = last.ranks[run.name], now = seconds[seconds.length - 1];
    const middle = now.toSorted((a, b) => a - b)[Math.floor(now.length / 2)] || 1;
    const order = now.map((taken, rank) => [taken, rank]).toSorted((a, b) => b[0] - a[0]);
    const shown = order.slice(0, 32).toSorted((a, b) => a[1] - b[1]), most = order[0][0] || 1;
    section.querySelector(".remark").textContent = run.name + ", step " + steps[steps.length - 1] + ": rank " + order[0][1] + " computes "
      + (order[0][0] / middle).toFixed(2) + " times as long as the median rank"
      + (order.length > shown.length ? "; the slowest " + shown.length + " of " + order.length + " are shown." : ".");
    section.querySelector(".body").replaceChildren(...shown.map(([taken, rank]) => {
      const row = element("div", undefined, { class: "rank" });
      const bar = element("span", undefined, { class: "fill" + (taken > 1.2 * middle ? " slow" : "") });
      bar.style.width = (100 * taken / most).toFixed(1) + "%";
      const track = element("span", undefined, { class: "track" });
      track.append(bar);
      row.append(element("span", "rank " + rank), track, element("span", (taken < 100 ? taken.toPrecision(3) : taken.toFixed(0)) + " s"));
      return row;
    }));
  }

  // How the network continues the same prompts, evaluation by evaluation, the newest first.
  function drawSamples() {
    const section = document.getElementById("samples");
    const run = shownRuns().find((each) => (last.samples[each.name] || []).length);
    section.hidden = !run;
    if (!run) return;
    const samples = last.samples[run.name], newest = samples[samples.length - 1].step, now = run.name + " " + newest;
    if (section.dataset.now === now) return; // what someone opened stays open
    section.dataset.now = now;
    section.querySelector(".remark").textContent = run.name + ": prompts from the validation set in grey, continued by the model.";
    section.querySelector(".body").replaceChildren(...samples.toReversed().map(({ step, texts }) => {
      const box = element("details"), rows = texts.map(({ prompt, text }) => {
        const row = element("pre", undefined, { class: "sample", tabindex: "0" });
        row.append(element("span", prompt, { class: "quiet" }), element("span", text));
        return row;
      });
      box.open = step === newest;
      box.append(element("summary", "step " + digits(step)), ...rows);
      return box;
    }));
  }

  function drawEvents() {
    const all = shownRuns().flatMap((run) => (last.events[run.name] || []).map((event) => ({ ...event, run: run.name })));
    const rows = all.toSorted((a, b) => b.time - a.time).slice(0, 60).map((event) => {
      const { time, what, run, command: _, heard: __, ...rest } = event;
      const row = element("tr");
      const detail = Object.entries(rest).filter((each) => each[1] !== "").map(([key, value]) =>
        key === "why" ? value : key === "seconds" ? digits(value) + " s" : key + " " + digits(value)).join(", ");
      row.append(element("td", new Date(1000 * time).toLocaleString("en-GB")), element("td", EVENTS[what] || what),
        element("td", detail), element("td", last.runs.length > 1 ? run : "", { class: "quiet" }));
      return row;
    });
    const table = element("table"), head = element("thead"), body = element("tbody"), row = element("tr");
    row.append(...["time", "event", "details", "run"].map((text) => element("th", text)));
    head.append(row);
    body.append(...rows);
    table.append(head, body);
    const scroll = element("div", undefined, { class: "scroll" });
    scroll.append(table);
    document.querySelector("#events .body").replaceChildren(rows.length ? scroll : element("p", "None.", { class: "remark" }));
  }

  document.addEventListener("click", (e) => { if (e.target.closest && e.target.closest("[data-action=whole]")) whole(); });
  addEventListener("resize", () => charts.forEach((each) => each.plot.setSize({ width: Math.max(260, each.holder.clientWidth), height: 220 })));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((each) => each.plot.redraw()));
  follow(true);
})();
