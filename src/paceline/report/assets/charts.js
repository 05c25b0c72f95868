// The charts of the report, drawn by uPlot: curves over seconds, samples and rounds, and the histograms of delays.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const DASHES = [[], [9, 4], [12, 3, 3, 3], [3, 3], [6, 2], [2, 4]];
  const COLOURS = 6;
  const HEIGHT = 260;
  const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((factor) => factor * 10 ** power));
  const drawn = [];

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const round = (value, digits) => value.toLocaleString("en", { maximumSignificantDigits: digits });
  const scaled = (value, steps, base) => {
    let unit = 0;
    while (Math.abs(value) >= base && unit < steps.length - 1) { value /= base; unit++; }
    return `${round(value, 4)}${steps[unit]}`;
  };
  const WORDS = {
    seconds: (value) => `${round(value, 4)} s`,
    samples: (value) => scaled(value, ["", "k", "M", "G"], 1000),
    rounds: (value) => Math.round(value).toLocaleString("en"),
    steps: (value) => round(value, 4),
    number: (value) => round(value, 4),
    percent: (value) => `${round(100 * value, 4)} %`,
    bytes: (value) => scaled(value, [" B", " kB", " MB", " GB", " TB"], 1000),
  };
  const said = (unit) => (_, value) => value === null || value === undefined ? "" : WORDS[unit](value);

  // Curves over different points in one table, as uPlot wants them; time and samples begin at zero, drawn or not.
  const aligned = (curves) => uPlot.join([[[0]], ...curves.map(({ x, y }) => [x, y])]);

  // A dashed line with its name: a target, the limit, the ideal. The name of an upright one stands where no curve ends.
  function mark({ x, y, text, high }) {
    return (plot) => {
      const { ctx, bbox } = plot, ratio = devicePixelRatio;
      const place = x !== undefined ? plot.valToPos(x, "x", true) : plot.valToPos(y, "y", true);
      const upright = x !== undefined;
      const [low, long] = upright ? [bbox.left, bbox.width] : [bbox.top, bbox.height];
      if (place < low || place > low + long) return; // zoomed away
      ctx.save();
      ctx.strokeStyle = colour("--ink");
      ctx.lineWidth = 1.25 * ratio;
      ctx.setLineDash([5 * ratio, 4 * ratio]);
      ctx.beginPath();
      if (upright) { ctx.moveTo(place, bbox.top); ctx.lineTo(place, bbox.top + bbox.height); }
      else { ctx.moveTo(bbox.left, place); ctx.lineTo(bbox.left + bbox.width, place); }
      ctx.stroke();
      ctx.font = `${12 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "middle";
      ctx.textAlign = "left";
      const wide = ctx.measureText(text).width, tall = 16 * ratio, air = 4 * ratio;
      // Above the line, where curves seldom are, if there is room.
      const below = place - tall - air < bbox.top ? 1 : -1;
      // Below it, they come from the left and from far below: there the name covers none of them.
      let left = below === 1 ? bbox.left + 2 * air : bbox.left + bbox.width - wide - 2 * air;
      let middle = place + below * (tall / 2 + air);
      if (upright) {
        left = place + air + wide < bbox.left + bbox.width ? place + air : place - 2 * air - wide;
        middle = high ? bbox.top + tall / 2 : bbox.top + bbox.height - tall / 2 - air;
      }
      ctx.fillStyle = colour("--card");
      ctx.globalAlpha = 0.8;
      ctx.fillRect(left - air / 2, middle - tall / 2, wide + air, tall);
      ctx.globalAlpha = 1;
      ctx.fillStyle = colour("--ink");
      ctx.fillText(text, left, middle);
      ctx.restore();
    };
  }

  // Everything that is drawn is inside the axes, marks included, and a little air above and below.
  function range(marks, atLeast) {
    return (_, low, high) => {
      const values = [low, high, ...marks.map((each) => each.y), ...atLeast].filter((value) => Number.isFinite(value));
      if (!values.length) return [0, 1];
      const [least, most] = [Math.min(...values), Math.max(...values)];
      const air = (most - least || Math.abs(most) || 1) * 0.05;
      return [least === 0 ? 0 : least - air, most + air];
    };
  }

  function axis(label, unit, x) {
    return {
      label, labelSize: 22, labelGap: 0, labelFont: "12px system-ui, sans-serif", font: "12px system-ui, sans-serif",
      stroke: () => colour("--soft"), grid: { stroke: () => colour("--line"), width: 1 },
      ticks: { stroke: () => colour("--line"), width: 1, size: 5 },
      size: x ? 34 : 58, gap: 4, space: unit === "steps" ? 26 : x ? 70 : 34,
      values: (_, values) => values.map((value) => WORDS[unit](value)),
      ...(unit === "rounds" || unit === "steps" ? { incrs: WHOLE } : {}),
    };
  }

  // A piece of a curve for the legend, with the dashes that it has in the chart.
  function sample(place) {
    const ink = `var(--s${place % COLOURS})`, stops = [];
    let at = 0;
    DASHES[place % DASHES.length].forEach((length, part) => {
      stops.push(`${part % 2 ? "transparent" : ink} ${at}px ${at + length}px`);
      at += length;
    });
    return stops.length ? `repeating-linear-gradient(90deg, ${stops.join(", ")})` : ink;
  }

  function line(name, place, unit) {
    return {
      place, label: name, value: said(unit), stroke: () => colour(`--s${place % COLOURS}`), width: 2, spanGaps: true,
      dash: DASHES[place % DASHES.length], points: { show: false },
    };
  }

  function chart(element, { title, x, y, series, table, marks = [], atLeast = [], sync }) {
    const width = () => Math.max(element.clientWidth, 200);
    const options = {
      width: width(), height: HEIGHT, padding: [10, 22, 0, 0],
      cursor: { sync: sync ? { key: sync } : undefined, drag: { x: true, y: false }, points: { size: 7 } },
      scales: {
        x: { time: false, range: x.range || ((_, low, high) => [low, high > low ? high : low + 1]) },
        y: { range: range(marks, atLeast) },
      },
      axes: [axis(x.label, x.unit, true), axis(y.label, y.unit, false)],
      series: [{ label: x.label, value: said(x.unit) }, ...series],
      hooks: { draw: marks.map(mark) },
    };
    element.setAttribute("role", "img");
    element.setAttribute("aria-label", title);
    const plot = new uPlot(options, table, element);
    element.querySelectorAll(".u-legend .u-marker").forEach((marker, place) => {
      // The first one belongs to the x axis, which has no curve.
      const drawn = series[place - 1];
      marker.style.background = drawn && drawn.place !== undefined ? sample(drawn.place) : "none";
    });
    new ResizeObserver(() => {
      if (plot.width !== width()) plot.setSize({ width: width(), height: HEIGHT });
    }).observe(element);
    drawn.push(plot);
  }

  function empty(element, words) {
    element.classList.add("empty");
    element.textContent = words;
  }

  // One curve a run, of two of its fields.
  function overRuns(element, part, [xName, xLabel], [yName, yLabel, yUnit], more = {}) {
    const runs = data.runs
      .map((run, place) => ({ name: run.name, place, x: run[part][xName], y: run[part][yName] }))
      .filter(({ y }) => y.some((value) => value !== null));
    if (!runs.length) return empty(element, more.nothing);
    return chart(element, {
      title: `${yLabel} over ${xLabel}`, x: { label: xLabel, unit: xName }, y: { label: yLabel, unit: yUnit },
      series: runs.map(({ name, place }) => line(name, place, yUnit)), table: aligned(runs), ...more,
    });
  }

  const target = data.target === null ? [] : [{ y: data.target, text: `target ${data.target}` }];
  const soonest = (at) => `limit: target not before ${at.toFixed(1)} s`;
  const limit = data.limit === null ? [] : [{ x: data.limit, text: soonest(data.limit) }];
  const limitOfLoss = limit.map((each) => ({ ...each, high: true }));
  const ideal = [{ y: 1, text: "ideal: 100 %" }];
  const seconds = ["seconds", "seconds"], samples = ["samples", "samples applied"];
  const metric = ["metric", "held-out metric", "number"], loss = ["loss", "held-out loss", "number"];
  const share = ["share", "share of ideal", "percent"], bytes = ["bytes", "bytes sent", "bytes"];
  const nothing = "No number that can be drawn was recorded.";
  const learning = (over, what, marks) => (element) =>
    overRuns(element, "learning", over, what, { marks, sync: over[0], nothing });
  const pace = (what, marks) => (element) =>
    overRuns(element, what[0], seconds, what, { marks, atLeast: [0], sync: "seconds", nothing });
  const KINDS = {
    "metric-seconds": learning(seconds, metric, [...target, ...limit]),
    "metric-samples": learning(samples, metric, target),
    "loss-seconds": learning(seconds, loss, limitOfLoss),
    "loss-samples": learning(samples, loss, []),
    share: pace(share, ideal),
    bytes: pace(bytes, []),
    batches: (element, run) => {
      const { rounds, curves } = run.batches;
      if (!rounds.length) return empty(element, "No round was recorded.");
      return chart(element, {
        title: `Samples of each worker in each round: ${run.name}`,
        x: { label: "round", unit: "rounds" }, y: { label: "samples", unit: "samples" },
        series: curves.map(([name], place) => line(name, place, "rounds")),
        table: [rounds, ...curves.map(([, values]) => values)], atLeast: [0],
      });
    },
    delays: (element, run) => {
      const { delays, share, width } = run.delays;
      if (!run.share.share.some(Boolean)) return empty(element, "No step was recorded.");
      if (!delays.length) return empty(element, "Workers step by themselves here: how late is not in the record.");
      element.classList.add("bars");
      const place = data.runs.indexOf(run), ink = () => colour(`--s${place % COLOURS}`);
      const bars = {
        label: "samples", value: said("percent"), stroke: ink, fill: ink, width: 0,
        paths: uPlot.paths.bars({ size: [0.7, 70] }), points: { show: false },
      };
      return chart(element, {
        title: `Steps between reading the parameters and using the gradient: ${run.name}`,
        x: {
          label: width[0] > 1 ? `steps late, by ${width[0]}` : "steps late", unit: "steps",
          range: () => [-0.7 * width[0], Math.max(delays[delays.length - 1], 2 * width[0]) + 0.7 * width[0]],
        },
        y: { label: "share of samples", unit: "percent" },
        series: [bars], table: [delays, share], atLeast: [0, 1],
      });
    },
  };

  for (const element of document.querySelectorAll("[data-chart]")) {
    KINDS[element.dataset.chart](element, data.runs[element.dataset.run]);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const plot of drawn) plot.redraw(false);
  });
})();
