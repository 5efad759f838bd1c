// -- the page: shown runs, zoom, and input by mouse, touch and keyboard -----------------------------------------------

const page = { axis: "", runs: [], extent: [0, 1], gap: Infinity, zoom: null };
const tip = document.getElementById("tip");
const live = document.getElementById("live");

function load() {
  const data = JSON.parse(document.getElementById("data").textContent);
  page.axis = data.axis;
  page.runs = data.runs.map((run, index) => {
    const series = {};
    for (const [key, values] of Object.entries(run.series)) series[key] = values.map(decoded);
    return { ...run, index, on: true, positions: data.positions[run.positions], series };
  });
  const positions = data.positions.flat();
  const first = positions.reduce((a, b) => Math.min(a, b), Infinity);
  const last = positions.reduce((a, b) => Math.max(a, b), -Infinity);
  for (const each of data.positions) {
    each.slice(1).forEach((position, i) => (page.gap = Math.min(page.gap, position - each[i])));
  }
  page.extent = first < last ? [first, last] : [first - 0.5, first + 0.5];
  page.plots = [...document.querySelectorAll("article[data-plot]")].map(
    (article) => new Plot(article, data.plots[article.dataset.plot]),
  );
}

// -- draw only what is in view ----------------------------------------------------------------------------------------

const inView = new Set();
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const plot = page.plots.find((one) => one.article === entry.target);
      if (entry.isIntersecting) inView.add(plot);
      else inView.delete(plot);
    }
    redraw();
  },
  { rootMargin: "200px" },
);

function redraw() {
  for (const plot of inView) if (plot.stale) plot.draw();
}

/** Redraw everything: plots in view now, the rest when they come into view. */
function refresh() {
  for (const plot of page.plots) plot.stale = true;
  redraw();
}

// -- zoom: all plots show the same part of the axis -------------------------------------------------------------------

function zoomTo(from, to) {
  const [first, last] = page.extent;
  // At least two rows of a run, at most all.
  const width = Math.min(Math.max(to - from, page.gap), last - first);
  const start = Math.min(Math.max((from + to - width) / 2, first), last - width);
  page.zoom = width >= last - first ? null : [start, start + width];
  tip.hidden = true;
  refresh();
}

function resetZoom() {
  page.zoom = null;
  refresh();
}

function zoomAround(center, factor) {
  const [from, to] = page.zoom || page.extent;
  zoomTo(center - (center - from) * factor, center + (to - center) * factor);
}

// -- the tooltip: values at a position ---------------------------------------------------------------------------------

function showTip(plot, position, near = null) {
  const values = plot.cross(position);
  const distances = values.map(({ value }) => (near !== null && plot.has(value) ? Math.abs(plot.y(value) - near) : Infinity));
  const closest = Math.min(...distances) < Infinity && values.length > 1 ? distances.indexOf(Math.min(...distances)) : -1;
  plot.emphasize(closest < 0 ? ".none" : `[data-run="${values[closest].run}"][data-curve="${values[closest].curve}"]`);
  tip.replaceChildren();
  const head = document.createElement("p");
  head.textContent = `${page.axis} ${position}`;
  const list = document.createElement("ul");
  list.classList.toggle("many", values.length > (narrow() ? 24 : 12));
  values.forEach(({ label, text, color }, i) => {
    const item = document.createElement("li");
    const spot = document.createElement("span");
    spot.className = `spot ${color}`;
    const name = document.createElement("span");
    name.className = "name";
    name.textContent = label;
    const number = document.createElement("span");
    number.className = "number";
    number.textContent = text;
    item.classList.toggle("closest", i === closest);
    item.append(spot, name, number);
    list.append(item);
  });
  tip.append(head, list);
  tip.hidden = false;
  placeTip(plot, position);
  return values;
}

function narrow() {
  return window.innerWidth < 700;
}

