// The script of the report: charts, tables that sort, and the switch between light and dark.
//
// The page holds the values in its JSON block:
//   labels: [{name, color, dash}]
//   charts: {name: {points, axes: [{at, name, title, whole}], x: [[…]], views: [
//     {name, title, log: [across, up], limits: [least, greatest] or null, names: […], marks: [[round, label]],
//      lines: [{label, x: […], y: […], sd: […]}]}
//   ]}}
// `line.x[axis.at]` is the place of the line's x values in `chart.x`. A line without a label is for reference.
// Names are untrusted: they reach the page as text only, by textContent and setAttribute.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = [];
  const WHOLE = [1, 2, 5].flatMap((step) => [0, 1, 2, 3, 4, 5, 6].map((zeros) => step * 10 ** zeros)).sort((a, b) => a - b);
  const TIP_ROWS = 16;

  const color = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function lineSample({ color, dash }) {
    const draw = (tag, attributes) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      return made;
    };
    const sample = draw("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" });
    const dashes = dash.map((length) => 3 * length).join(" ");
    sample.append(draw("line", { x1: 0, y1: 5, x2: 26, y2: 5, stroke: color, "stroke-width": 4, "stroke-dasharray": dashes }));
    return sample;
  }

  function format(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    const digits = size >= 100 ? 1 : size >= 1 || size === 0 ? 2 : 4;
    return value.toLocaleString("en", { maximumFractionDigits: digits }).replaceAll(",", "\u202f").replace("-", "−");
  }

  // Charts

  class Chart {
    constructor(host) {
      this.content = data.charts[host.dataset.chart];
      this.figure = host.closest("figure");
      this.state = { view: 0, axis: 0, log: [...this.content.views[0].log], hidden: new Set() };
      this.plot = element("div", { class: "plot", role: "group", tabindex: "0", "aria-roledescription": "chart" });
      this.plot.setAttribute("aria-label", `${this.figure.querySelector("figcaption").textContent}. Arrow keys read the values.`);
      this.tip = element("div", { class: "tip", role: "status", hidden: "" });
      host.append(this.controls(), this.legend(), this.plot);
      this.plot.append(this.tip);
      this.plot.addEventListener("keydown", (event) => this.step(event));
      new ResizeObserver(() => this.resize()).observe(this.plot);
      this.draw();
    }

    get view() { return this.content.views[this.state.view]; }
    get axis() { return this.content.axes[this.state.axis]; }
    xOf(line) { return this.content.x[line.x[this.axis.at]]; }
    styleOf(line) {
      return line.label === undefined ? { name: "", color: color("--muted"), dash: [1, 1] } : data.labels[line.label];
    }
    shownLines() { return this.view.lines.filter((line) => !this.state.hidden.has(line.label)); }

    controls() {
      const bar = element("div", { class: "controls" });
      const choose = (text, key, options) => {
        if (options.length < 2) return;
        const select = element("select", { "data-choose": key });
        options.forEach((option, place) => select.append(element("option", { value: place }, option.name)));
        select.addEventListener("change", () => {
          this.state[key] = Number(select.value);
          if (key === "view") this.state.log = [...this.view.log];
          this.draw();
        });
        bar.append(element("label", {}, `${text} `, select));
      };
      choose("Show", "view", this.content.views);
      choose("by", "axis", this.content.axes);
      this.logBoxes = ["log x", "log y"].map((text, place) => {
        const box = element("input", { type: "checkbox" });
        box.addEventListener("change", () => { this.state.log[place] = box.checked; this.draw(); });
        const label = element("label", { "data-log": "xy"[place] }, box, ` ${text}`);
        bar.append(label);
        return { box, label };
      });
      return bar;
    }

    legend() {
      const list = element("ul", { class: "legend", "aria-label": "Labels: show or hide" });
      const used = new Set(this.content.views.flatMap((view) => view.lines.map((line) => line.label)));
      this.buttons = new Map();
      data.labels.forEach((label, place) => {
        if (!used.has(place)) return;
        const button = element("button", { type: "button", "aria-pressed": "true", title: "Click: show or hide. Double-click: only this one." });
        button.append(lineSample(label), label.name);
        button.addEventListener("click", () => {
          if (!this.state.hidden.delete(place)) this.state.hidden.add(place);
          this.draw();
        });
        button.addEventListener("dblclick", () => {
          this.state.hidden = new Set([...this.buttons.keys()].filter((other) => other !== place));
          this.draw();
        });
        this.buttons.set(place, button);
        list.append(element("li", {}, button));
      });
      return list;
    }

    // uPlot wants one list of x for all lines, so each line becomes a table that uPlot joins with the others.
    tables() {
      const lines = this.shownLines();
      return lines.map((line, place) => {
        const shift = this.content.points ? (0.6 * (place - (lines.length - 1) / 2)) / lines.length : 0;
        const table = [this.xOf(line).map((x) => x + shift), line.y];
        if (line.sd) for (const sign of [-1, 1]) table.push(line.y.map((y, at) => (y === null ? null : this.limited(y + sign * (line.sd[at] ?? 0)))));
        return table;
      });
    }

    limited(value) {
      const [least, greatest] = this.view.limits ?? [-Infinity, Infinity];
      return Math.min(greatest, Math.max(least, value));
    }

    canBeLog(place) {
      const lines = this.view.lines;
      return lines.every((line) => (place ? line.y : this.xOf(line)).every((value) => value === null || value > 0));
    }

    draw() {
      this.uplot?.destroy();
      this.tip.hidden = true;
      const { content, view, axis, state } = this;
      this.logBoxes.forEach(({ box, label }, place) => {
        label.hidden = (place === 0 && view.names.length > 0) || !this.canBeLog(place);
        if (label.hidden) state.log[place] = false;
        box.checked = state.log[place];
      });
      for (const [place, button] of this.buttons) button.setAttribute("aria-pressed", String(!state.hidden.has(place)));
      const lines = this.shownLines();
      const tables = this.tables();
      const series = [{}];
      const bands = [];
      lines.forEach((line, place) => {
        const style = this.styleOf(line);
        const hollow = style.dash.length ? color("--paper") : style.color;
        const dots = content.points || line.y.length < 3;
        series.push({
          stroke: style.color, width: 2, dash: style.dash.map((length) => 2 * length), spanGaps: true,
          points: { show: dots, size: 8, width: 1.5, fill: hollow, stroke: style.color },
          ...(content.points ? { paths: () => null } : {}),
        });
        if (tables[place].length > 2) {
          const edge = { stroke: "transparent", width: 1, spanGaps: true, points: { show: false } };
          series.push({ ...edge, ...(content.points ? { paths: () => null } : {}) }, { ...edge, ...(content.points ? { paths: () => null } : {}) });
          if (!content.points) bands.push({ series: [series.length - 1, series.length - 2], fill: `${style.color}${lines.length > 6 ? "14" : "2b"}` });
        }
      });
      const ends = view.names.length ? { range: [-0.6, view.names.length - 0.4] } : {};
      const logRange = { distr: 3, range: (_, low, high) => uPlot.rangeLog(low ?? 1, high ?? 10, 10, false) };
      const yRange = { range: (_, low, high) => uPlot.rangeNum(low ?? 0, high ?? 1, 0.08, true).map((end) => this.limited(end)) };
      const ink = { stroke: color("--muted"), font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
      const grid = { stroke: color("--grid"), width: 1 };
      const narrow = this.plot.clientWidth < 500;
      this.uplot = new uPlot({
        ...this.size(), series, bands, padding: [12, 16, 0, 0], legend: { show: false },
        scales: { x: { time: false, ...(state.log[0] ? logRange : ends) }, y: state.log[1] ? logRange : yRange },
        axes: [
          {
            ...ink, grid: { show: false }, ticks: { ...grid, size: 5 }, size: 30, label: view.names.length ? "" : axis.title, labelSize: view.names.length ? 0 : 24, space: narrow ? 56 : 64,
            ...(axis.whole && !state.log[0] ? { incrs: WHOLE } : {}),
            values: (_, splits) => splits.map((x) => (x === null ? "" : view.names.length ? (view.names[x] ?? "").slice(0, 12) : format(x))),
          },
          { ...ink, grid, ticks: { show: false }, label: narrow ? "" : view.title, labelSize: narrow ? 0 : 24, size: 56, values: (_, splits) => splits.map((y) => (y === null ? "" : format(y))) },
        ],
        cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
        hooks: { draw: [(u) => this.drawMarks(u)], setCursor: [(u) => this.hover(u)] },
      }, tables.length ? uPlot.join(tables) : [[]], this.plot);
    }

    // Vertical lines where a plan changes, and the spread of dots.
    drawMarks(u) {
      const { ctx, bbox } = u;
      const stroke = (style, dash, width, x, from, to) => {
        ctx.strokeStyle = style; ctx.lineWidth = width * devicePixelRatio; ctx.setLineDash(dash);
        ctx.beginPath(); ctx.moveTo(x, from); ctx.lineTo(x, to); ctx.stroke();
      };
      ctx.save();
      ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
      if (this.axis.name === "rounds") {
        for (const [round, label] of this.view.marks) {
          if (!this.state.hidden.has(label)) stroke(data.labels[label].color, [6, 6], 1.2, u.valToPos(round, "x", true), bbox.top, bbox.top + bbox.height);
        }
      }
      if (this.content.points) {
        this.tables().forEach((table, place) => {
          const [xs, , low, high] = table;
          if (!low) return;
          const style = this.styleOf(this.shownLines()[place]);
          xs.forEach((x, at) => {
            if (low[at] !== null) stroke(`${style.color}88`, [], 1.5, u.valToPos(x, "x", true), u.valToPos(low[at], "y", true), u.valToPos(high[at], "y", true));
          });
        });
        const zero = u.valToPos(0, "y", true);
        if (zero > bbox.top && zero < bbox.top + bbox.height) {
          ctx.strokeStyle = color("--muted"); ctx.setLineDash([]); ctx.lineWidth = devicePixelRatio;
          ctx.beginPath(); ctx.moveTo(bbox.left, zero); ctx.lineTo(bbox.left + bbox.width, zero); ctx.stroke();
        }
      }
      ctx.restore();
    }

    // The values nearest to the pointer, one for each line that reaches there.
    hover(u) {
      const { left, top } = u.cursor;
      if (left === null || left < 0 || !this.shownLines().length) { this.tip.hidden = true; return; }
      const at = u.posToVal(left, "x");
      const slack = this.view.names.length ? 0.6 : Math.abs(u.posToVal(left + 12, "x") - at);
      const found = [];
      for (const line of this.shownLines()) {
        const xs = this.xOf(line);
        let best = -1;
        for (let place = 0; place < xs.length; place++) {
          if (line.y[place] !== null && (best < 0 || Math.abs(xs[place] - at) < Math.abs(xs[best] - at))) best = place;
        }
        const inside = best >= 0 && at >= xs[0] - slack && at <= xs[xs.length - 1] + slack;
        if (line.label !== undefined && inside) found.push({ line, x: xs[best], y: line.y[best], sd: line.sd?.[best] });
      }
      if (!found.length) { this.tip.hidden = true; return; }
      const nearest = found.reduce((one, two) => (Math.abs(two.x - at) < Math.abs(one.x - at) ? two : one)).x;
      const same = this.axis.whole ? found.filter(({ x }) => x === nearest) : found;
      same.sort((one, two) => two.y - one.y);
      const names = this.view.names;
      const head = names.length ? names[nearest] : this.axis.name === "rounds" ? `round ${format(nearest)}` : `${this.axis.title}: ${format(nearest)}`;
      const rows = same.slice(0, TIP_ROWS).map(({ line, y, sd }) =>
        element("div", {}, lineSample(this.styleOf(line)), element("span", {}, this.styleOf(line).name), element("b", {}, format(y) + (sd ? ` ± ${format(sd)}` : ""))));
      const more = same.length > TIP_ROWS ? [`and ${same.length - TIP_ROWS} more`] : [];
      this.tip.replaceChildren(element("p", {}, head), ...rows, ...more);
      this.tip.hidden = false;
      const box = u.over;
      const place = box.offsetLeft + left;
      const right = place + 16 + this.tip.offsetWidth > this.plot.clientWidth;
      this.tip.style.left = `${Math.max(0, right ? place - 16 - this.tip.offsetWidth : place + 16)}px`;
      this.tip.style.top = `${Math.max(0, Math.min(box.offsetTop + top, this.plot.clientHeight - this.tip.offsetHeight - 8))}px`;
    }

    step(event) {
      const move = { ArrowLeft: -1, ArrowRight: 1, Escape: 0 }[event.key];
      const xs = this.uplot.data[0];
      if (move === undefined || !xs.length) return;
      event.preventDefault();
      if (move === 0) { this.tip.hidden = true; return; }
      const next = (this.uplot.cursor.idx ?? (move > 0 ? -1 : xs.length)) + move;
      const x = xs[Math.max(0, Math.min(xs.length - 1, next))];
      this.uplot.setCursor({ left: this.uplot.valToPos(x, "x"), top: 12 });
    }

    size() {
      const width = Math.max(200, this.plot.clientWidth);
      return { width, height: Math.round(Math.max(280, Math.min(460, 0.42 * width))) };
    }

    resize() {
      const { width, height } = this.size();
      if (width !== this.uplot.width || height !== this.uplot.height) this.uplot.setSize({ width, height });
    }
  }

  // Tables

  const UNITS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9 };

  // A cell's number with its unit, or its text. A missing value is last in both orders.
  function sortKey(cell) {
    const text = (cell?.textContent ?? "").trim();
    const found = /^([<+−-]?)(\d+(?: \d{3})*(?:\.\d+)?)\s*(B|kB|MB|GB)?/.exec(text);
    if (!text || text === "–") return null;
    if (!found) return text.toLowerCase();
    const value = Number(found[2].replaceAll(" ", "")) * (UNITS[found[3]] ?? 1);
    return "−-".includes(found[1]) && found[1] ? -value : found[1] === "<" ? value / 2 : value;
  }

  function compareKeys(one, two, sign) {
    if (one === null || two === null) return (one === null) - (two === null);
    if (typeof one !== typeof two) return typeof one === "number" ? -1 : 1;
    return sign * (typeof one === "number" ? one - two : one.localeCompare(two, "en", { numeric: true }));
  }

  function makeSortable(table) {
    const body = table.tBodies[0];
    if (body.rows.length < 2) return;
    const headings = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    headings.forEach((heading, column) => {
      const button = element("button", { type: "button", class: "sort" }, ...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const next = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
        for (const other of headings) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", next);
        const keyed = [...body.rows].map((row) => [sortKey(row.cells[column]), row]);
        keyed.sort(([one], [two]) => compareKeys(one, two, next === "ascending" ? 1 : -1));
        body.append(...keyed.map(([, row]) => row));
      });
    });
  }

  // Only boxes that scroll need the keyboard's focus.
  function watchBoxes() {
    const update = () => {
      for (const box of document.querySelectorAll(".wide, pre")) {
        if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
        else box.removeAttribute("tabindex");
      }
    };
    new ResizeObserver(update).observe(document.body);
    document.addEventListener("toggle", update, true);
  }

  // Light and dark

  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";

  function makeSwitch() {
    const button = element("button", { type: "button", class: "theme" });
    const update = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colors`);
      for (const chart of charts) chart.draw();
    };
    const set = (theme) => { if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme; update(); };
    let before;
    button.addEventListener("click", () => set(isDark() ? "light" : "dark"));
    prefersDark.addEventListener("change", update);
    addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; set("light"); });
    addEventListener("afterprint", () => set(before));
    document.querySelector("header").prepend(button);
    update();
  }

  document.getElementById("no-script").remove();
  for (const host of document.querySelectorAll("[data-chart]")) charts.push(new Chart(host));
  for (const table of document.querySelectorAll("table[data-sortable]")) makeSortable(table);
  makeSwitch();
  watchBoxes();
})();
