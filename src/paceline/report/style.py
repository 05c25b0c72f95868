"""The looks of the report: one style sheet, for light and dark, for wide screens and telephones.

Colours are Okabe and Ito's, which colour-blind people can tell apart; the dark variants are lightened for contrast.
"""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --page: #fafaf8; --card: #ffffff; --ink: #1d2129; --soft: #5c6470; --line: #dfe2e6;
  --computing: #009e73; --communicating: #e69f00; --idle: #d5d9df; --step: #1d2129;
  --s0: #d55e00; --s1: #0072b2; --s2: #009e73; --s3: #cc79a7; --s4: #b07a00; --s5: #3b9bd0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171c; --card: #1c2027; --ink: #e8eaee; --soft: #a0a8b4; --line: #343b46;
    --computing: #1fb98c; --communicating: #f0b429; --idle: #3d4552; --step: #ffffff;
    --s0: #f07b2e; --s1: #58aee6; --s2: #1fb98c; --s3: #e29bc3; --s4: #e6b03a; --s5: #8fd0f5;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
p { margin: 0 0 .75rem; max-width: 46rem; }
.soft { color: var(--soft); font-size: .875rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.1rem;
  margin: 0 0 1rem; }
.settings { display: flex; flex-wrap: wrap; gap: .4rem 1.75rem; margin: 1rem 0 0; }
.settings div { display: flex; flex-direction: column; }
.settings dt { color: var(--soft); font-size: .8rem; }
.settings dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .45rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: .85rem; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
tbody tr:last-child td { border-bottom: 0; }
.best td { font-weight: 700; }
.bar { display: flex; align-items: center; gap: .6rem; justify-content: flex-end; }
.bar i { display: block; width: 7rem; height: .5rem; border-radius: 3px; background: var(--idle); overflow: hidden; }
.bar i b { display: block; height: 100%; background: var(--computing); }
.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .5rem; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.charts .card { margin: 0; }
svg { display: block; width: 100%; }
.chart text { fill: var(--soft); font-size: 13px; }
.chart .axis { stroke: var(--soft); } .chart .grid { stroke: var(--line); }
.chart .target { stroke: var(--soft); stroke-dasharray: 5 4; }
.chart .curve { fill: none; stroke-width: 2.25; stroke-linejoin: round; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.25rem; font-size: .875rem; margin: .25rem 0 .75rem; }
.legend span { white-space: nowrap; }
.legend svg { display: inline-block; width: 1.6rem; height: .8rem; vertical-align: -.05rem; margin-right: .4rem; }
.swatch { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem;
  vertical-align: -.08rem; }
.lane { display: grid; grid-template-columns: 7.5rem 1fr; gap: .75rem; align-items: center; margin: .2rem 0; }
.lane.whole { grid-template-columns: 7.5rem 1fr 4rem; }
.lane > span { font-size: .85rem; white-space: nowrap; }
.lane > span:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.lane small { color: var(--soft); font-size: .8rem; }
.lane svg { height: 1.35rem; border-radius: 3px; background: var(--idle); }
.lane.whole svg { height: .8rem; }
.ticks { position: relative; height: 1.2rem; color: var(--soft); font-size: .78rem; }
.ticks span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.ticks span:first-child { transform: none; } .ticks span:last-child { transform: translateX(-100%); }
.computing { fill: var(--computing); background: var(--computing); }
.communicating { fill: var(--communicating); background: var(--communicating); }
.idle { fill: var(--idle); background: var(--idle); }
.legend .lone { width: .4rem; }
.note { margin: .75rem 0 0; }
.step { stroke: var(--step); fill: none; vector-effect: non-scaling-stroke; stroke-width: 1; }
.bad { color: var(--s0); font-weight: 600; }
h4 { font-size: .85rem; color: var(--soft); font-weight: 500; margin: 1rem 0 .35rem; }
@media (max-width: 560px) {
  main { padding: 1.25rem .75rem 3rem; }
  .card { padding: .8rem .75rem; }
  .lane { grid-template-columns: 3.6rem 1fr; gap: .5rem; } .lane.whole { grid-template-columns: 3.6rem 1fr 3.4rem; }
  .lane small { display: none; }
  .bar i { width: 3.5rem; }
}
"""
