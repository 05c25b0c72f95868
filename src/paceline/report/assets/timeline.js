// Who did what when: a canvas for each run, with a lane for each worker. All runs of a page show the same seconds.
//
// Far out, a lane is drawn from shares in equal bins; close up, from single intervals, where the page holds them. So
// the work of a picture depends on its width, never on the number of events.
"use strict";

(() => {
  const { Lane, View, clamp, colour, placeAfter, timeText } = Paceline;
  const KINDS = ["computing", "communicating", "idle"];
  const LANE = 24, GAP = 5, AXIS = 26, TOP = 4;
  const DRAG_PIXELS = 5;
  const NO_ROUND = 2 ** 32 - 1;
  const EXACT_PER_PIXEL = 0.25; // closer together than this, single intervals flicker and cannot be told apart
  const PER_COLUMN = 8, WIDEST_COLUMN = 12; // intervals that a column stands for: fewer would beat with the pixels

  class Timeline {
    constructor(element, data, view) {
      this.view = view;
      this.data = data;
      this.lanes = data.lanes.map((packed) => new Lane(packed, data.bins));
      this.canvas = element.querySelector("canvas");
      this.readout = element.querySelector(".readout");
      this.pen = this.canvas.getContext("2d");
      this.chosen = null; // lane and, close up, interval that the readout tells of
      this.selection = null;
      this.touches = new Map();
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.canvas);
    }

    // ---- drawing

    measure() {
      const width = this.canvas.clientWidth, narrow = width < 560;
      const height = TOP + this.lanes.length * (LANE + GAP) + AXIS;
      const scale = window.devicePixelRatio || 1;
      if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
        this.canvas.width = Math.round(width * scale);
        this.canvas.height = Math.round(height * scale);
        this.canvas.style.height = `${height}px`;
      }
      this.pen.setTransform(scale, 0, 0, scale, 0, 0);
      this.narrow = narrow;
      this.left = narrow ? 66 : 132; // as the bars below it
      this.width = Math.max(width - this.left - 10, 1);
      this.height = height;
    }

    x(seconds) {
      return this.left + (seconds - this.view.from) / (this.view.to - this.view.from) * this.width;
    }

    seconds(x) {
      return this.view.from + (x - this.left) / this.width * (this.view.to - this.view.from);
    }

    draw() {
      this.measure();
      const { pen } = this;
      pen.clearRect(0, 0, this.left + this.width + 10, this.height);
      const names = [...KINDS, "step", "ink", "soft", "line", "select"];
      this.colours = Object.fromEntries(names.map((name) => [name, colour(`--${name}`)]));
      this.drawAxis();
      const drawn = this.lanes.map((lane, row) => this.drawLane(lane, row));
      this.drawSelection();
      if (!this.chosen) this.readout.textContent = this.hint(drawn.includes("intervals"));
      // For tests and for whoever looks with the browser's tools.
      Object.assign(this.canvas.dataset, { from: this.view.from, to: this.view.to, drawn: drawn.join(" ") });
    }

    drawAxis() {
      const { pen, view } = this, length = view.to - view.from;
      const rough = length / Math.max(this.width / 90, 2), power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
      const floor = this.height - AXIS + 2;
      pen.font = "12px system-ui, sans-serif";
      pen.textBaseline = "top";
      pen.lineWidth = 1;
      for (let mark = Math.max(Math.ceil(view.from / step - 1e-9), 0); mark * step <= view.to * (1 + 1e-12); mark++) {
        const x = Math.round(this.x(mark * step)) + 0.5;
        pen.strokeStyle = this.colours.line;
        pen.beginPath();
        pen.moveTo(x, TOP);
        pen.lineTo(x, floor + 3);
        pen.stroke();
        pen.fillStyle = this.colours.soft;
        const text = timeText(mark * step, length, view.to), half = pen.measureText(text).width / 2;
        pen.textAlign = "center";
        pen.fillText(text, clamp(x, this.left + half, this.left + this.width + 8 - half), floor + 6);
      }
    }

    drawLane(lane, row) {
      const { pen, view } = this, y = TOP + row * (LANE + GAP);
      pen.textBaseline = "middle";
      pen.textAlign = "left";
      pen.fillStyle = this.colours.ink;
      pen.font = `${this.chosen && this.chosen.row === row ? "600 " : ""}13px system-ui, sans-serif`;
      pen.fillText(lane.name, 0, y + LANE / 2);
      if (lane.note && !this.narrow) {
        pen.fillStyle = this.colours.soft;
        pen.font = "12px system-ui, sans-serif";
        pen.fillText(lane.note, Math.min(pen.measureText(lane.name).width + 14, 70), y + LANE / 2);
      }
      const end = Math.min(this.x(this.data.span), this.left + this.width);
      if (end <= this.left) return "nothing";
      pen.save();
      pen.beginPath();
      pen.rect(this.left, y, this.width, LANE);
      pen.clip();
      pen.fillStyle = this.colours.idle;
      pen.fillRect(this.left, y, end - this.left, LANE);
      const { tick } = this.data;
      const first = placeAfter(lane.end, view.from / tick), last = placeAfter(lane.start, view.to / tick);
      const known = view.to <= this.data.exact || this.data.exact >= this.data.span;
      const exact = known && last - first <= EXACT_PER_PIXEL * this.width;
      if (exact) this.drawIntervals(lane, row, y, first, last); else this.drawShares(lane, y, end);
      const before = placeAfter(lane.steps, view.from / tick - 1), after = placeAfter(lane.steps, view.to / tick);
      if (known && after - before <= this.width / 6) this.drawSteps(lane, y, before, after);
      pen.restore();
      return exact ? "intervals" : "shares";
    }

    // What a rank does differs in height as well as in colour: prints are grey.
    drawIntervals(lane, row, y, first, last) {
      const { pen } = this, { tick } = this.data;
      for (let at = first; at < last; at++) {
        const kind = lane.kind[at];
        if (kind === 2) continue; // idle is the lane's own ground
        const left = this.x(lane.start[at] * tick), right = this.x(lane.end[at] * tick);
        const gap = Math.min(1, (right - left) / 5); // so that one micro-batch can be told from the next
        const high = kind === 0 ? LANE : LANE / 2;
        pen.fillStyle = this.colours[KINDS[kind]];
        pen.fillRect(left, y + LANE - high, Math.max(right - left - gap, 0.3), high);
      }
      if (this.chosen && this.chosen.row === row && this.chosen.at !== undefined) {
        const left = this.x(lane.start[this.chosen.at] * tick), right = this.x(lane.end[this.chosen.at] * tick);
        pen.strokeStyle = this.colours.ink;
        pen.lineWidth = 2;
        pen.strokeRect(left + 1, y + 1, Math.max(right - left - 2, 1), LANE - 2);
      }
    }

    drawShares(lane, y, end) {
      const { pen, view } = this, binsPerSecond = this.data.bins / this.data.span;
      const perPixel = (view.to - view.from) / this.width * binsPerSecond, from = view.from * binsPerSecond;
      const perSecond = this.width / (view.to - view.from);
      const wide = clamp(Math.ceil(PER_COLUMN * perSecond / lane.density), 1, WIDEST_COLUMN);
      for (let x = 0; this.left + x < end; x += wide) {
        let y0 = y + LANE;
        for (const kind of [0, 1]) {
          const high = LANE * lane.share(kind, from + x * perPixel, from + (x + wide) * perPixel);
          pen.fillStyle = this.colours[KINDS[kind]];
          pen.fillRect(this.left + x, y0 - high, Math.min(wide, end - this.left - x), high);
          y0 -= high;
        }
      }
    }

    drawSteps(lane, y, before, after) {
      const { pen } = this;
      pen.strokeStyle = this.colours.step;
      pen.lineWidth = 1;
      pen.beginPath();
      for (let at = before; at < after; at++) {
        const x = Math.round(this.x(lane.steps[at] * this.data.tick)) + 0.5;
        pen.moveTo(x, y);
        pen.lineTo(x, y + LANE);
      }
      pen.stroke();
    }

    drawSelection() {
      if (!this.selection) return;
      const [a, b] = this.selection;
      this.pen.fillStyle = this.colours.select;
      this.pen.fillRect(Math.min(a, b), TOP, Math.abs(b - a), this.height - AXIS - TOP);
    }

    // ---- telling

    hint(single) {
      const { exact, span, left_out: more } = this.data, parts = [];
      if (more) parts.push(`${more.toLocaleString("en")} more workers are not shown.`);
      if (single) parts.push("Point at a lane, or use the keys, to see what it did.");
      else parts.push("Each column is a stretch of time and its shares; zoom in to see more.");
      if (exact < span) parts.push(`This page holds single micro-batches of the first ${timeText(exact, exact)} only.`);
      return parts.join(" ");
    }

    rowAt(y) {
      const row = Math.floor((y - TOP) / (LANE + GAP));
      return row >= 0 && row < this.lanes.length ? row : null;
    }

    point(x, y) {
      const row = this.rowAt(y), seconds = this.seconds(x);
      const inside = row !== null && x >= this.left && x <= this.left + this.width && seconds <= this.data.span;
      this.chosen = inside ? this.find(row, seconds) : null;
      if (inside) this.readout.textContent = this.tell(seconds);
      this.view.redraw();
    }

    find(row, seconds) {
      const lane = this.lanes[row], { tick } = this.data;
      if (seconds > this.data.exact) return { row };
      const at = placeAfter(lane.start, seconds / tick) - 1;
      return at >= 0 && lane.end[at] * tick >= seconds ? { row, at } : { row };
    }

    tell(seconds) {
      const { row, at } = this.chosen, lane = this.lanes[row], { tick } = this.data;
      const length = this.view.to - this.view.from;
      const span = (from, to) => {
        const long = timeText(to - from, to - from);
        return `${timeText(from, length, to)} – ${timeText(to, length)} (${long})`;
      };
      if (at !== undefined) {
        const parts = [lane.name, KINDS[lane.kind[at]], span(lane.start[at] * tick, lane.end[at] * tick)];
        if (lane.samples[at]) parts.push(`${lane.samples[at].toLocaleString("en")} samples`);
        if (lane.round[at] !== NO_ROUND) parts.push(`round ${lane.round[at].toLocaleString("en")}`);
        return parts.join(" · ");
      }
      if (seconds <= this.data.exact) {
        const next = placeAfter(lane.start, seconds / tick);
        const from = next ? lane.end[next - 1] * tick : 0;
        const to = next < lane.start.length ? lane.start[next] * tick : this.data.exact;
        return [lane.name, "idle", span(from, to)].join(" · ");
      }
      const bin = this.data.span / this.data.bins, half = Math.max(bin, length / this.width) / 2;
      const [from, to] = [Math.max(seconds - half, 0), Math.min(seconds + half, this.data.span)];
      const shares = [0, 1].map((kind) => lane.share(kind, from / bin, to / bin));
      shares.push(Math.max(1 - shares[0] - shares[1], 0));
      const said = shares.map((share, kind) => `${KINDS[kind]} ${(100 * share).toFixed(0)} %`);
      return [lane.name, span(from, to), ...said].join(" · ");
    }

    // ---- hands and keys

    listen() {
      const { canvas } = this;
      canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
      canvas.addEventListener("pointerdown", (event) => this.down(event));
      canvas.addEventListener("pointermove", (event) => this.move(event));
      canvas.addEventListener("pointerup", (event) => this.up(event));
      canvas.addEventListener("pointercancel", (event) => this.cancel(event));
      canvas.addEventListener("pointerleave", () => { if (!this.selection && !this.touches.size) this.point(-1, -1); });
      canvas.addEventListener("dblclick", () => this.view.show(0, this.view.span));
      canvas.addEventListener("keydown", (event) => this.key(event));
    }

    wheel(event) {
      const across = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      // Without Ctrl and unasked, a wheel scrolls the page: nobody likes to be caught by a picture.
      if (!across && !event.ctrlKey && document.activeElement !== this.canvas) return;
      event.preventDefault();
      if (across) this.view.pan(event.deltaX / this.width);
      else this.view.zoom(Math.exp(clamp(event.deltaY, -100, 100) / 300), this.seconds(event.offsetX));
    }

    down(event) {
      this.canvas.setPointerCapture(event.pointerId);
      this.touches.set(event.pointerId, event.offsetX);
      if (event.pointerType === "mouse" && !event.shiftKey) this.selection = [event.offsetX, event.offsetX];
      if (this.touches.size > 1) this.selection = null;
    }

    move(event) {
      const before = this.touches.get(event.pointerId);
      if (before === undefined) {
        this.point(event.offsetX, event.offsetY);
      } else if (this.selection) {
        this.selection[1] = clamp(event.offsetX, this.left, this.left + this.width);
        this.view.redraw();
      } else if (this.touches.size === 1) {
        this.view.pan((before - event.offsetX) / this.width);
        this.touches.set(event.pointerId, event.offsetX);
      } else {
        this.pinch(event);
      }
    }

    // What is under each finger stays under it.
    pinch(event) {
      const other = [...this.touches.keys()].find((id) => id !== event.pointerId);
      const still = this.touches.get(other), before = this.touches.get(event.pointerId);
      if (Math.abs(event.offsetX - still) > 8 && (event.offsetX - still) * (before - still) > 0) {
        this.view.zoom((before - still) / (event.offsetX - still), this.seconds(still));
        this.touches.set(event.pointerId, event.offsetX);
      }
    }

    up(event) {
      this.touches.delete(event.pointerId);
      if (this.selection) {
        const [a, b] = this.selection.map((x) => this.seconds(clamp(x, this.left, this.left + this.width)));
        const moved = Math.abs(this.selection[1] - this.selection[0]) > DRAG_PIXELS;
        this.selection = null;
        if (moved) this.view.show(Math.min(a, b), Math.max(a, b));
      }
      this.point(event.offsetX, event.offsetY);
    }

    cancel(event) {
      this.touches.delete(event.pointerId);
      this.selection = null;
      this.view.redraw();
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { view } = this;
      const actions = {
        ArrowLeft: () => view.pan(-0.2), ArrowRight: () => view.pan(0.2),
        "+": () => view.zoom(0.5), "=": () => view.zoom(0.5), "-": () => view.zoom(2),
        0: () => view.show(0, view.span), Home: () => view.show(0, view.span),
        ArrowUp: () => this.walk(-1, 0), ArrowDown: () => this.walk(1, 0),
        ",": () => this.walk(0, -1), ".": () => this.walk(0, 1),
      };
      if (!(event.key in actions)) return;
      event.preventDefault();
      actions[event.key]();
    }

    // To another lane, or to the interval before or after; the readout tells of it, also to a screen reader.
    walk(rows, steps) {
      const { view, data } = this, { tick } = data;
      const before = this.chosen ? this.chosen.row : rows > 0 ? -1 : 0;
      const row = clamp(before + rows, 0, this.lanes.length - 1), lane = this.lanes[row];
      const known = this.chosen && this.chosen.at !== undefined;
      const middle = clamp((view.from + view.to) / 2, 0, data.span);
      let seconds = known ? this.lanes[before].start[this.chosen.at] * tick : middle;
      let at = Math.max(placeAfter(lane.start, seconds / tick + 0.5) - 1, 0);
      if (known) at = clamp(at + steps, 0, lane.start.length - 1);
      if (at < lane.start.length && (steps || seconds <= data.exact)) {
        this.chosen = { row, at };
        seconds = (lane.start[at] + lane.end[at]) / 2 * tick;
        const half = (view.to - view.from) / 2;
        if (seconds < view.from || seconds > view.to) view.show(seconds - half, seconds + half);
      } else {
        this.chosen = { row };
      }
      this.readout.textContent = this.tell(seconds);
      view.redraw();
    }
  }

  const runs = JSON.parse(document.getElementById("data").textContent).runs;
  const view = new View(Math.max(...runs.map((run) => run.timeline ? run.timeline.span : 0)));
  for (const element of document.querySelectorAll(".timeline")) {
    view.timelines.push(new Timeline(element, runs[element.dataset.run].timeline, view));
  }
  const actions = {
    in: () => view.zoom(0.5), out: () => view.zoom(2), left: () => view.pan(-0.4), right: () => view.pan(0.4),
    all: () => view.show(0, view.span),
  };
  for (const button of document.querySelectorAll("button[data-zoom]")) {
    button.addEventListener("click", actions[button.dataset.zoom]);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.redraw());
})();
