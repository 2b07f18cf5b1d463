"use strict";
// The page of `partita watch`: a table of the runs, above the report of their finished rounds. All text goes into the
// page as text, never as HTML.
(() => {
  const POLL = 2000; // milliseconds between two requests
  const STATES = { stale: "process gone", unreadable: "cannot be read" };
  const $ = (id) => document.getElementById(id);
  const frame = $("report");
  const states = new Map(); // name of a run -> its last state
  let version = -1, clock = 0, answered = 0, failures = 0;

  function hasNumber(value) { return typeof value === "number" && isFinite(value); }
  function cell(text, kind) {
    const made = document.createElement("td");
    made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }
  function score(run, found) {
    if (!found) return "–";
    const value = run.metric.percent ? `${(100 * found[1]).toFixed(1)} %` : found[1].toPrecision(4);
    return found === run.best ? `${value} in round ${found[0] + 1}` : value;
  }
  function duration(seconds) {
    if (seconds < 90) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  function timeLeft(run) {
    if (!["running", "waiting"].includes(run.state) || !hasNumber(run.pace) || !run.rounds) return "–";
    const begun = run.round.round === run.done && hasNumber(run.round.started);
    const spent = begun ? Math.min(run.pace, Math.max(0, Date.now() / 1000 + clock - run.round.started)) : 0;
    return duration(Math.max(0, (run.rounds - run.done) * run.pace - spent));
  }
  function thisRound(run) {
    const { phase, asked, replied, cohort } = run.round;
    return phase ? `${phase}${hasNumber(replied) ? `, ${replied} of ${hasNumber(cohort) ? cohort : asked} replied` : ""}` : "–";
  }
  function notes(run) {
    const epsilon = hasNumber(run.epsilon) ? [`ε ${run.epsilon.toPrecision(3)} spent`] : [];
    const lost = run.lost.length ? [`lost ${run.lost.join(", ")}`] : [];
    const alarms = run.alarms.length ? [`alarm: ${run.alarms.join(", ")}`] : [];
    return [...(run.note ? [run.note] : []), ...alarms, ...lost, ...epsilon].join("; ");
  }
  function title(run) { return hasNumber(run.seed) ? `${run.label}, seed ${run.seed}` : run.label; }
  function row(run) {
    const made = document.createElement("tr"), rounds = cell(`${run.done} / ${run.rounds}`);
    const bar = document.createElement("progress");
    bar.max = run.rounds || 1;
    bar.value = run.done;
    bar.setAttribute("aria-label", `rounds of ${title(run)}`);
    rounds.append(bar);
    const name = cell(title(run));
    name.title = run.name;
    made.append(name, cell(STATES[run.state] || run.state, run.state), rounds, cell(timeLeft(run)),
      cell(score(run, run.score)), cell(score(run, run.best)), cell(thisRound(run)), cell(notes(run)));
    return made;
  }

  // The report is loaded again when rounds end. It stays where the reader has scrolled, with the choices made in it.
  function choices() { return [...frame.contentDocument.querySelectorAll("select, input")]; }
  function load() {
    const chosen = frame.hidden ? [] : choices().map((each) => [each.value, each.checked]);
    const place = window.scrollY;
    frame.onload = () => {
      choices().forEach((each, index) => {
        if (!chosen[index] || (each.value === chosen[index][0] && each.checked === chosen[index][1])) return;
        [each.value, each.checked] = chosen[index];
        each.dispatchEvent(new Event("change"));
      });
      const root = frame.contentDocument.documentElement;
      new ResizeObserver(() => { frame.style.height = `${frame.contentDocument.body.scrollHeight + 40}px`; }).observe(root);
      frame.style.height = `${frame.contentDocument.body.scrollHeight + 40}px`;
      window.scrollTo(0, place);
    };
    frame.hidden = false;
    frame.src = `report?${version}`;
  }

  async function poll() {
    try {
      const answer = await fetch("state", { cache: "no-store", credentials: "omit" });
      if (!answer.ok) throw new Error(String(answer.status));
      const state = await answer.json(), changed = state.version !== version;
      [clock, version, failures, answered] = [state.now - Date.now() / 1000, state.version, 0, Date.now()];
      $("rows").replaceChildren(...state.runs.map(row));
      $("runs").hidden = !state.runs.length;
      $("empty").hidden = state.runs.length && !state.too_many;
      $("empty").textContent = state.runs.length ? "There are more runs than the page shows." : "There is no run yet. The page shows runs as soon as they start.";
      const metrics = new Set(state.runs.filter((run) => run.metric).map((run) => run.metric.name));
      $("score-title").textContent = metrics.size === 1 ? [...metrics][0] : "score";
      const news = state.runs.filter((run) => states.has(run.name) && states.get(run.name) !== run.state);
      if (news.length) $("status").textContent = news.map((run) => `${title(run)}: ${STATES[run.state] || run.state}`).join(". ");
      for (const run of state.runs) states.set(run.name, run.state);
      if (changed && state.runs.some((run) => run.done)) load();
    } catch (error) {
      failures += 1;
      if (failures === 2) $("status").textContent = "The connection to partita watch is lost.";
    }
    $("live").textContent = failures > 1 ? `no answer since ${duration((Date.now() - answered) / 1000)}` : "live";
    setTimeout(poll, POLL);
  }
  poll();
})();
