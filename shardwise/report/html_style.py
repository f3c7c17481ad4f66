"""The look of the page: quiet type, numbers in columns, light or dark as the reader's system is, always light on paper."""

from __future__ import annotations

from shardwise.report.colors import PAPER_DARK, PAPER_LIGHT

STYLE = """
:root { --paper: PAPER_LIGHT; --ink: #1d2127; --quiet: #616873; --line: #dfe2e7; --soft: #f4f5f7; --alarm: #b3261e; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: PAPER_DARK; --ink: #e6e8ec; --quiet: #9aa2ae; --line: #343941; --soft: #20242b; --alarm: #ff8a80; }
}
* { box-sizing: border-box; }
html { background: var(--paper); color: var(--ink); color-scheme: light dark; }
body { max-width: 1080px; margin: 0 auto; padding: 40px 28px 64px; line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 27px; line-height: 1.2; font-weight: 650; letter-spacing: -0.01em; margin: 0; }
h2 { font-size: 18px; font-weight: 650; margin: 0; }
section { margin-top: 44px; }
p { margin: 0; }
.remark { color: var(--quiet); margin: 2px 0 14px; max-width: 62em; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 22px 28px; margin-top: 28px; }
.figures div { border-top: 2px solid var(--line); padding-top: 8px; }
.figures dt { color: var(--quiet); font-size: 13px; }
.figures dd { margin: 0; font-size: 23px; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.figures dd.note { color: var(--quiet); font-size: 13px; font-weight: 400; line-height: 1.4; }
dl { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
table.wide { width: 100%; }
th { text-align: left; font-weight: 500; color: var(--quiet); font-size: 13px; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th, td { padding: 4px 18px 4px 0; vertical-align: baseline; }
th:last-child, td:last-child { padding-right: 0; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.name { white-space: nowrap; }
td.quiet, .quiet { color: var(--quiet); }
tbody tr:hover { background: var(--soft); }
tr.all td { border-top: 1px solid var(--line); font-weight: 600; }
tr.first td { font-weight: 600; }
tr.beyond td.change { color: var(--alarm); font-weight: 600; }
td.bar { width: 55%; padding-right: 0; }
td.bar svg { display: block; width: 100%; height: 13px; }
th button { all: unset; cursor: pointer; }
th button:hover, th button:focus-visible { color: var(--ink); text-decoration: underline; }
th[aria-sort=ascending] button::after { content: " \\25B4"; }
th[aria-sort=descending] button::after { content: " \\25BE"; }
.only:checked ~ .scroll tbody tr:not(.beyond) { display: none; }
label { color: var(--quiet); font-size: 13px; }
.swatch { width: 11px; height: 11px; margin-right: 7px; vertical-align: -1px; border-radius: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; color: var(--quiet); font-size: 13px; margin: 10px 0 14px; }
svg.chart { display: block; width: 100%; height: auto; font-size: 13px; font-variant-numeric: tabular-nums; }
svg text { fill: var(--ink); font-family: inherit; }
svg text.quiet { fill: var(--quiet); }
svg text.alarm { fill: var(--alarm); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .limit { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 5 3; }
svg [data-tip]:hover { opacity: 0.8; }
.timeline canvas { display: block; width: 100%; cursor: grab; touch-action: pan-y; }
.timeline canvas:active { cursor: grabbing; }
.timeline canvas:focus-visible { outline: 2px solid var(--quiet); outline-offset: 2px; }
.tools { display: flex; gap: 6px; align-items: center; color: var(--quiet); font-size: 13px; margin-bottom: 6px; }
.tools button { font: inherit; color: var(--ink); background: var(--soft); border: 1px solid var(--line);
  border-radius: 5px; padding: 1px 10px; cursor: pointer; }
.tools span { margin-left: 8px; }
.findings { list-style: none; margin: 0; padding: 0; display: grid; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr));
  gap: 16px; }
.finding { border: 1px solid var(--line); border-left: 4px solid var(--alarm); border-radius: 6px; padding: 10px 14px; }
.finding h3 { margin: 0; font-size: 15px; font-weight: 650; }
.finding .gain { color: var(--quiet); font-size: 13px; margin-bottom: 4px; }
.finding .gain b { color: var(--ink); }
.evidence { margin: 6px 0 0; padding-left: 1.1em; color: var(--quiet); font-size: 13px; }
details { margin-top: 6px; }
summary { cursor: pointer; color: var(--quiet); font-size: 13px; }
ul.notes { margin: 12px 0 0; padding-left: 1.2em; max-width: 62em; }
ul.notes li { margin-bottom: 6px; }
#tip { position: fixed; display: none; pointer-events: none; z-index: 9; max-width: 340px; white-space: pre-line;
  background: var(--ink); color: var(--paper); padding: 6px 10px; border-radius: 5px; font-size: 13px; line-height: 1.4; }
@media (max-width: 640px) { body { padding: 24px 16px; } th, td { padding-right: 12px; } }
@media print {
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  section { margin-top: 26px; }
  table { font-size: 9pt; }
  th, td { padding-right: 12px; }
  .keep, tr, h2, .remark { break-inside: avoid; }
  h2, .remark { break-after: avoid; }
  .tools, label, .only { display: none; }
}
""".replace("PAPER_LIGHT", PAPER_LIGHT).replace("PAPER_DARK", PAPER_DARK)
