// What the timelines of a page are made of: the lanes as they come out of the page's data, and the seconds in view.
"use strict";

const Paceline = (() => {
  const LEAST_SECONDS = 20e-6;

  const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const numbersOf = (text) => new Uint32Array(bytesOf(text).buffer);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The first place at which a sorted array holds more than the value.
  function placeAfter(array, value) {
    let low = 0, high = array.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (array[middle] <= value) low = middle + 1; else high = middle;
    }
    return low;
  }

  // A time with as many digits as the seconds on the screen need, in the unit that suits the largest of them.
  function timeText(seconds, span, largest = seconds) {
    const [factor, unit] = largest >= 1 ? [1, "s"] : largest >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    const digits = clamp(Math.ceil(2 - Math.log10(span * factor)), 0, 6);
    return `${(seconds * factor).toLocaleString("en", { maximumFractionDigits: digits })} ${unit}`;
  }

  class Lane {
    constructor(packed, bins) {
      this.name = packed.name;
      this.note = packed.note;
      this.density = packed.density;
      this.start = numbersOf(packed.start);
      this.end = numbersOf(packed.end);
      this.kind = bytesOf(packed.kind);
      this.samples = numbersOf(packed.samples);
      this.round = numbersOf(packed.round);
      this.steps = numbersOf(packed.steps);
      const shares = bytesOf(packed.shares);
      // Sums up to each bin: the mean over any stretch is then one subtraction.
      this.sums = [0, 1].map((kind) => {
        const sums = new Float64Array(bins + 1);
        for (let bin = 0; bin < bins; bin++) sums[bin + 1] = sums[bin] + shares[kind * bins + bin] / 255;
        return sums;
      });
    }

    share(kind, from, to) {
      const sums = this.sums[kind];
      const at = (place) => {
        const bin = clamp(Math.floor(place), 0, sums.length - 2);
        return sums[bin] + (sums[bin + 1] - sums[bin]) * clamp(place - bin, 0, 1);
      };
      return (at(to) - at(from)) / (to - from);
    }
  }

  // The seconds that all timelines of the page show.
  class View {
    constructor(span) {
      this.span = span;
      this.timelines = [];
      this.pending = false;
      this.from = 0;
      this.to = span;
    }

    show(from, to) {
      const length = clamp(to - from, Math.min(LEAST_SECONDS, this.span), this.span);
      this.from = clamp((from + to - length) / 2, 0, this.span - length);
      this.to = this.from + length;
      this.redraw();
    }

    zoom(factor, around = (this.from + this.to) / 2) {
      this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
    }

    pan(part) {
      const by = clamp(part * (this.to - this.from), -this.from, this.span - this.to);
      this.show(this.from + by, this.to + by);
    }

    redraw() {
      if (this.pending) return;
      this.pending = true;
      requestAnimationFrame(() => {
        this.pending = false;
        for (const timeline of this.timelines) timeline.draw();
      });
    }
  }

  return { Lane, View, clamp, colour, placeAfter, timeText };
})();
