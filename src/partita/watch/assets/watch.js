"use strict";
// The page of `partita watch`. All text goes into the page as text, never as HTML.
(() => {
  const POLL = 2000; // milliseconds between two requests
  const COLORS = ["#0b6bcb", "#d1495b", "#1a936f", "#e08e00", "#7b4bb7", "#0f9fb5", "#c2519b", "#6b7a1e", "#8a5a3b", "#5c6b7a"];
  const COLORS_DARK = ["#5aa9f7", "#ff8091", "#4fd1a5", "#f5b942", "#b794f6", "#4fd3e6", "#f08bcb", "#b9c95a", "#d3a07c", "#a8b5c2"];
  const DEFAULTS = 4; // charts that are open at the start
  const STATES = { waiting: "waiting", running: "running", stopped: "stopped", stale: "process gone", finished: "finished", failed: "failed", unreadable: "cannot be read" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const $ = (id) => document.getElementById(id);

  const runs = new Map(); // id -> run, with curves: key -> {title, percent, rounds, values}
  const off = new Set(); // ids of runs that are not drawn
  let ids = [], version = 0, clock = 0, chosen = null, selected = "", charts = [], drawn = "", answered = 0, failures = 0, last = null;

  // ---- small helpers ----
  function make(tag, text, attributes = {}) {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }
  function fill(parent, children) { parent.replaceChildren(...children.filter(Boolean)); }
  function hasNumber(value) { return typeof value === "number" && isFinite(value); }
  function digits(value) {
    if (!hasNumber(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(1);
    return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 || size === 0 ? 2 : 4).replace("-", "−");
  }
  function shown(value, percent) { return hasNumber(value) ? (percent ? (100 * value).toFixed(1) + " %" : digits(value)) : "–"; }
  function bytes(value) {
    if (!hasNumber(value)) return "–";
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let place = 0;
    while (value >= 999.5 && place < units.length - 1) { value /= 1000; place += 1; }
    return `${place ? digits(value) : Math.round(value)} ${units[place]}`;
  }
  function duration(seconds) {
    if (!hasNumber(seconds)) return "–";
    if (seconds < 90) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 90) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} d`;
  }
  function plural(count, word) { return `${count} ${word}${count === 1 ? "" : "s"}`; }
  function title(run) { return run.seed === null || run.seed === undefined ? run.label : `${run.label}, seed ${run.seed}`; }
  function all() { return ids.map((id) => runs.get(id)).filter(Boolean); }
  function isLive(run) { return run.state === "running" || run.state === "waiting"; }
  function serverNow() { return Date.now() / 1000 + clock; }
  function timeLeft(run) {
    if (!isLive(run) || !hasNumber(run.pace) || !run.rounds) return null;
    const begun = run.current && run.current.round === run.done && hasNumber(run.current.started);
    const spent = begun ? Math.min(run.pace, Math.max(0, serverNow() - run.current.started)) : 0;
    return Math.max(0, (run.rounds - run.done) * run.pace - spent);
  }
  function doneOf(run) {
    const current = run.current;
    const part = current && current.round === run.done && current.cohort ? Math.min(1, (current.replied || 0) / current.cohort) : 0;
    return Math.min(run.rounds || 0, run.done + part);
  }
  function bar(share, label) {
    const outer = make("span", null, { class: "progress", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share), "aria-label": label });
    const inner = make("span");
    inner.style.width = `${100 * share}%`;
    outer.append(inner);
    return outer;
  }

  // ---- colors: one for each label; seeds share it ----
  function labels() { return [...new Set(all().map((run) => run.label))]; }
  function color(run) {
    const list = dark.matches ? COLORS_DARK : COLORS;
    return list[labels().indexOf(run.label) % list.length];
  }
  function swatch(run) {
    const box = make("span", null, { class: "swatch", "aria-hidden": "true" });
    box.style.background = color(run);
    return box;
  }

  // ---- the state, from the server ----
  function take(state) {
    clock = state.now - Date.now() / 1000;
    version = state.version;
    ids = state.ids;
    last = state;
    for (const id of [...runs.keys()]) if (!ids.includes(id)) runs.delete(id);
    const news = [];
    for (const run of state.runs) {
      const before = runs.get(run.id);
      const curves = new Map(run.reset || !before ? [] : before.curves);
      for (const [key, curve] of Object.entries(run.curves)) {
        const old = curves.get(key);
        if (old) { old.rounds.push(...curve.rounds); old.values.push(...curve.values); } else curves.set(key, curve);
      }
      runs.set(run.id, { ...run, curves });
      if (before && before.state !== run.state) news.push(`${title(run)}: ${STATES[run.state] || run.state}`);
      const known = new Set(before ? (before.alarms || []).map((alarm) => alarm.kind) : []);
      for (const alarm of before ? run.alarms || [] : []) if (!known.has(alarm.kind)) news.push(`${title(run)}: alarm, ${alarm.kind}`);
    }
    if (news.length) $("status").textContent = news.join(". ");
    return state.runs.length > 0;
  }

  async function poll() {
    try {
      const answer = await fetch(`state?since=${version}`, { cache: "no-store", credentials: "omit" });
      if (!answer.ok) throw new Error(String(answer.status));
      const before = ids.join();
      const changed = take(await answer.json());
      failures = 0;
      answered = Date.now();
      if (changed || before !== ids.join() || !drawn) draw();
    } catch (error) {
      failures += 1;
      if (failures === 2) $("status").textContent = "The connection to partita watch is lost.";
    }
    tick();
    setTimeout(poll, last && last.reading ? 300 : POLL);
  }

  // ---- tiles ----
  function tile(name, value, more, options = {}) {
    const box = make("div", null, { class: options.alert ? "tile alert" : "tile" });
    const detail = make("dd");
    detail.append(make("span", value, { class: "value" }));
    if (options.share !== undefined) detail.append(bar(options.share, name));
    if (more) detail.append(make("span", more, { class: "more" }));
    box.append(make("dt", name), detail);
    return box;
  }
  function sum(list, pick) { return list.reduce((total, item) => total + (pick(item) || 0), 0); }
  function tiles(list) {
    const made = [], live = list.filter(isLive), readable = list.filter((run) => run.state !== "unreadable");
    if (list.length > 1) {
      const counts = Object.keys(STATES).map((state) => [state, list.filter((run) => run.state === state).length]).filter(([, count]) => count);
      const finished = list.filter((run) => run.state === "finished").length;
      made.push(tile("runs finished", `${finished} / ${list.length}`, counts.filter(([state]) => state !== "finished").map(([state, count]) => `${count} ${STATES[state]}`).join(", ")));
    } else if (list.length) {
      made.push(tile("state", STATES[list[0].state] || list[0].state, list[0].note));
    }
    const total = sum(readable, (run) => (run.state === "finished" ? run.done : run.rounds)), done = sum(readable, doneOf);
    const speeds = live.map((run) => run.pace).filter(hasNumber);
    const pace = speeds.length ? `${digits(sum(speeds, (each) => each) / speeds.length)} s per round` : "";
    made.push(tile("rounds", `${sum(readable, (run) => run.done)} / ${total}`, pace, { share: total ? done / total : 0 }));
    const times = live.map(timeLeft).filter(hasNumber);
    const ahead = sum(live.filter((run) => run.current === undefined && !run.done), (run) => run.rounds);
    if (times.length && ahead && list.length > 1) times.push((sum(times, (each) => each) + (ahead * sum(speeds, (each) => each)) / speeds.length) / times.length);
    const ends = times.length ? new Date((serverNow() + Math.max(...times)) * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false }) : "";
    made.push(tile("time left", live.length ? (times.length ? duration(Math.max(...times)) : "not known yet") : "–", ends ? `at most, until ${ends}` : live.length ? "" : "no run is going on"));
    if (list.length === 1) {
      const run = list[0];
      if (run.score) made.push(tile(`${run.metric.name}, test`, shown(run.score[1], run.metric.percent), `best ${shown(run.best[1], run.metric.percent)} in round ${run.best[0] + 1}`));
    }
    const online = list.map((run) => run.online).filter(hasNumber);
    const cohorts = list.map((run) => (run.current && hasNumber(run.current.cohort) ? run.current.cohort : run.cohort)).filter(hasNumber);
    if (online.length) made.push(tile(list.length > 1 ? "clients of a run" : live.length ? "clients online" : "clients", range(online), cohorts.length ? `${range(cohorts)} asked in a round` : ""));
    const lost = sum(readable, (run) => run.lost_count);
    made.push(tile("replies lost", String(lost), lost ? "in completed rounds" : "no client was lost", { alert: lost > 0 }));
    made.push(tile("sent", bytes(sum(readable, (run) => run.up + run.down)), `${bytes(sum(readable, (run) => run.up))} up, ${bytes(sum(readable, (run) => run.down))} down`));
    const private_ = readable.filter((run) => run.privacy);
    if (private_.length) {
      const worst = private_.reduce((a, b) => ((b.privacy.spent || 0) > (a.privacy.spent || 0) ? b : a)).privacy;
      const limit = worst.limit;
      made.push(tile(private_.length > 1 ? "largest ε spent" : "ε spent", hasNumber(worst.spent) ? digits(worst.spent) : "–", (hasNumber(limit) ? `${digits(worst.left)} left of ${digits(limit)}` : "") + (worst.repeatable ? "; a simulation: the noise can be recomputed" : ""), { share: hasNumber(limit) && limit > 0 ? Math.min(1, (worst.spent || 0) / limit) : undefined }));
    }
    const active = sum(readable, (run) => (run.alarms || []).filter((alarm) => alarm.active).length), ever = sum(readable, (run) => (run.alarms || []).length);
    made.push(tile("alarms", String(active), ever > active ? `${ever - active} earlier` : active ? "" : "none so far", { alert: active > 0 }));
    fill($("tiles"), made);
  }
  function range(values) {
    const low = Math.min(...values), high = Math.max(...values);
    return low === high ? String(low) : `${low} to ${high}`;
  }

  // ---- the current round of one run ----
  function currentRound(run) {
    const current = run && run.current;
    $("round").hidden = !current;
    if (!current) return;
    const made = [], waits = current.phase === "waiting";
    const line = make("p", waits ? "Waiting for clients " : `Round ${(current.round ?? run.done) + 1} of ${run.rounds} `, { class: "phase" });
    const since = hasNumber(current.started) && !waits ? `, for ${duration(Math.max(0, serverNow() - current.started))}` : "";
    line.append(make("span", waits ? (hasNumber(run.online) ? `${plural(run.online, "client")} online` : "") : `${current.phase}${since}`));
    made.push(line);
    if (hasNumber(current.cohort) && hasNumber(current.replied) && !waits) {
      const lost = Object.keys(current.lost).length;
      made.push(bar(current.cohort ? Math.min(1, current.replied / current.cohort) : 0, "replies in this round"));
      made.push(make("p", `${current.replied} of ${current.cohort} replied${lost ? `, ${lost} lost` : ""}${current.asked < current.cohort ? `, ${current.asked} asked so far` : ""}`, { class: "note" }));
    } else if (run.privacy && !waits) {
      made.push(make("p", "A private run does not say which clients take part in its current round.", { class: "note" }));
    }
    const clients = waits ? current.present.map((name) => [name, "online"]) : current.clients;
    if (clients.length) {
      const list = make("ul", null, { class: "clients", "aria-label": waits ? "Clients online" : "Clients of this round" });
      const signs = { replied: "✓", lost: "✕", asked: "…", online: "✓" };
      for (const [name, status] of clients) {
        const item = make("li", `${signs[status] || ""} ${name}`, { class: status === "online" ? "replied" : status });
        item.append(make("span", `, ${current.lost[name] || status}`, { class: "hidden" }));
        if (current.lost[name]) item.title = current.lost[name];
        list.append(item);
      }
      made.push(list);
    }
    for (const [name, reason] of Object.entries(current.lost).slice(0, 5)) made.push(make("p", `${name} was lost: ${reason}`, { class: "note" }));
    fill($("round-body"), made);
  }

  // ---- the table of runs ----
  function runRow(run) {
    const row = make("tr", null, { role: "row", class: off.has(run.id) ? "off" : "" });
    const head = make("th", null, { role: "rowheader", scope: "row" }), box = make("div", null, { class: "run" });
    const toggle = make("button", null, { type: "button", class: "toggle", "aria-pressed": String(!off.has(run.id)), "aria-label": `draw ${title(run)}`, "data-key": `toggle-${run.id}` });
    toggle.append(swatch(run));
    toggle.addEventListener("click", () => { flip([run.id]); });
    const name = make("div");
    name.append(make("a", title(run), { href: `#run-${run.id}`, "data-key": `link-${run.id}` }), make("span", run.name, { class: "path" }));
    box.append(toggle, name);
    head.append(box);
    const state = make("td", null, { role: "cell", "data-label": "state" });
    state.append(make("span", STATES[run.state] || run.state, { class: `badge ${run.state}` }));
    if (run.note) state.append(make("span", run.note, { class: "why" }));
    row.append(head, state);
    const cell = (label, text, className = "") => { const made = make("td", text, { role: "cell", "data-label": label, class: className }); row.append(made); return made; };
    if (run.state === "unreadable") { cell("", "").setAttribute("colspan", "9"); return row; }
    const rounds = cell("rounds", `${run.done} / ${run.rounds || "?"}`, "rounds");
    rounds.append(bar(run.rounds ? doneOf(run) / run.rounds : 0, `rounds of ${title(run)}`));
    cell("time left", duration(timeLeft(run)), "left").dataset.left = run.id;
    cell($("score-title").textContent, run.score ? shown(run.score[1], run.metric.percent) : "–");
    cell("best", run.best ? `${shown(run.best[1], run.metric.percent)} (round ${run.best[0] + 1})` : "–");
    cell("clients", hasNumber(run.online) ? String(run.online) : "–");
    cell("lost", String(run.lost_count));
    cell("up / down", `${bytes(run.up)} / ${bytes(run.down)}`);
    const spent = run.privacy;
    cell("ε spent / left", spent ? `${digits(spent.spent)} / ${digits(spent.left)}` : "–", "private");
    const active = run.alarms.filter((alarm) => alarm.active).length;
    cell("alarms", run.alarms.length ? `${active} now, ${run.alarms.length} in all` : "0");
    return row;
  }
  function table(list) {
    $("runs").hidden = selected !== "" || list.length < 2;
    if ($("runs").hidden) return;
    const names = new Set(list.filter((run) => run.metric).map((run) => run.metric.name));
    $("score-title").textContent = names.size === 1 ? [...names][0] : "score";
    const held = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
    fill($("rows"), list.map(runRow));
    const anyPrivate = list.some((run) => run.privacy);
    for (const cell of document.querySelectorAll(".private")) cell.hidden = !anyPrivate;
    if (held) { const again = document.querySelector(`[data-key="${CSS.escape(held)}"]`); if (again) again.focus(); }
  }
  function flip(which) {
    const hide = which.some((id) => !off.has(id));
    for (const id of which) if (hide) off.add(id); else off.delete(id);
    draw();
  }

  // ---- alarms, lost clients, plan ----
  function listOf(section, list, items) {
    $(section).hidden = !items.length;
    fill($(list), items);
  }
  function findings(list) {
    const many = selected === "" && list.length > 1;
    const alarms = [], lost = [];
    for (const run of list) {
      for (const alarm of run.alarms || []) {
        const item = make("li", null, { class: alarm.active ? "active" : "" });
        const when = alarm.first === alarm.last ? `round ${alarm.first + 1}` : `${plural(alarm.times, "round")}, ${alarm.first + 1} to ${alarm.last + 1}`;
        item.append(make("b", alarm.kind), make("span", ` · ${many ? title(run) + " · " : ""}${when}${alarm.active ? " · now" : ""}`, { class: "meta" }), make("div", alarm.text));
        alarms.push([alarm.last, item]);
      }
      for (const each of run.lost || []) {
        const item = make("li");
        item.append(make("b", each.client), make("span", ` · ${many ? title(run) + " · " : ""}${each.times > 1 ? `${each.times} times, last in ` : ""}round ${each.round + 1}`, { class: "meta" }), make("div", each.reason));
        lost.push([each.round, item]);
      }
    }
    const most = many ? 12 : 30;
    const newest = (pairs) => {
      const made = pairs.sort((a, b) => b[0] - a[0]).slice(0, most).map((pair) => pair[1]);
      if (pairs.length > most) made.push(make("li", `and ${pairs.length - most} more; open a run to see its own`, { class: "meta" }));
      return made;
    };
    listOf("alarms", "alarm-list", newest(alarms));
    listOf("lost", "lost-list", newest(lost));
  }
  function plan(run) {
    const stage = run && run.plan;
    $("plan").hidden = !stage || !stage.roles.length;
    if ($("plan").hidden) return;
    const rounds = stage.first === stage.last ? `round ${stage.first + 1}` : `rounds ${stage.first + 1} to ${stage.last + 1}`;
    $("plan-note").textContent = `What a client${stage.client ? ` (here ${stage.client})` : ""} trains, sends, receives and keeps in ${rounds}. Clients that choose layers send less.`;
    const share = (part, whole) => {
      const cell = make("td", null, { role: "cell" });
      const box = make("span", null, { class: part ? "share" : "share none" });
      if (part) { const track = make("i", null, { "aria-hidden": "true" }), inner = make("span"); inner.style.width = `${(100 * part) / whole}%`; track.append(inner); box.append(track); }
      box.append(make("span", !part ? "–" : part === whole ? "all" : `${Math.max(1, Math.round((100 * part) / whole))} %`));
      cell.append(box);
      return cell;
    };
    fill($("plan-rows"), stage.roles.map((role) => {
      const row = make("tr", null, { role: "row" });
      row.append(make("th", role.role, { role: "rowheader", scope: "row" }), make("td", role.all.toLocaleString("en").replaceAll(",", " "), { role: "cell" }), share(role.trains, role.all), share(role.up, role.all), share(role.down, role.all), share(role.keep, role.all));
      return row;
    }));
  }

  // ---- charts ----
  function metricsOf(list) {
    const found = new Map();
    const main = list.find((run) => run.metric && run.curves.has(`test/${run.metric.name}`));
    if (main) { const key = `test/${main.metric.name}`; found.set(key, main.curves.get(key)); }
    for (const group of ["personal/", "validation/", "train_loss", "privacy/epsilon", "test/loss", "sent", "test/", ""]) {
      for (const run of list) for (const [key, curve] of run.curves) if (!found.has(key) && key.startsWith(group)) found.set(key, curve);
    }
    return found;
  }
  function defaults(keys) {
    const wanted = keys.filter((key) => !/^(lr|clients\/|drift\/|unseen\/|personal\/.*\/worst_tenth)/.test(key));
    return wanted.slice(0, DEFAULTS);
  }
  function chips(list, metrics) {
    const keys = [...metrics.keys()];
    const open = chosen || defaults(keys);
    const held = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
    fill($("metrics"), keys.map((key) => {
      const button = make("button", metrics.get(key).title, { type: "button", "aria-pressed": String(open.includes(key)), "data-key": `metric-${key}` });
      button.addEventListener("click", () => { chosen = open.includes(key) ? open.filter((each) => each !== key) : [...open, key]; draw(); });
      return button;
    }));
    const groups = labels().map((label) => list.filter((run) => run.label === label)).filter((group) => group.length);
    $("legend").hidden = list.length < 2;
    fill($("legend"), groups.map((group) => {
      const button = make("button", null, { type: "button", "aria-pressed": String(group.some((run) => !off.has(run.id))), "data-key": `label-${group[0].label}` });
      button.append(swatch(group[0]), make("span", group.length > 1 ? `${group[0].label} (${group.length})` : title(group[0])));
      button.addEventListener("click", () => { flip(group.map((run) => run.id)); });
      return button;
    }));
    if (held) { const again = document.querySelector(`[data-key="${CSS.escape(held)}"]`); if (again) again.focus(); }
    return keys.filter((key) => open.includes(key));
  }
  function aligned(list, key) {
    const rounds = new Set();
    for (const run of list) for (const round of run.curves.get(key)?.rounds || []) rounds.add(round);
    const x = [...rounds].sort((a, b) => a - b), place = new Map(x.map((round, index) => [round, index]));
    const columns = list.map((run) => {
      const column = new Array(x.length).fill(null), curve = run.curves.get(key);
      if (curve) curve.rounds.forEach((round, index) => { column[place.get(round)] = curve.percent ? 100 * curve.values[index] : curve.values[index]; });
      return column;
    });
    return [x.map((round) => round + 1), ...columns];
  }
  function describe(list, key, curve) {
    const parts = list.slice(0, 8).map((run) => {
      const own = run.curves.get(key);
      return own && own.values.length ? `${title(run)}: ${shown(own.values[own.values.length - 1], own.percent)} in round ${own.rounds[own.rounds.length - 1] + 1}` : null;
    }).filter(Boolean);
    return `${curve.title} by round. ${parts.join("; ")}`;
  }
  function inks() {
    const style = getComputedStyle(document.documentElement);
    return { ink: style.getPropertyValue("--muted").trim(), grid: style.getPropertyValue("--grid").trim(), pale: style.getPropertyValue("--pale").trim() };
  }
  function buildChart(key, curve, list) {
    const { ink, grid, pale } = inks(), figure = make("figure", null, { class: "chart", "data-metric": key });
    const holder = make("div", null, { class: "plot", tabindex: "0", role: "img" });
    figure.append(make("figcaption", curve.percent ? `${curve.title}, %` : curve.title), holder);
    $("charts").append(figure);
    const tip = make("div", null, { class: "tip", "aria-hidden": "true" });
    tip.hidden = true;
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
    const faint = (run) => selected && run.id !== selected;
    const plot = new uPlot({
      width: Math.max(200, holder.clientWidth), height: holder.clientHeight,
      legend: { show: false },
      cursor: { sync: { key: "partita" }, focus: { prox: 24 }, points: { size: 7 }, drag: { x: true, y: false } },
      focus: { alpha: 0.35 },
      scales: { x: { time: false, range: (_, low, high) => (low === null || low === high ? [(low ?? 1) - 0.5, (low ?? 1) + 0.5] : [low, high]) }, y: $("log").checked ? { distr: 3 } : {} },
      axes: [{ ...axis, size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000, 1000000] }, { ...axis, size: 58, values: (_, splits) => splits.map((value) => (value === null ? "" : digits(value))) }],
      series: [{}, ...list.map((run) => ({ label: title(run), stroke: faint(run) ? pale : color(run), width: selected === run.id ? 2.5 : list.length > 12 ? 1.25 : 2, spanGaps: true, points: { show: (u, series) => !faint(run) && list.length <= 12 && u.data[series].filter((value) => value !== null).length <= 12, size: 5 } }))],
      hooks: { setCursor: [(u) => showTip(u, tip, list, curve)] },
    }, aligned(list, key), holder);
    plot.over.append(tip);
    plot.over.addEventListener("mouseleave", () => { tip.hidden = true; });
    holder.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const length = plot.data[0].length, now = plot.cursor.idx ?? (step > 0 ? -1 : length);
      const place = Math.max(0, Math.min(length - 1, now + step));
      plot.setCursor({ left: plot.valToPos(plot.data[0][place], "x"), top: plot.over.clientHeight / 3 });
      $("status").textContent = tip.textContent;
    });
    holder.addEventListener("blur", () => { tip.hidden = true; });
    new ResizeObserver(() => plot.setSize({ width: Math.max(200, holder.clientWidth), height: holder.clientHeight })).observe(holder);
    return { key, plot, holder, curve };
  }
  function showTip(u, tip, list, curve) {
    const index = u.cursor.idx;
    const over = u.over.matches(":hover") || u.root.parentElement === document.activeElement;
    if (index === null || index === undefined || u.cursor.left < 0 || !over) { tip.hidden = true; return; }
    const found = list.map((run, place) => [u.data[place + 1][index], run]).filter(([value]) => hasNumber(value)).sort((a, b) => b[0] - a[0]);
    if (!found.length) { tip.hidden = true; return; }
    const lines = [make("b", `round ${u.data[0][index]}`)];
    for (const [value, run] of found.slice(0, 10)) {
      const line = make("div");
      const box = swatch(run);
      line.append(box, make("span", title(run), { class: "name" }), make("span", curve.percent ? `${value.toFixed(1)} %` : digits(value)), make("span", ". ", { class: "hidden" }));
      lines.push(line);
    }
    if (found.length > 10) lines.push(make("div", `and ${found.length - 10} more`));
    fill(tip, lines);
    tip.hidden = false;
    const width = tip.offsetWidth, room = u.over.clientWidth;
    tip.style.left = `${u.cursor.left + 14 + width > room ? Math.max(0, u.cursor.left - width - 14) : u.cursor.left + 14}px`;
    tip.style.top = `${Math.max(0, Math.min(u.over.clientHeight - tip.offsetHeight, u.cursor.top - 10))}px`;
  }
  function drawCharts(list) {
    const metrics = metricsOf(selected ? list.filter((run) => run.id === selected) : list);
    $("curves").hidden = !metrics.size;
    const open = chips(list, metrics);
    const visible = list.filter((run) => !off.has(run.id) || run.id === selected);
    visible.sort((a, b) => (a.id === selected) - (b.id === selected)); // the selected run is drawn last, on top
    const shape = JSON.stringify([open, visible.map((run) => [run.id, run.label]), selected, $("log").checked, dark.matches]);
    if (shape !== drawn) {
      for (const chart of charts) chart.plot.destroy();
      $("charts").replaceChildren();
      charts = open.map((key) => buildChart(key, metrics.get(key), visible));
      drawn = shape;
      $("charts").dataset.count = String(open.length);
    } else {
      for (const chart of charts) chart.plot.setData(aligned(visible, chart.key));
    }
    for (const chart of charts) chart.holder.setAttribute("aria-label", describe(visible, chart.key, chart.curve));
  }

  // ---- the whole page ----
  function crumbs(list) {
    const run = selected ? runs.get(selected) : null;
    $("crumbs").hidden = !run || list.length < 2;
    if ($("crumbs").hidden) return;
    const more = make("span", null, { class: "more" }), place = ids.indexOf(selected);
    const near = (offset, text) => { const other = runs.get(ids[place + offset]); if (other) more.append(make("a", text, { href: `#run-${other.id}`, "aria-label": `${text}: ${title(other)}` })); };
    near(-1, "previous run");
    near(1, "next run");
    fill($("crumbs"), [make("a", `All ${list.length} runs`, { href: "#all" }), make("span", "›", { "aria-hidden": "true" }), make("strong", title(run)), make("span", run.name, { class: "note" }), more]);
  }
  function draw() {
    const list = all().filter((run) => run.state);
    const asked = location.hash.startsWith("#run-") ? location.hash.slice(5) : "";
    selected = runs.has(asked) ? asked : "";
    const focus = selected ? runs.get(selected) : list.length === 1 ? list[0] : null;
    const subject = focus ? [focus] : list;
    $("empty").hidden = list.length > 0;
    $("empty").textContent = last ? `No run here yet. Runs at or below ${last.roots.join(", ")} appear as soon as they start.` : "";
    $("tiles").hidden = !list.length;
    crumbs(list);
    tiles(subject);
    currentRound(focus);
    table(list);
    findings(subject);
    plan(focus);
    drawCharts(list.filter((run) => run.state !== "unreadable"));
    const running = list.filter(isLive).length;
    document.title = `${running ? `${plural(running, "run")} going on` : list.length ? "no run going on" : "no run yet"} – partita watch`;
  }
  function tick() {
    const lost = failures > 1;
    $("dot").className = lost ? "dot off" : answered ? "dot on" : "dot";
    $("live").textContent = lost ? "no connection; is partita watch still running?" : !answered ? "connecting" : last.reading ? "reading the runs" : last.too_many ? "live; not all runs are shown" : "live";
    const list = all();
    if (!list.length || !answered) return;
    const focus = selected ? runs.get(selected) : list.length === 1 ? list[0] : null;
    for (const cell of document.querySelectorAll("[data-left]")) { const run = runs.get(cell.dataset.left); if (run) cell.textContent = duration(timeLeft(run)); }
    if (list.some(isLive)) tiles(focus ? [focus] : list);
    if (focus && focus.current) currentRound(focus);
  }
  addEventListener("hashchange", () => { draw(); scrollTo(0, 0); });
  dark.addEventListener("change", draw);
  $("log").addEventListener("change", draw);
  setInterval(tick, 1000);
  poll();
})();