/** Place the tooltip next to the line, on a phone below or above the plot; never outside the window. */
function placeTip(plot, position) {
  const box = plot.canvas.getBoundingClientRect();
  const x = box.left + plot.x(position);
  const width = tip.offsetWidth;
  const room = document.documentElement.clientWidth;
  const left = x + 14 + width < room ? x + 14 : x - 14 - width;
  const below = box.bottom + 4 + tip.offsetHeight < window.innerHeight ? box.bottom + 4 : box.top - 4 - tip.offsetHeight;
  const top = Math.min(narrow() ? below : box.top + 8, window.innerHeight - tip.offsetHeight - 8);
  tip.style.left = `${Math.max(4, Math.min(left, room - width - 4))}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip(plot) {
  tip.hidden = true;
  plot.clear();
}

function announce(position, values) {
  const said = values.slice(0, 8).map(({ label, text }) => `${label} ${text}`);
  if (values.length > 8) said.push(`and ${values.length - 8} more`);
  live.textContent = `${page.axis} ${position}: ${said.join("; ")}`;
}

// -- mouse and touch --------------------------------------------------------------------------------------------------

function listenToPointer(plot) {
  const fingers = new Map();
  let start = null;
  const place = (event) => event.clientX - plot.canvas.getBoundingClientRect().left;
  const brush = (from, to) => {
    const rect = plot.canvas.querySelector(".brush");
    rect.setAttribute("x", Math.min(from, to));
    rect.setAttribute("width", Math.abs(to - from));
  };

  const pinch = (event) => {
    const before = [...fingers.values()];
    fingers.set(event.pointerId, place(event));
    const after = [...fingers.values()];
    const apart = (pair) => Math.max(Math.abs(pair[0] - pair[1]), 10);
    zoomAround(plot.positionAt((after[0] + after[1]) / 2), apart(before) / apart(after));
  };

  plot.canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch") fingers.set(event.pointerId, place(event));
    else if (event.button === 0) {
      start = place(event);
      plot.canvas.setPointerCapture(event.pointerId);
    }
    move(event);
  });

  const move = (event) => {
    if (plot.stale || !plot.positions.length) return;
    if (fingers.size === 2) return pinch(event);
    if (start !== null) brush(start, place(event));
    const near = event.clientY - plot.canvas.getBoundingClientRect().top;
    showTip(plot, plot.nearest(place(event)), near);
  };
  plot.canvas.addEventListener("pointermove", move);

  plot.canvas.addEventListener("pointerup", (event) => {
    fingers.delete(event.pointerId);
    if (start === null) return;
    const [from, to] = [start, place(event)].sort((a, b) => a - b);
    start = null;
    brush(0, 0);
    if (to - from > 8) zoomTo(plot.positionAt(from), plot.positionAt(to));
  });
  plot.canvas.addEventListener("pointercancel", (event) => {
    fingers.delete(event.pointerId);
    start = null;
    hideTip(plot);
  });
  plot.canvas.addEventListener("pointerleave", (event) => {
    // After a touch the tooltip stays.
    if (event.pointerType !== "touch" && start === null) hideTip(plot);
  });
  document.addEventListener("pointerdown", (event) => {
    if (plot.position !== null && !plot.canvas.contains(event.target)) hideTip(plot);
  });
  plot.canvas.addEventListener("dblclick", resetZoom);
}

// -- keyboard ---------------------------------------------------------------------------------------------------------

function listenToKeys(plot) {
  const go = (position) => announce(position, showTip(plot, position));
  const step = (by) => {
    const at = plot.positions.indexOf(plot.position);
    const next = at < 0 ? (by > 0 ? 0 : plot.positions.length - 1) : at + by;
    go(plot.positions[Math.min(Math.max(next, 0), plot.positions.length - 1)]);
  };
  const zoom = (factor) => {
    const [from, to] = page.zoom || page.extent;
    zoomAround(plot.position ?? (from + to) / 2, factor);
    tip.hidden = true;
  };
  const actions = {
    ArrowLeft: () => step(-1),
    ArrowRight: () => step(1),
    Home: () => go(plot.positions[0]),
    End: () => go(plot.positions[plot.positions.length - 1]),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    l: () => plot.toggleLog(),
    L: () => plot.toggleLog(),
    Escape: () => {
      hideTip(plot);
      resetZoom();
    },
  };
  plot.place.addEventListener("keydown", (event) => {
    const action = actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey || plot.stale || !plot.positions.length) return;
    event.preventDefault();
    action();
  });
  plot.place.addEventListener("blur", () => hideTip(plot));
}

// -- buttons ----------------------------------------------------------------------------------------------------------

function listenToTools(plot) {
  const on = (selector, kind, action) => plot.article.querySelector(selector)?.addEventListener(kind, action);
  const numbers = plot.article.querySelector(".numbers");
  on(".log", "click", () => plot.toggleLog());
  on(".reset", "click", resetZoom);
  on(".tools .table", "click", (event) => {
    numbers.hidden = !numbers.hidden;
    event.target.setAttribute("aria-expanded", String(!numbers.hidden));
    fillTable(plot);
  });
  on("select", "change", (event) => {
    plot.chosen = Number(event.target.value);
    plot.draw();
    fillTable(plot);
  });
}

function fillTable(plot) {
  const numbers = plot.article.querySelector(".numbers");
  numbers.replaceChildren(...(numbers.hidden ? [] : [plot.table()]));
}

// -- show and hide runs -----------------------------------------------------------------------------------------------

function listenToRuns() {
  const boxes = [...document.querySelectorAll("#runs input")];
  if (!boxes.length) return;
  const show = (isOn) => {
    for (const [i, box] of boxes.entries()) page.runs[i].on = box.checked = isOn(i);
    const on = page.runs.filter((run) => run.on).length;
    const words = on < boxes.length ? "; texts and cards cover all runs" : "";
    document.getElementById("run-count").textContent = `${on} of ${boxes.length} runs${words}`;
    refresh();
    for (const plot of page.plots) fillTable(plot);
    sparklines();
  };
  boxes.forEach((box, i) => {
    box.addEventListener("click", (event) => show(event.altKey ? (j) => j === i : (j) => boxes[j].checked));
    box.parentElement.addEventListener("dblclick", () => show((j) => j === i));
    box.parentElement.addEventListener("pointerenter", () => page.plots.forEach((plot) => plot.emphasize(`[data-run="${i}"]`)));
    box.parentElement.addEventListener("pointerleave", () => page.plots.forEach((plot) => plot.emphasize(".none")));
  });
  document.getElementById("all-runs").addEventListener("click", () => show(() => true));
  document.getElementById("no-runs").addEventListener("click", () => show(() => false));
  if (narrow()) document.getElementById("runs").open = false;
}

// -- the small plots of the cards -------------------------------------------------------------------------------------

function sparklines() {
  const [width, height] = [120, 30];
  for (const spark of document.querySelectorAll(".spark")) {
    const { isLog } = page.plots.find((plot) => plot.article.dataset.plot === spark.dataset.plot);
    const good = (value) => value !== null && Number.isFinite(value) && !(isLog && value <= 0);
    const runs = page.runs.filter((run) => run.on && run.series[spark.dataset.key]);
    const { share } = verticalAxis(runs.flatMap((run) => run.series[spark.dataset.key].filter(good)), isLog);
    const [from, to] = page.extent;
    const paths = runs.map((run) => {
      const points = [];
      run.series[spark.dataset.key].forEach((value, i) => {
        const x = 3 + ((run.positions[i] - from) / (to - from)) * (width - 6);
        if (good(value)) points.push(`${x.toFixed(1)} ${(height - 3 - share(value) * (height - 6)).toFixed(1)}`);
      });
      // A single point is a line of length zero with round ends.
      return points.length ? `<path class="line ${run.color}" d="M${points.join("L")}${points.length > 1 ? "" : "h0"}"/>` : "";
    });
    spark.innerHTML = `<svg viewBox="0 0 ${width} ${height}" width="100%" height="${height}" preserveAspectRatio="none">${paths.join("")}</svg>`;
  }
}

// -- light and dark ---------------------------------------------------------------------------------------------------

function listenToTheme() {
  const button = document.getElementById("theme");
  const names = ["auto", "light", "dark"];
  const key = "normtheory-theme";
  const remembered = () => {
    try {
      return localStorage.getItem(key);
    } catch {
      return null; // the browser may forbid it
    }
  };
  const use = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = `theme: ${name}`;
  };
  use(names.includes(remembered()) ? remembered() : "auto");
  button.addEventListener("click", () => {
    const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
    use(next);
    try {
      localStorage.setItem(key, next);
    } catch {
      // the theme lasts until the page is closed
    }
  });
}

// -- start ------------------------------------------------------------------------------------------------------------

document.documentElement.classList.add("js");
listenToTheme();
load();
listenToRuns();
sparklines();
for (const plot of page.plots) {
  listenToPointer(plot);
  listenToKeys(plot);
  listenToTools(plot);
  watcher.observe(plot.article);
}
new ResizeObserver(refresh).observe(document.querySelector("main"));
// The bar must not cover the target of a link.
const bar = document.getElementById("bar");
new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${bar.offsetHeight}px`)).observe(bar);
window.addEventListener("beforeprint", () => page.plots.forEach((plot) => plot.draw()));
window.addEventListener("scroll", () => (tip.hidden = true), { passive: true });
