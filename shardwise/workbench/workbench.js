// The workbench: a changed control is a question to the planner, and its answer is drawn at once.
//
// One question is on its way at a time. A control that is turned meanwhile waits, and only its last value is asked: so the page
// follows a slider as fast as the planner answers, and never shows an answer to an older question.
(() => {
  "use strict";
  const state = JSON.parse(document.getElementById("state").textContent);
  const { attach } = globalThis.shardwise;
  const token = new URLSearchParams(location.search).get("token");
  const form = document.getElementById("controls"), results = document.getElementById("results");
  const changes = new Map(), pins = [], listeners = [];
  let attached = new AbortController(), shown = null, busy = false, waiting = false;

  function said(text) { document.getElementById("said").textContent = text; }

  async function post(path, content) {
    return fetch(path, {
      method: "POST", body: JSON.stringify(content),
      headers: { "Content-Type": "application/json", "X-Shardwise-Token": token },
    });
  }
  function question() { return { changes: Object.fromEntries(changes), run: state.run }; }

  // Where answers come from: the server, or, in an exported page, the page itself.
  async function answered(asked) {
    if (!state.answers) return (await post("/api/plan", asked)).json();
    known = known || await unpacked(state.answers);
    const found = known.answers[named(asked.changes)];
    if (found) return restored(found);
    const last = Object.entries(asked.changes).pop();
    if (last && known.answers[named({ [last[0]]: last[1] })]) {
      changes.clear();
      changes.set(...last);
      remember();
      said("this page knows each change by itself; the others are taken back");
      return restored(known.answers[named({ [last[0]]: last[1] })]);
    }
    const many = Object.keys(known.answers).length;
    return { problems: [{ message: "this page holds " + many + " plans around its run, and not this one; `shardwise workbench` has them all" }] };
  }
  let known = null;
  function named(keys) { return JSON.stringify(Object.entries(keys).toSorted((a, b) => a[0] < b[0] ? -1 : 1)); }
  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  }
  function restored(part) {
    if (typeof part === "number") return JSON.parse(known.texts[part]);
    return Object.fromEntries(Object.entries(part).map(([key, inner]) => [key, restored(inner)]));
  }

  async function ask() {
    waiting = true;
    results.dataset.asking = "yes";
    if (busy) return;
    busy = true;
    try {
      while (waiting) {
        waiting = false;
        const began = performance.now();
        try {
          draw(await answered(question()));
        } catch {
          draw({ problems: [{ message: "the server does not answer; is its command still running?" }] });
        }
        // For whoever measures: from the question to the frame that shows the answer.
        requestAnimationFrame(() => { results.dataset.milliseconds = (performance.now() - began).toFixed(1); });
      }
    } finally { busy = false; delete results.dataset.asking; }
  }

  function control(key) { return document.getElementById(key); }
  function valueOf(element) {
    if (element.type === "checkbox") return String(element.checked);
    if (element.type === "range") return element.dataset.values.split(",")[Number(element.value)];
    return element.value;
  }

  function turned(element) {
    const key = element.dataset.key, value = valueOf(element);
    if (element.type === "range") control(key).value = value;
    if (element.type === "number" && value === "") return;
    change({ [key]: value });
  }

  function change(keys) {
    for (const [key, value] of Object.entries(keys)) changes.set(key, value);
    if (changes.get("model.preset") === state.given["model.preset"]) changes.delete("model.preset");
    // A value as it was given is no change, except in a network of another preset, which takes none of the given keys.
    for (const [key, value] of Array.from(changes)) {
      if (state.given[key] === value && !(key.startsWith("model.") && changes.has("model.preset"))) changes.delete(key);
    }
    remember();
    ask();
  }
  // Another layout altogether: of the old one nothing stays.
  function exchange(keys) {
    for (const key of Array.from(changes.keys())) if (key.startsWith("layout.")) changes.delete(key);
    change(keys);
  }
  function replaceAll(keys) {
    changes.clear();
    change(keys);
  }

  // The view is in the address behind "#", which browsers keep to themselves.
  function remember() {
    history.replaceState(null, "", location.pathname + location.search + fragment());
  }
  function fragment() {
    const text = new URLSearchParams([...changes, ...pins.map((pin) => ["pin", new URLSearchParams(pin).toString()])]).toString();
    return text ? "#" + text : "";
  }
  function recall() {
    changes.clear();
    pins.length = 0;
    for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
      if (key === "pin") pins.push(Object.fromEntries(new URLSearchParams(value))); else changes.set(key, value);
    }
  }

  function draw(answer) {
    const wrong = answer.problems || [];
    const place = document.getElementById("problems");
    place.replaceChildren(...wrong.map((problem) => {
      const line = document.createElement("p");
      line.textContent = problem.key ? problem.key + ": " + problem.message : problem.message;
      return line;
    }));
    results.classList.toggle("stale", wrong.length > 0);
    results.dataset.state = wrong.length ? "wrong" : "planned";
    const keys = new Set(wrong.map((problem) => problem.key));
    form.querySelectorAll(".row").forEach((row) => {
      const key = row.querySelector("[data-key]").dataset.key;
      row.classList.toggle("wrong", keys.has(key));
      row.classList.toggle("changed", changes.has(key));
    });
    if (!answer.plan) return showAsked();
    shown = answer;
    attached.abort();
    attached = new AbortController();
    for (const [name, part] of Object.entries(answer.parts)) put(name, part);
    document.getElementById("headline").textContent = answer.layout;
    sayErrors();
    if (answer.parts.timeline) attach(results, attached.signal); else later();
    if (!waiting) show(answer.plan.run);  // what was turned meanwhile stays as it was turned
    listeners.forEach((listener) => listener(answer));
  }

  function put(name, part) {
    const section = document.getElementById(name), remark = section.querySelector(".remark");
    if (remark) remark.textContent = part.remark;
    section.querySelector(".body").innerHTML = part.body;
    section.toggleAttribute("data-empty", name === "notes" && !section.querySelector("li"));
  }
  // The timeline takes as long as all numbers together, and comes after them, unless a control was turned again meanwhile.
  function later() {
    const answer = shown, asked = question();
    requestAnimationFrame(() => setTimeout(async () => {
      if (shown !== answer) return;
      try {
        const part = await (await post("/api/timeline", asked)).json();
        if (shown !== answer || !part.body) return;
        put("timeline", part);
        attach(results, attached.signal);
      } catch { said("the server does not answer; is its command still running?"); }
    }));
  }

  // How right each number is: by the class that it belongs to.
  let memoryError = state.memory_error || 0;
  function apart(ratio) { return (ratio < 1 ? "\u2212" : "+") + Math.abs(100 * (ratio - 1)).toFixed(0) + "%"; }
  function sayErrors() {
    const { step_seconds: step, step_seconds_low: low, step_seconds_high: high } = shown.plan;
    const memory = memoryError ? "8 of 10 measured peaks lie within " + (100 * memoryError).toFixed(1) + "% of the predicted" : "";
    const classes = [
      [/^memory\.(peak|stages)/, memory],
      [/^traffic\./, "counted: what this trainer sends, byte for byte"],
      [/^(step_seconds|breakdown|cost\.(days|usd))/, "8 of 10 measured lie between " + apart(low / step) + " and " + apart(high / step) + " of it"],
      [/^(tokens_per_s|mfu)/, "8 of 10 measured lie between " + apart(step / high) + " and " + apart(step / low) + " of it"],
    ];
    results.querySelectorAll("[data-quantity]").forEach((element) => {
      const found = classes.find((each) => each[0].test(element.dataset.quantity));
      if (found && found[1]) element.dataset.tip = found[1];
    });
    const note = results.querySelector("#figures [data-quantity='memory.peak'] + .note");
    if (note && memory && !note.textContent.includes(memory)) note.textContent += "; " + memory;
  }

  // The controls show the run as it was resolved, but for the one that is being turned.
  function show(run) {
    form.querySelectorAll("[data-key]").forEach((element) => {
      const [section, key] = element.dataset.key.split("."), raw = run[section][key];
      showOne(element, Array.isArray(raw) ? raw.join(",") : String(raw));
    });
  }
  // Of a run with a mistake they show what was asked, which a link or a chip may have brought.
  function showAsked() {
    if (waiting) return;
    form.querySelectorAll("[data-key]").forEach((element) => {
      const key = element.dataset.key, value = changes.has(key) ? changes.get(key) : state.given[key];
      if (value !== undefined) showOne(element, value);
    });
  }
  function showOne(element, value) {
    if (element.type === "checkbox") { element.checked = value === "true"; return; }
    if (element.type === "range") {
      const values = element.dataset.values.split(",").map(Number);
      if (element !== document.activeElement) element.value = Math.max(0, values.findLastIndex((each) => each <= Number(value)));
      element.setAttribute("aria-valuetext", value);
      return;
    }
    if (element === document.activeElement && element.type !== "select-one") return;
    if (element.type === "select-one" && !Array.from(element.options).some((option) => option.value === value)) {
      element.add(new Option(value, value));
    }
    element.value = value;
  }

  form.addEventListener("submit", (e) => e.preventDefault());
  form.addEventListener("input", (e) => { if (e.target.dataset.key) turned(e.target); });
  // The arrows of a number go through the values of its slider.
  form.addEventListener("keydown", (e) => {
    const slider = e.target.type === "number" && e.target.parentElement.querySelector("input[type=range]");
    if (!slider || (e.key !== "ArrowUp" && e.key !== "ArrowDown")) return;
    e.preventDefault();
    const values = slider.dataset.values.split(",").map(Number), now = Number(e.target.value);
    const next = e.key === "ArrowUp" ? values.find((each) => each > now) : values.findLast((each) => each < now);
    if (next === undefined) return;
    e.target.value = String(next);
    turned(e.target);
  });

  function download(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  async function fetched(path, name) {
    const response = await post(path, question());
    if ((response.headers.get("Content-Type") || "").includes("json")) return said("this run has a mistake; correct it first");
    download(name, await response.blob());
    said(name + " is downloaded");
  }
  async function copied(text, what) {
    try { await navigator.clipboard.writeText(text); said(what + " is copied"); } catch { said(text); }
  }
  function runName() { return shown ? shown.plan.run.name : "run"; }

  const actions = {
    reset() { replaceAll({}); },
    link() { return copied(location.href, "the address"); },
    command() {
      // Another preset takes the keys of the old network along with it, as in the plan.
      const kept = Object.entries(state.given).filter(([key]) => !(changes.has("model.preset") && key.startsWith("model.")));
      const keys = Object.entries({ ...Object.fromEntries(kept), ...Object.fromEntries(changes) });
      return copied("shardwise plan " + keys.map(([key, value]) => "--" + key + "=" + quoted(value)).join(" "), "the command");
    },
    run() {
      if (state.answers) return said("an exported page has no server; `Copy command` gives the command of this plan");
      return fetched("/api/run.toml", runName() + ".toml");
    },
    page() {
      if (state.answers) return said("this is a page that opens offline");
      return fetched("/api/page.html", runName() + ".html");
    },
  };
  function quoted(text) { return /^[\w.,:/-]+$/.test(text) ? text : "'" + text.replaceAll("'", "'\\''") + "'"; }
  document.addEventListener("click", (e) => {
    const button = e.target.closest && e.target.closest("[data-action]");
    if (button && actions[button.dataset.action]) actions[button.dataset.action]();
  });
  addEventListener("hashchange", () => { recall(); ask(); });

  // For the parts of the page in other files.
  Object.assign(globalThis.shardwise, {
    bench: { state, post, question, answered, change, exchange, replaceAll, remember, pins, actions, said, download, runName,
      heard(listener) { listeners.push(listener); if (shown) listener(shown); },
      memoryError(share) { memoryError = share; if (shown) sayErrors(); },
      keys() { return Object.fromEntries(changes); } },
  });

  const watching = document.querySelector("a[data-action=watch]");
  if (watching) watching.href = "/watch?token=" + encodeURIComponent(token);
  recall();
  draw(state.first);
  if (changes.size) ask();
  document.body.dataset.ready = "yes";
})();
