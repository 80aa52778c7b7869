// Charts of the page: lines and areas by uPlot, sparklines and the heat map on canvases of our own.
// Units: bytes come in, text has KiB to TiB. Times are the browser's, on a 24-hour clock.
"use strict";

const charts = (() => {
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

  function size(bytes) {
    if (bytes === null || bytes === undefined) return "-";
    let unit = 0;
    let value = bytes;
    while (value >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
    const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
    return `${value.toFixed(digits)} ${UNITS[unit]}`;
  }

  function clock(seconds) {
    return new Date(seconds * 1000).toLocaleTimeString("en-GB");
  }

  function color(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  // Ticks at powers of two, so that labels are whole.
  function splits(plot, __, low, high) {
    const most = Math.max(plot.height / 40, 2);
    const step = 2 ** Math.ceil(Math.log2(Math.max(high - low, 4096) / most));
    const out = [];
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) out.push(at);
    return out;
  }

  function axes(format) {
    const grid = { stroke: color("line"), width: 1 };
    const short = (plot) => plot.scales.x.max - plot.scales.x.min < 600;
    const x = { stroke: color("text"), grid, ticks: grid, space: 80,
      values: (plot, all) => all.map((at) => (short(plot) ? clock(at) : clock(at).slice(0, 5))) };
    const y = { stroke: color("text"), grid, ticks: grid, size: 70, space: 25, values: (_, all) => all.map(format) };
    return [x, y];
  }

  // A chart in a box. `series`: name, column, color, and whether it is an area that stacks on the ones before.
  class Chart {
    constructor(box, series, { format = size, top = null, tall = 210, marks = () => [] } = {}) {
      Object.assign(this, { box, series, format, top, tall, marks });
      this.plot = null;
      new ResizeObserver(() => this.resize()).observe(box);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.remake());
    }

    remake() {
      if (this.plot) this.plot.destroy();
      this.plot = null;
      if (this.data) this.show(this.data);
    }

    resize() {
      if (this.plot) this.plot.setSize(this.room());
    }

    room() {
      return { width: Math.max(this.box.clientWidth, 200), height: this.tall };
    }

    // Areas are drawn from the top of the stack down, each to zero.
    show(columns) {
      this.data = columns;
      const rows = columns.at.length;
      const sum = new Float64Array(rows);
      const stacked = this.series.map((one) => {
        const values = columns[one.column];
        return one.stacks ? values.map((value, at) => (sum[at] += value)) : values;
      });
      const order = this.series.map((_, at) => at);
      const areas = order.filter((at) => this.series[at].stacks).reverse();
      this.order = [...areas, ...order.filter((at) => !this.series[at].stacks)];
      const data = [columns.at, ...this.order.map((at) => stacked[at])];
      if (this.plot) {
        this.plot.setData(data);
        return;
      }
      const drawn = this.order.map((at) => {
        const { name, color: word, stacks, dash } = this.series[at];
        const shown = (_, __, ___, index) => {
          const last = this.data.at.length - 1;
          return this.format(this.data[this.series[at].column][index ?? last]);
        };
        return { label: name, stroke: color(word), fill: stacks ? color(word) : undefined, width: stacks ? 0 : 2,
          dash, points: { show: false }, value: shown };
      });
      const [x, y] = axes(this.format);
      if (this.format === size) y.splits = splits;
      this.plot = new uPlot({
        ...this.room(),
        // Half of the last label of the time axis is right of the chart.
        padding: [null, 32, null, null],
        series: [{ value: (_, at) => (at === null ? "last sample" : clock(at)) }, ...drawn],
        axes: [x, y],
        scales: { y: { range: (_, __, high) => [0, Math.max(this.top ?? 0, (high ?? 0) * 1.05, 1)] } },
        legend: { live: true },
        cursor: { drag: { x: false, y: false } },
        hooks: { draw: [(plot) => this.mark(plot)] },
      }, data, this.box);
    }

    // Events as vertical lines.
    mark(plot) {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.strokeStyle = color("bad");
      ctx.globalAlpha = 0.7;
      ctx.setLineDash([3, 3]);
      for (const at of this.marks()) {
        const x = plot.valToPos(at, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
      ctx.restore();
    }
  }

  // A line of numbers from 0 to `most` in a small canvas.
  function spark(canvas, values, most, word) {
    const ratio = devicePixelRatio || 1;
    const [width, height] = [90 * ratio, 20 * ratio];
    if (canvas.width !== width) Object.assign(canvas, { width, height });
    const ctx = canvas.getContext("2d");
    ctx.clearRect(0, 0, width, height);
    ctx.strokeStyle = color(word);
    ctx.lineWidth = ratio;
    ctx.beginPath();
    values.forEach((value, at) => {
      const x = (at / Math.max(values.length - 1, 1)) * (width - 2) + 1;
      const y = height - 1 - Math.min(value / most, 1) * (height - 3);
      if (at === 0) ctx.moveTo(x, y); else ctx.lineTo(x, y);
    });
    ctx.stroke();
  }

  // Ages on a logarithmic scale, from hot to cold. Each step differs in brightness, too.
  const AGES = [[2, "#fff3b0"], [10, "#fdae44"], [60, "#e0572f"], [600, "#8f2a5f"], [Infinity, "#2d2456"]];

  // One column a poll: addresses from top to bottom.
  function heat(canvas, columns) {
    const ctx = canvas.getContext("2d");
    const { width, height } = canvas;
    ctx.clearRect(0, 0, width, height);
    const shown = columns.slice(-160);
    const step = width / 160;
    shown.forEach(({ strip }, at) => {
      const tall = height / strip.length;
      strip.forEach((cell, row) => {
        if (cell.age_s === null) return;
        ctx.globalAlpha = Math.max(cell.present, 0.15);
        ctx.fillStyle = AGES.find(([most]) => cell.age_s <= most)[1];
        ctx.fillRect(at * step, row * tall, step + 0.5, tall + 0.5);
      });
    });
    ctx.globalAlpha = 1;
  }

  return { Chart, clock, color, heat, size, spark };
})();
