// The page of each client: a client is chosen by the list or by the address, such as #client-c3.
//
// The page's JSON block holds clients: {metric, headings, list: [{name, holds, lines: [{label, x, y}], rows}]}.
// Names are untrusted: they reach the page as text only.
"use strict";
(() => {
  const { labels, clients: content } = JSON.parse(document.getElementById("data").textContent);
  if (!content) return;
  const { metric, headings, list: clients } = content;
  const host = document.getElementById("client-page");
  const WIDTH = 720, HEIGHT = 260, LEFT = 56, BOTTOM = 34, TOP = 12, RIGHT = 16;

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  function drawn(tag, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  // Names may break after punctuation marks only.
  const breakable = (text) => text.split(/(?<=\w[,(./+_])(?=[^\s\d])/).flatMap((part, at) => (at ? [element("wbr"), part] : [part]));
  const shown = (value) => (value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 2 }));

  function curve(client) {
    const points = client.lines.flatMap((line) => line.x.map((x, at) => [x, line.y[at]])).filter(([, y]) => y !== null);
    if (!points.length) return [];
    const [xs, ys] = [0, 1].map((side) => points.map((point) => point[side]));
    const [low, high] = [Math.min(...ys), Math.max(...ys)];
    const room = (high - low) * 0.08 || 1;
    const [first, last, bottom, top] = [Math.min(...xs), Math.max(...xs), low - room, high + room];
    const px = (x) => LEFT + (last > first ? (x - first) / (last - first) : 0.5) * (WIDTH - LEFT - RIGHT);
    const py = (y) => HEIGHT - BOTTOM - ((y - bottom) / (top - bottom)) * (HEIGHT - BOTTOM - TOP);
    const picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "client-curve", role: "img" });
    picture.setAttribute("aria-label", `${metric} of ${client.name} by round; the table below has the values.`);
    for (const share of [0, 0.5, 1]) {
      const y = low + share * (high - low);
      picture.append(drawn("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y), class: "grid" }));
      picture.append(drawn("text", { x: LEFT - 8, y: py(y) + 4, "text-anchor": "end" }, shown(y)));
      if (high === low) break;
    }
    for (const x of new Set([first, last])) picture.append(drawn("text", { x: px(x), y: HEIGHT - 14, "text-anchor": x === first && last > first ? "start" : "end" }, `round ${x}`));
    for (const line of client.lines) {
      const { color, dash, name } = labels[line.label];
      const known = line.x.map((x, at) => [x, line.y[at]]).filter(([, y]) => y !== null);
      const path = known.map(([x, y], at) => `${at ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
      picture.append(drawn("path", { d: path, fill: "none", stroke: color, "stroke-width": 2, "stroke-dasharray": dash.map((length) => 2 * length).join(" ") }));
      for (const [x, y] of known) {
        picture.append(drawn("circle", { cx: px(x), cy: py(y), r: 3, fill: color }, drawn("title", {}, `${name}, round ${x}: ${shown(y)}`)));
      }
    }
    return [picture, values(client)];
  }

  function table(caption, heads, rows) {
    const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, ...breakable(text))));
    const body = rows.map((cells) => element("tr", {}, ...cells.map((text, at) => (at ? element("td", {}, ...breakable(text)) : element("th", { scope: "row" }, ...breakable(text))))));
    const made = element("table", { class: "text" }, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...body));
    return element("div", { class: "wide", role: "group", tabindex: "0", "aria-label": caption }, made);
  }

  function values(client) {
    const rounds = [...new Set(client.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const rows = rounds.map((round) => [`round ${round}`, ...client.lines.map((line) => shown(line.y[line.x.indexOf(round)] ?? null))]);
    const caption = `${metric} of ${client.name} on its own test set`;
    const folded = element("details", {}, element("summary", {}, "Values as a table"));
    folded.append(table(caption, ["round", ...client.lines.map((line) => labels[line.label].name)], rows));
    return folded;
  }

  function show(place) {
    const client = clients[place];
    const parts = [element("h3", {}, `Client ${client.name}`)];
    for (const text of client.holds) parts.push(element("p", {}, text));
    const scores = curve(client);
    if (scores.length) {
      const names = element("p", { class: "client-labels" });
      for (const line of client.lines) {
        const { color, dash, name } = labels[line.label];
        const sample = drawn("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" });
        sample.append(drawn("line", { x1: 0, y1: 5, x2: 26, y2: 5, stroke: color, "stroke-width": 4, "stroke-dasharray": dash.map((length) => 3 * length).join(" ") }));
        names.append(element("span", {}, sample, name));
      }
      parts.push(element("p", {}, `${metric} on its own test set, by completed rounds:`), names, ...scores);
    } else parts.push(element("p", {}, "No score of its own was recorded."));
    if (client.rows.length) parts.push(table(`What happened to ${client.name}`, headings, client.rows));
    host.replaceChildren(...parts);
  }

  const select = element("select", { id: "client-choice" });
  clients.forEach((client, place) => select.append(element("option", { value: place }, client.name)));
  const address = (name) => `#client-${encodeURIComponent(name)}`;
  function follow() {
    const place = clients.findIndex((client) => address(client.name) === location.hash || `#client-${client.name}` === location.hash);
    if (place < 0) return false;
    select.value = String(place);
    show(place);
    document.getElementById("clients").scrollIntoView();
    return true;
  }
  select.addEventListener("change", () => {
    show(Number(select.value));
    history.replaceState(null, "", address(clients[Number(select.value)].name));
  });
  host.before(element("p", { class: "controls" }, element("label", {}, "Client ", select)));
  window.addEventListener("hashchange", follow);
  if (!follow()) show(0);
})();
