"""What moves on the page: the hint under the pointer, tables sorted by a column, and the timeline.

The timeline is drawn on a canvas from flat arrays, because a browser is slow with tens of thousands of elements. Rows hold
spans in order without overlap, so the visible ones are found by bisection; spans that share a pixel are drawn once.
"""

from __future__ import annotations

SCRIPT = """
(function () {
  "use strict";
  var tip = document.getElementById("tip");
  function hint(text, x, y) {
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    var box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
  }
  document.addEventListener("mousemove", function (e) {
    if (e.target.tagName === "CANVAS") return;
    var marked = e.target.closest && e.target.closest("[data-tip]");
    hint(marked ? marked.getAttribute("data-tip") : "", e.clientX, e.clientY);
  });

  document.querySelectorAll("table.sortable").forEach(function (table) {
    var heads = Array.from(table.querySelectorAll("th")), body = table.tBodies[0];
    heads.forEach(function (head, column) {
      head.addEventListener("click", function () {
        var up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        var rows = Array.from(body.rows).map(function (row) {
          var value = row.cells[column].getAttribute("data-v");
          return [value === "" ? null : isNaN(value) ? value : Number(value), row];
        });
        rows.sort(function (a, b) {
          if (a[0] === null || b[0] === null) return (a[0] === null) - (b[0] === null);
          var order = typeof a[0] === "number" && typeof b[0] === "number" ? a[0] - b[0]
            : String(a[0]).localeCompare(String(b[0]), undefined, { numeric: true });
          return up ? order : -order;
        });
        rows.forEach(function (pair) { body.appendChild(pair[1]); });
      });
    });
  });

  function duration(ns) {
    var units = [[1e9, "s"], [1e6, "ms"], [1e3, "\\u00b5s"], [1, "ns"]];
    for (var i = 0; i < 3 && ns < units[i][0] * 0.9995; i++);
    return ns === 0 ? "0" : Number((ns / units[i][0]).toPrecision(4)) + " " + units[i][1];
  }

  function unpacked(text) {
    var raw = atob(text), bytes = new Uint8Array(raw.length);
    for (var i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return bytes.buffer;
  }

  document.querySelectorAll(".timeline").forEach(function (place) {
    var data = JSON.parse(place.querySelector("script").textContent);
    var canvas = place.querySelector("canvas"), pen = canvas.getContext("2d");
    var gutter = 62, axis = 24, from = 0, to = data.end, width = 0, asked = false, printing = false;
    var dark = matchMedia("(prefers-color-scheme: dark)"), y = axis;
    var rows = data.rows.map(function (row, at) {
      var d = new Uint32Array(unpacked(row.d)), n = d.length / 3, m = row.m && new Int16Array(unpacked(row.m));
      var r = { label: row.label, stream: row.stream, high: row.high, n: n };
      r.start = new Float64Array(n); r.end = new Float64Array(n);
      for (var i = 0, t = 0; i < n; i++) {
        t += d[i]; r.start[i] = t * data.unit; r.end[i] = (t + d[n + i]) * data.unit;
      }
      r.kind = function (i) { return d[2 * n + i] >>> 24; };
      r.name = function (i) { return data.names[d[2 * n + i] & 0xffffff]; };
      r.microbatch = function (i) { return m ? m[i] : -1; };
      r.stage = function (i) { return m ? m[n + i] : -1; };
      if (row.label && at) y += data.gap;
      r.y = y; y += row.high + 1;
      return r;
    });
    var height = y + 4;
    canvas.style.height = height + "px";

    function first(row, time) {
      var low = 0, high = row.n;
      while (low < high) { var mid = (low + high) >> 1; if (row.end[mid] < time) low = mid + 1; else high = mid; }
      return low;
    }
    function px(time) { return gutter + (time - from) / (to - from) * (width - gutter); }

    function draw() {
      asked = false;
      var night = dark.matches && !printing, ratio = window.devicePixelRatio || 1;
      width = canvas.clientWidth;
      if (!width) return;
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, width, height);
      var family = getComputedStyle(document.body).fontFamily;
      ticks(night, family);
      pen.save();
      pen.beginPath(); pen.rect(gutter, axis - 2, width - gutter, height); pen.clip();
      rows.forEach(function (row) { spans(row, night, family); });
      pen.restore();
      pen.fillStyle = night ? "#9aa2ae" : "#616873";
      pen.font = "12px " + family; pen.textAlign = "left"; pen.textBaseline = "middle";
      var free = -99;
      rows.forEach(function (row) {
        if (!row.label || row.y < free) return;
        pen.fillText(row.label, 0, row.y + row.high / 2 + 0.5);
        free = row.y + 13;
      });
    }
    function ticks(night, family) {
      var raw = (to - from) / Math.max(2, (width - gutter) / 110), power = Math.pow(10, Math.floor(Math.log10(raw)));
      var step = [1, 2, 5, 10].map(function (m) { return m * power; }).find(function (s) { return s >= raw; });
      pen.font = "12px " + family; pen.textBaseline = "top"; pen.textAlign = "left";
      for (var t = Math.ceil(from / step) * step; t <= to; t += step) {
        var x = Math.round(px(t)) + 0.5;
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
      var drawn = -1, color = -1;
      for (var i = first(row, from); i < row.n && row.start[i] <= to; i++) {
        var what = row.kind(i), kind = data.kinds[what], microbatch = row.microbatch(i);
        var a = px(row.start[i]), b = px(row.end[i]), right = Math.max(b, a + 0.6);
        if (right <= drawn && what === color) continue;
        pen.fillStyle = microbatch > 0 && microbatch % 2 ? kind[2] : kind[1];
        pen.fillRect(a, row.y, right - a - (b - a > 3 ? 0.5 : 0), row.high);
        drawn = Math.ceil(right); color = what;
        if (b - a < 12 || row.high < 12) continue;
        var left = Math.max(a, gutter), room = Math.min(b, width) - left;
        var number = microbatch >= 0 ? String(microbatch) : "", name = row.name(i);
        var text = [name + (number && " " + number), number].find(function (t) {
          return t && t.length * 6.6 + 4 < room;
        });
        if (text) { pen.fillStyle = kind[3]; pen.fillText(text, left + room / 2, row.y + row.high / 2 + 0.5); }
      }
    }
    function redraw() { if (!asked) { asked = true; requestAnimationFrame(draw); } }
    function show(a, b) {
      var span = Math.min(data.end, Math.max(20, b - a));
      from = Math.max(0, Math.min(a, data.end - span)); to = from + span;
      canvas.dataset.from = Math.round(from); canvas.dataset.to = Math.round(to);
      redraw();
    }
    function zoom(factor, share) {
      var middle = from + (to - from) * share, span = (to - from) * factor;
      show(middle - span * share, middle + span * (1 - share));
    }
    function under(e) {
      var box = canvas.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
      if (x < gutter) return "";
      var time = from + (x - gutter) / (width - gutter) * (to - from), slack = (to - from) / (width - gutter);
      var row = rows.find(function (r) { return y >= r.y && y < r.y + r.high + 1; });
      if (!row) return "";
      var i = first(row, time - slack);
      if (i >= row.n || row.start[i] > time + slack) return "";
      var lines = [row.name(i)], where = [];
      if (row.microbatch(i) >= 0) where.push("microbatch " + row.microbatch(i));
      if (row.stage(i) >= 0) where.push("stage " + row.stage(i));
      if (where.length) lines.push(where.join(", "));
      var kind = data.kinds[row.kind(i)][0];
      lines.push(row.stream + (kind === lines[0] || kind === row.stream ? "" : ", " + kind));
      lines.push("starts " + duration(row.start[i]) + ", takes " + duration(row.end[i] - row.start[i]));
      return lines.join("\\n");
    }
    function share(e) {
      var box = canvas.getBoundingClientRect();
      return Math.max(0, Math.min(1, (e.clientX - box.left - gutter) / (width - gutter)));
    }
    var held = null;
    canvas.addEventListener("pointerdown", function (e) {
      held = { x: e.clientX, from: from, to: to }; canvas.setPointerCapture(e.pointerId); hint("");
    });
    canvas.addEventListener("pointerup", function () { held = null; });
    canvas.addEventListener("pointercancel", function () { held = null; });
    canvas.addEventListener("pointermove", function (e) {
      if (!held) return hint(under(e), e.clientX, e.clientY);
      var moved = (held.x - e.clientX) / (width - gutter) * (held.to - held.from);
      show(held.from + moved, held.to + moved);
    });
    canvas.addEventListener("pointerleave", function () { hint(""); });
    canvas.addEventListener("wheel", function (e) {
      if (e.ctrlKey || e.metaKey) { e.preventDefault(); zoom(Math.exp(e.deltaY / 200), share(e)); }
      else if (Math.abs(e.deltaX) > Math.abs(e.deltaY) || e.shiftKey) {
        e.preventDefault();
        var moved = (e.deltaX || e.deltaY) / width * (to - from);
        show(from + moved, to + moved);
      }
    }, { passive: false });
    canvas.addEventListener("dblclick", function (e) { zoom(0.4, share(e)); });
    canvas.addEventListener("keydown", function (e) {
      var quarter = (to - from) / 4;
      if (e.key === "ArrowLeft") show(from - quarter, to - quarter);
      else if (e.key === "ArrowRight") show(from + quarter, to + quarter);
      else if (e.key === "+" || e.key === "=") zoom(0.5, 0.5);
      else if (e.key === "-") zoom(2, 0.5);
      else if (e.key === "0") show(0, data.end);
      else return;
      e.preventDefault();
    });
    place.querySelectorAll("button").forEach(function (button) {
      button.addEventListener("click", function () {
        if (button.value === "all") show(0, data.end); else zoom(Number(button.value), 0.5);
      });
    });
    addEventListener("resize", redraw);
    dark.addEventListener("change", redraw);
    addEventListener("beforeprint", function () { printing = true; draw(); });
    addEventListener("afterprint", function () { printing = false; draw(); });
    draw();
  });
})();
"""
