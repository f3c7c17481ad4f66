// Pictures: the charts of a plan as one file.
(() => {
  "use strict";
  const bench = globalThis.shardwise.bench;

  // A chart of the page as an image of its own, with the colours that the page gives it.
  function imageOf(svg) {
    const copy = svg.cloneNode(true), box = svg.viewBox.baseVal, look = getComputedStyle(document.documentElement);
    const value = (name) => look.getPropertyValue(name).trim();
    const style = document.createElementNS("http://www.w3.org/2000/svg", "style");
    style.textContent = `svg { font: 13px ${getComputedStyle(document.body).fontFamily.replaceAll('"', "'")}; }
      text { fill: ${value("--ink")}; } text.quiet { fill: ${value("--quiet")}; } text.alarm { fill: ${value("--alarm")}; }
      .grid { stroke: ${value("--line")}; } .limit { stroke: ${value("--ink")}; stroke-width: 1.5; stroke-dasharray: 5 3; }`;
    copy.prepend(style);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("width", box.width);
    copy.setAttribute("height", box.height);
    const image = new Image();
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
    return image.decode().then(() => ({ image, width: box.width, height: box.height }));
  }

  bench.actions.picture = async () => {
    const look = getComputedStyle(document.documentElement), family = getComputedStyle(document.body).fontFamily;
    const parts = [];
    for (const name of ["memory", "time"]) {
      const svg = document.querySelector("#" + name + " svg.chart");
      if (svg) parts.push({ title: document.querySelector("#" + name + " h2").textContent, ...await imageOf(svg) });
    }
    const steps = document.querySelector("#timeline canvas");
    if (steps) parts.push({ title: "One step", image: steps, width: 1024, height: 1024 * steps.height / steps.width });
    const gap = 46, width = 1104, height = 96 + parts.reduce((sum, part) => sum + part.height + gap, 0);
    const canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
    canvas.width = 2 * width; canvas.height = 2 * height;
    pen.scale(2, 2);
    pen.fillStyle = look.getPropertyValue("--paper"); pen.fillRect(0, 0, width, height);
    pen.fillStyle = look.getPropertyValue("--ink");
    pen.font = "650 22px " + family; pen.fillText(bench.runName(), 40, 42);
    pen.font = "14px " + family;
    const figures = Array.from(document.querySelectorAll("#figures .figures > div"), (each) =>
      each.querySelector("dt").textContent + " " + each.querySelector("dd").textContent);
    pen.fillText(figures.slice(0, 7).join("   "), 40, 68, width - 80);
    let y = 96;
    for (const part of parts) {
      pen.font = "650 16px " + family; pen.fillText(part.title, 40, y + 12);
      pen.drawImage(part.image, 40, y + 24, part.width, part.height);
      y += part.height + gap;
    }
    const blob = await new Promise((done) => { canvas.toBlob(done, "image/png"); });
    bench.download(bench.runName() + ".png", blob);
    bench.said(bench.runName() + ".png is downloaded");
  };
})();
