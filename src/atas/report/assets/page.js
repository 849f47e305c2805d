// What moves on the page: charts with legends that switch their series, tables that sort, and the gallery.
(() => {
  "use strict";

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const faded = (name, share) => `color-mix(in srgb, ${colour(name)} ${share}%, transparent)`;

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  // Charts

  class Chart {
    constructor(figure) {
      this.data = JSON.parse(figure.querySelector("script").textContent);
      this.place = figure.querySelector(".plot");
      this.hidden = new Set();
      this.data.legend.forEach((entry, row) => {
        if (this.data.series[entry.series[0] - 1].shown === false) this.hidden.add(row);
      });
      this.legend = element("div", { class: "legend" });
      this.entries = this.data.legend.map((entry, row) => this.entry(entry, row));
      this.legend.append(...this.entries.map((made) => made.button));
      this.place.before(this.legend);
      this.place.before(element("div", { class: "axis", "aria-hidden": "true" }, this.data.yLabel));
      this.draw();
      new ResizeObserver(() => this.fit()).observe(this.place);
    }

    entry(entry, row) {
      const first = this.data.series[entry.series[0] - 1];
      const key = element("span", { class: entry.band ? "key band" : first.dashed ? "key dashed" : "key" });
      const value = element("span", { class: "value" });
      const button = element("button", { type: "button", "aria-pressed": String(!this.hidden.has(row)) }, key, entry.label, value);
      button.addEventListener("click", () => this.toggle(row));
      return { button, key, value };
    }

    toggle(row) {
      const show = this.hidden.delete(row);
      if (!show) this.hidden.add(row);
      this.entries[row].button.setAttribute("aria-pressed", String(show));
      this.data.legend[row].series.forEach((number) => this.plot.setSeries(number, { show }));
    }

    size() {
      const width = Math.max(200, Math.floor(this.place.clientWidth));
      return { width, height: width < 520 ? 200 : 280 };
    }

    fit() {
      const size = this.size();
      if (size.width !== this.plot.width) this.plot.setSize(size);
    }

    draw() {
      if (this.plot) this.plot.destroy();
      const { data } = this;
      data.legend.forEach((entry, row) => {
        const first = data.series[entry.series[0] - 1];
        const { key } = this.entries[row];
        key.style.borderColor = colour(first.colour);
        if (entry.band) key.style.background = faded(first.colour, 18 + 14 * row);
      });
      this.plot = new uPlot(this.options(), [data.x, ...data.columns], this.place);
      this.values(null);
    }

    options() {
      const { data } = this;
      const whole = data.x.every(Number.isInteger);
      const points = data.kind === "points";
      const shownBy = (number) => !this.hidden.has(data.legend.findIndex((entry) => entry.series.includes(number)));
      const axis = {
        stroke: colour("quiet"),
        font: "12px system-ui, sans-serif",
        grid: { stroke: colour("rule"), width: 1 },
        ticks: { stroke: colour("rule"), width: 1, size: 4 },
      };
      const bands = data.legend
        .map((entry, row) => entry.band && { series: [entry.series[1], entry.series[0]], fill: faded(data.series[entry.series[0] - 1].colour, 18 + 14 * row) })
        .filter(Boolean);
      return {
        ...this.size(),
        legend: { show: false },
        cursor: {
          drag: { x: false, y: false },
          y: false,
          ...(data.sync ? { sync: { key: data.sync, scales: ["x", null] } } : {}),
        },
        scales: {
          x: { time: false, range: (_, low, high) => (points || low === high ? [low - 0.5, high + 0.5] : [low, high]) },
          y: {
            range: (_, low, high) => {
              const [bottom, top] = data.limits;
              if (low === null) return [bottom ?? 0, top ?? 1];
              return [bottom ?? low, top ?? (high === (bottom ?? low) ? high + 1 : high * 1.05)];
            },
          },
        },
        axes: [
          { ...axis, label: data.xLabel, labelSize: 18, labelFont: axis.font, size: 26, ...(whole ? { incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000] } : {}) },
          { ...axis, size: (_, values) => 14 + 7 * Math.max(1, ...(values ?? []).map((text) => text.length)) },
        ],
        bands,
        series: [
          {},
          ...data.series.map((series, row) => ({
            stroke: series.edge ? faded(series.colour, 35) : colour(series.colour),
            width: series.edge ? 0.5 : 2,
            dash: series.dashed ? [6, 4] : undefined,
            spanGaps: true, // between two probes of the monitor
            points: { show: !series.edge && (points || data.x.length < 3), size: 7, fill: colour(series.colour) },
            show: shownBy(row + 1),
          })),
        ],
        hooks: {
          draw: [(plot) => this.mark(plot)],
          setCursor: [(plot) => this.values(plot.cursor.idx ?? null)],
        },
      };
    }

    mark(plot) {
      const { ctx, bbox } = plot;
      const ratio = devicePixelRatio || 1;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = colour("bad");
      ctx.lineWidth = ratio;
      ctx.font = `${12 * ratio}px system-ui, sans-serif`;
      this.data.marks.forEach((mark, row) => {
        const x = plot.valToPos(mark.x, "x", true);
        const late = x > bbox.left + bbox.width * 0.6;
        ctx.beginPath();
        ctx.setLineDash([2 * ratio, 3 * ratio]);
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.textAlign = late ? "right" : "left";
        ctx.textBaseline = "top";
        const place = [mark.text, x + (late ? -5 : 5) * ratio, bbox.top + (4 + 15 * row) * ratio];
        ctx.save(); // a rim of paper, so that curves do not run through the words
        ctx.setLineDash([]);
        ctx.strokeStyle = colour("paper");
        ctx.lineWidth = 4 * ratio;
        ctx.strokeText(...place);
        ctx.restore();
        ctx.fillText(...place);
      });
      ctx.restore();
    }

    values(at) {
      const { data } = this;
      const text = (number, row) => {
        const value = data.columns[number - 1][row];
        return value == null ? "" : value.toFixed(data.digits);
      };
      const last = (number) => data.columns[number - 1].findLastIndex((value) => value !== null);
      data.legend.forEach((entry, row) => {
        const shown = entry.series.map((number) => text(number, at ?? last(number))).filter(Boolean);
        this.entries[row].value.textContent = shown.join(" to ");
      });
    }
  }

  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => new Chart(figure));
  const redraw = () => charts.forEach((chart) => chart.draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", redraw);

  // Tables

  function sort(table, column, heading) {
    const body = table.tBodies[0];
    const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
    const rows = [...body.rows];
    const numbers = rows.every((row) => key(row) !== "" && Number.isFinite(Number(key(row))));
    const before = heading.getAttribute("aria-sort");
    const rising = before === "none" ? !numbers || column === 0 : before === "descending";
    const order = numbers ? (a, b) => Number(key(a)) - Number(key(b)) : (a, b) => key(a).localeCompare(key(b));
    rows.sort((a, b) => (rising ? order(a, b) : order(b, a)));
    body.append(...rows);
    for (const other of table.tHead.querySelectorAll("[aria-sort]")) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      heading.querySelector("button")?.addEventListener("click", () => sort(table, column, heading));
    });
  }

  // The gallery and the confusion

  const cards = document.querySelector(".cards");
  const chosen = {};

  function arrange() {
    const confidence = (card) => Number(card.querySelector("[data-confidence]:not([hidden])")?.dataset.confidence ?? 0);
    const number = (name) => (a, b) => Number(a.dataset[name]) - Number(b.dataset[name]);
    const orders = {
      broken: number("broken"),
      class: number("class"),
      index: number("index"),
      confidence: (a, b) => confidence(b) - confidence(a),
    };
    const sorted = [...cards.children].sort((a, b) => orders[chosen.sort](a, b) || number("index")(a, b));
    cards.append(...sorted);
  }

  function choose(group, button) {
    for (const other of group.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
    const name = group.dataset.choice;
    chosen[name] = button.value;
    if (name === "sort") return;
    for (const part of group.closest("section").querySelectorAll(`[data-${name}]`)) {
      part.hidden = part.dataset[name] !== button.value;
    }
  }

  for (const group of document.querySelectorAll(".choice")) {
    const status = group.closest("section").querySelector("[role=status]");
    choose(group, group.querySelector("[aria-pressed=true]"));
    group.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      choose(group, button);
      if (group.closest("#gallery")) arrange();
      status.textContent = `${group.getAttribute("aria-label")}: ${button.textContent}`;
    });
  }
  if (cards) arrange();
})();
