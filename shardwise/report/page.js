// The interactive parts of the page: tooltips, sortable tables and the timeline. `shardwise.attach(root, signal)` brings a part that
// was put into the page later to life, until the signal says that it is gone.
//
// The timeline is drawn on a canvas from flat arrays, because a browser is slow with tens of thousands of elements. The spans
// of a row are sorted and do not overlap: visible ones are found by binary search, and those that share a pixel are drawn once.
(() => {
  "use strict";
  const tip = document.getElementById("tip");
  function tooltip(text, x, y) {
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
  }
  document.addEventListener("mousemove", (e) => {
    if (e.target.tagName === "CANVAS") return;
    const marked = e.target.closest && e.target.closest("[data-tip]");
    tooltip(marked ? marked.getAttribute("data-tip") : "", e.clientX, e.clientY);
  });

  function sortable(table) {
    const heads = Array.from(table.querySelectorAll("th")), body = table.tBodies[0];
    heads.forEach((head, column) => {
      head.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = Array.from(body.rows).map((row) => {
          const value = row.cells[column].getAttribute("data-v");
          return [value === "" ? null : isNaN(value) ? value : Number(value), row];
        });
        rows.sort((a, b) => {
          if (a[0] === null || b[0] === null) return (a[0] === null) - (b[0] === null);
          const order = typeof a[0] === "number" && typeof b[0] === "number" ? a[0] - b[0]
            : String(a[0]).localeCompare(String(b[0]), undefined, { numeric: true });
          return up ? order : -order;
        });
        rows.forEach((pair) => body.append(pair[1]));
      });
    });
  }

  function duration(ns) {
    const units = [[1e9, "s"], [1e6, "ms"], [1e3, "\u00b5s"], [1, "ns"]];
    const [unit, name] = units.find((each) => ns >= each[0] * 0.9995) || units[3];
    return ns === 0 ? "0" : Number((ns / unit).toPrecision(4)) + " " + name;
  }

  function unpacked(text) {
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
  }

  // The first span of a row that ends at `time` or later.
  function first(row, time) {
    let low = 0, high = row.n;
    while (low < high) { const mid = (low + high) >> 1; if (row.end[mid] < time) low = mid + 1; else high = mid; }
    return low;
  }

  function timeline(place, signal) {
    const data = JSON.parse(place.querySelector("script").textContent);
    const canvas = place.querySelector("canvas"), pen = canvas.getContext("2d");
    const gutter = 62, axis = 24, dark = matchMedia("(prefers-color-scheme: dark)");
    let from = 0, to = data.end, width = 0, height = axis, scheduled = false, printing = false, drag = null;
    const rows = data.rows.map((row, at) => {
      const d = new Uint32Array(unpacked(row.d)), n = d.length / 3, m = row.m && new Int16Array(unpacked(row.m));
      const start = new Float64Array(n), end = new Float64Array(n);
      for (let i = 0, t = 0; i < n; i++) {
        t += d[i]; start[i] = t * data.unit; end[i] = (t + d[n + i]) * data.unit;
      }
      const y = height + (row.label && at ? data.gap : 0);
      height = y + row.high + 1;
      return {
        label: row.label, stream: row.stream, high: row.high, n, y, start, end,
        kind: (i) => d[2 * n + i] >>> 24,
        name: (i) => data.names[d[2 * n + i] & 0xffffff],
        microbatch: (i) => m ? m[i] : -1,
        stage: (i) => m ? m[n + i] : -1,
      };
    });
    height += 4;
    canvas.style.height = height + "px";
    function px(time) { return gutter + (time - from) / (to - from) * (width - gutter); }

    function draw() {
      scheduled = false;
      const night = dark.matches && !printing, ratio = window.devicePixelRatio || 1;
      width = canvas.clientWidth;
      if (!width) return;
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, width, height);
      const family = getComputedStyle(document.body).fontFamily;
      ticks(night, family);
      pen.save();
      pen.beginPath(); pen.rect(gutter, axis - 2, width - gutter, height); pen.clip();
      rows.forEach((row) => spans(row, night, family));
      pen.restore();
      pen.fillStyle = night ? "#9aa2ae" : "#616873";
      pen.font = "12px " + family; pen.textAlign = "left"; pen.textBaseline = "middle";
      let free = -99;
      rows.forEach((row) => {
        if (!row.label || row.y < free) return;
        pen.fillText(row.label, 0, row.y + row.high / 2 + 0.5);
        free = row.y + 13;
      });
    }
    function ticks(night, family) {
      const raw = (to - from) / Math.max(2, (width - gutter) / 110), power = Math.pow(10, Math.floor(Math.log10(raw)));
      const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
      pen.font = "12px " + family; pen.textBaseline = "top"; pen.textAlign = "left";
      for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
        const x = Math.round(px(t)) + 0.5;
        pen.strokeStyle = night ? "#343941" : "#dfe2e7";
        pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height); pen.stroke();
        pen.fillStyle = night ? "#9aa2ae" : "#616873";
        if (x + 46 < width) pen.fillText(duration(Math.round(t)), x + 4, 2);
      }
    }
    function spans(row, night, family) {
      pen.fillStyle = night ? "#20242b" : "#f1f2f4";
      pen.fillRect(gutter, row.y, width - gutter, row.high);
      pen.font = Math.min(12, row.high - 4) + "px " + family; pen.textBaseline = "middle"; pen.textAlign = "center";
      let drawn = -1, color = -1;
      for (let i = first(row, from); i < row.n && row.start[i] <= to; i++) {
        const what = row.kind(i), kind = data.kinds[what], microbatch = row.microbatch(i);
        const a = px(row.start[i]), b = px(row.end[i]), right = Math.max(b, a + 0.6);
        if (right <= drawn && what === color) continue;
        pen.fillStyle = microbatch > 0 && microbatch % 2 ? kind[2] : kind[1];
        pen.fillRect(a, row.y, right - a - (b - a > 3 ? 0.5 : 0), row.high);
        drawn = Math.ceil(right); color = what;
        if (b - a < 12 || row.high < 12) continue;
        const left = Math.max(a, gutter), room = Math.min(b, width) - left;
        const number = microbatch >= 0 ? String(microbatch) : "", name = row.name(i);
        const text = [name + (number && " " + number), number].find((t) => t && t.length * 6.6 + 4 < room);
        if (text) { pen.fillStyle = kind[3]; pen.fillText(text, left + room / 2, row.y + row.high / 2 + 0.5); }
      }
    }
    function redraw() { if (!scheduled) { scheduled = true; requestAnimationFrame(draw); } }
    function show(a, b) {
      const span = Math.min(data.end, Math.max(20, b - a));
      from = Math.max(0, Math.min(a, data.end - span)); to = from + span;
      canvas.dataset.from = Math.round(from); canvas.dataset.to = Math.round(to);
      redraw();
    }
    function zoom(factor, share) {  // the point at this share of the width stays fixed
      const middle = from + (to - from) * share, span = (to - from) * factor;
      show(middle - span * share, middle + span * (1 - share));
    }
    function under(e) {
      const box = canvas.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
      if (x < gutter) return "";
      const time = from + (x - gutter) / (width - gutter) * (to - from), slack = (to - from) / (width - gutter);
      const row = rows.find((r) => y >= r.y && y < r.y + r.high + 1);
      if (!row) return "";
      const i = first(row, time - slack);
      if (i >= row.n || row.start[i] > time + slack) return "";
      const lines = [row.name(i)], where = [];
      if (row.microbatch(i) >= 0) where.push("microbatch " + row.microbatch(i));
      if (row.stage(i) >= 0) where.push("stage " + row.stage(i));
      if (where.length) lines.push(where.join(", "));
      const kind = data.kinds[row.kind(i)][0];
      lines.push(row.stream + (kind === lines[0] || kind === row.stream ? "" : ", " + kind));
      lines.push("starts " + duration(row.start[i]) + ", takes " + duration(row.end[i] - row.start[i]));
      return lines.join("\n");
    }
    function shareAt(e) {
      const box = canvas.getBoundingClientRect();
      return Math.max(0, Math.min(1, (e.clientX - box.left - gutter) / (width - gutter)));
    }
    canvas.addEventListener("pointerdown", (e) => {
      drag = { x: e.clientX, from, to }; canvas.setPointerCapture(e.pointerId); tooltip("");
    });
    ["pointerup", "pointercancel"].forEach((end) => canvas.addEventListener(end, () => { drag = null; }));
    canvas.addEventListener("pointermove", (e) => {
      if (!drag) return tooltip(under(e), e.clientX, e.clientY);
      const moved = (drag.x - e.clientX) / (width - gutter) * (drag.to - drag.from);
      show(drag.from + moved, drag.to + moved);
    });
    canvas.addEventListener("pointerleave", () => tooltip(""));
    canvas.addEventListener("wheel", (e) => {
      if (e.ctrlKey || e.metaKey) { e.preventDefault(); zoom(Math.exp(e.deltaY / 200), shareAt(e)); }
      else if (Math.abs(e.deltaX) > Math.abs(e.deltaY) || e.shiftKey) {
        e.preventDefault();
        const moved = (e.deltaX || e.deltaY) / width * (to - from);
        show(from + moved, to + moved);
      }
    }, { passive: false });
    canvas.addEventListener("dblclick", (e) => zoom(0.4, shareAt(e)));
    canvas.addEventListener("keydown", (e) => {
      const quarter = (to - from) / 4;
      if (e.key === "ArrowLeft") show(from - quarter, to - quarter);
      else if (e.key === "ArrowRight") show(from + quarter, to + quarter);
      else if (e.key === "+" || e.key === "=") zoom(0.5, 0.5);
      else if (e.key === "-") zoom(2, 0.5);
      else if (e.key === "0") show(0, data.end);
      else return;
      e.preventDefault();
    });
    place.querySelectorAll("button").forEach((button) => {
      button.addEventListener("click", () => {
        if (button.value === "all") show(0, data.end); else zoom(Number(button.value), 0.5);
      });
    });
    addEventListener("resize", redraw, { signal });
    dark.addEventListener("change", redraw, { signal });
    addEventListener("beforeprint", () => { printing = true; draw(); }, { signal });
    addEventListener("afterprint", () => { printing = false; draw(); }, { signal });
    draw();
  }

  function attach(root, signal) {
    root.querySelectorAll("table.sortable").forEach(sortable);
    root.querySelectorAll(".timeline").forEach((place) => timeline(place, signal));
  }
  attach(document);
  globalThis.shardwise = { attach, tooltip };
})();
