// -- one panel --------------------------------------------------------------------------------------------------------

const HEIGHT = 240;
const EDGE = { top: 8, right: 8, bottom: 24 };
const INSET = 7; // keeps the first and the last point off the frame
const MANY = 60; // with more points, dots would look like a thick line

/** Keep the first, the last and the extreme points in each column of pixels: they cover the rest. */
function thinned(points) {
  if (points.length <= 2000) return points;
  const columns = new Map();
  for (const point of points) {
    const column = columns.get(Math.round(point[0]));
    if (column) column.push(point);
    else columns.set(Math.round(point[0]), [point]);
  }
  return [...columns.values()].flatMap((column) => {
    const [lowest, highest] = [Math.min, Math.max].map((extreme) => extreme(...column.map((point) => point[1])));
    const kept = [column.find((point) => point[1] == lowest), column.find((point) => point[1] == highest)];
    return column.filter((point, i) => i === 0 || i === column.length - 1 || kept.includes(point));
  });
}

/** Return what the vertical axis shows of the bands: their edges, up to as far beyond the values as these extend. */
function within(edges, values, isLog) {
  const [low, high] = [Math.min, Math.max].map((extreme) => values.reduce((a, b) => extreme(a, b), values[0]));
  const far = Math.max(high / 2 - low / 2, Math.abs(high) / 2, Math.abs(low) / 2) * 2;
  const [from, to] = isLog ? [low / 10, high * 10] : [low - far, high + far];
  return edges.map((edge) => Math.min(Math.max(edge, from), to)).filter((edge) => Number.isFinite(edge) && !(isLog && edge <= 0));
}

/** The plot of a panel. It draws from `page`, which holds the runs, whether each is shown, and the zoom. */
class Plot {
  constructor(article, spec) {
    Object.assign(this, spec, { article, isLog: spec.scale === "log", chosen: 0, position: null, stale: true });
    this.place = article.querySelector(".plot");
    this.canvas = article.querySelector(".canvas");
    const select = article.querySelector("select");
    if (select) this.chosen = Number(select.value);
    const some = page.runs.some((run) => spec.curves.some((curve) => (run.series[curve.key] || []).some((v) => v > 0)));
    if (!some) this.isLog = false;
  }

  /** Return the lines to draw now, one per run and curve. */
  shown() {
    const runs = this.layers ? [page.runs[this.chosen]] : page.runs.filter((run) => run.on);
    const found = [];
    for (const run of runs) {
      this.curves.forEach((curve, i) => {
        const values = run.series[curve.key];
        if (!values) return;
        const of = page.runs.length > 1 && !this.layers ? [run.name] : [];
        const parts = [...of];
        if (!parts.length || this.curves.length > 1) parts.push(curve.label);
        const color = curve.color || run.color;
        const line = { run: run.index, curve: i, label: parts.join(", "), color, dashes: curve.dashes, seldom: curve.seldom, positions: run.positions, values };
        const errors = curve.band && run.series[curve.band.key];
        const errorLabel = [...of, curve.band?.label].join(", ");
        if (errors) Object.assign(line, { errors, width: curve.band.errors, errorLabel });
        found.push(line);
      });
    }
    return found;
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    this.stale = false;
    this.lines = this.shown();
    this.axes(width);
    const { left, right, bottom } = this.frame;
    const name = `<text class="tick vertical" x="${left - 6}" y="${bottom + 16}">${page.axis}</text>`;
    const ticks = [...this.vertical.ticks.map((tick) => this.verticalTick(tick)), ...this.horizontalTicks(), name];
    const bands = this.lines.filter((line) => line.errors).map((line) => this.band(line));
    const lines = this.lines.map((line) => this.line(line));
    this.canvas.innerHTML =
      `<svg viewBox="0 0 ${width} ${HEIGHT}" width="100%" height="${HEIGHT}" aria-hidden="true">${ticks.join("")}` +
      `<svg class="area" x="${left}" y="${EDGE.top}" width="${right - left}" height="${bottom - EDGE.top}" ` +
      `viewBox="${left} ${EDGE.top} ${right - left} ${bottom - EDGE.top}"><g class="bands">${bands.join("")}</g>${lines.join("")}${this.marks()}</svg>` +
      `<g class="cross"></g><rect class="brush" y="${EDGE.top}" height="${bottom - EDGE.top}" width="0"/></svg>`;
    this.countHidden();
    this.showLegend();
    this.article.querySelector(".log").setAttribute("aria-pressed", String(this.isLog));
    this.article.querySelector(".reset").disabled = !page.zoom;
    if (this.positions.includes(this.position)) this.cross(this.position);
    else this.position = null;
  }

  /** Set the scales from the values within the zoom. */
  axes(width) {
    const [from, to] = page.zoom || page.extent;
    const values = [];
    const edges = [];
    const positions = new Set();
    this.hidden = 0;
    for (const line of this.lines) {
      line.positions.forEach((position, i) => {
        const value = line.values[i];
        if (value === null || position < from || position > to) return;
        positions.add(position);
        if (!Number.isFinite(value)) return;
        if (this.isLog && value <= 0) this.hidden++;
        else {
          values.push(value);
          edges.push(...this.edges(line, i));
        }
      });
    }
    this.positions = [...positions].sort((a, b) => a - b);
    this.vertical = verticalAxis(values.concat(within(edges, values, this.isLog)), this.isLog);
    const longest = Math.max(...this.vertical.ticks.map((tick) => tick.label.length), page.axis.length);
    // The last number of the horizontal axis, such as 100000, needs half its width at the right.
    const half = Math.ceil(String(Math.round(to)).length * 3.3) - INSET + 2;
    const right = width - Math.max(EDGE.right, half);
    this.frame = { left: Math.round(longest * 6.6 + 10), right, bottom: HEIGHT - EDGE.bottom };
    const { left, bottom } = this.frame;
    this.x = (position) => left + INSET + ((position - from) / (to - from)) * (right - left - 2 * INSET);
    this.y = (value) => bottom - this.vertical.share(value) * (bottom - EDGE.top);
    this.positionAt = (x) => from + ((x - left - INSET) / (right - left - 2 * INSET)) * (to - from);
  }

  verticalTick({ value, label }) {
    const y = this.y(value).toFixed(2);
    return (
      `<line class="grid" x1="${this.frame.left}" x2="${this.frame.right}" y1="${y}" y2="${y}"/>` +
      `<text class="tick vertical" x="${this.frame.left - 6}" y="${y}" dy="0.32em" data-value="${value}">${label}</text>`
    );
  }

  horizontalTicks() {
    const [from, to] = page.zoom || page.extent;
    const room = Math.max(2, Math.floor((this.frame.right - this.frame.left) / 70));
    return evenTicks(from, to, room, true).map(({ value }) => {
      const x = this.x(value).toFixed(2);
      return (
        `<line class="grid" x1="${x}" x2="${x}" y1="${EDGE.top}" y2="${this.frame.bottom}"/>` +
        `<text class="tick horizontal" x="${x}" y="${this.frame.bottom + 16}" data-value="${value}">${value}</text>`
      );
    });
  }

  /** Return the lower and the upper edge of the band at a point; nothing if its error is unknown. */
  edges({ errors, width, values }, i) {
    const error = errors?.[i];
    return error >= 0 && error !== null ? [values[i] - width * error, values[i] + width * error] : [];
  }

  /** Draw the errors of a line as an area, which breaks where the line does or an error is unknown. */
  band(line) {
    const [first, last] = this.inZoom(line.positions);
    // Far outside of the frame, a place is as good as any other.
    const place = (value) => Math.min(Math.max(this.isLog && value <= 0 ? Infinity : this.y(value), -HEIGHT), 2 * HEIGHT);
    let areas = "";
    let lone = "";
    let upper = [];
    let lower = [];
    const close = () => {
      if (upper.length > 1) areas += `M${thinned(upper).join("L")}L${thinned(lower).reverse().join("L")}Z`;
      else if (upper.length) lone += `M${upper[0]}L${lower[0]}`;
      [upper, lower] = [[], []];
    };
    for (let i = first; i <= last; i++) {
      const [low, high] = this.has(line.values[i]) ? this.edges(line, i) : [];
      const x = this.x(line.positions[i]).toFixed(2);
      if (low !== undefined) {
        upper.push([x, place(high).toFixed(2)]);
        lower.push([x, place(low).toFixed(2)]);
      } else if (line.seldom || line.values[i] !== null) close();
    }
    close();
    const path = (kind, d) => (d ? `<path class="band${kind} ${line.color}" data-run="${line.run}" data-curve="${line.curve}" d="${d}"/>` : "");
    return path("", areas) + path(" lone", lone);
  }

  /** Return the first and the last index within the zoom, and one more on either side, so that lines reach the frame. */
  inZoom(positions) {
    const [from, to] = page.zoom || page.extent;
    const last = positions.findIndex((position) => position > to);
    return [Math.max(positions.findIndex((position) => position >= from) - 1, 0), last < 0 ? positions.length - 1 : last];
  }

  has(value) {
    return value !== null && Number.isFinite(value) && !(this.isLog && value <= 0);
  }

  /**
   * Draw a path through the points. It skips positions without a value, and breaks at values that cannot be drawn. What
   * is measured seldom has no line across positions without a value, where it may be elsewhere: a lone bound is a bar.
   */
  line({ run, curve, color, dashes, seldom, positions, values }) {
    const [first, last] = this.inZoom(positions);
    let path = "";
    let dots = "";
    let points = [];
    const all = this.positions.length * this.lines.length <= MANY;
    const close = () => {
      if (points.length > 1) path += "M" + thinned(points).join("L");
      if (seldom && points.length === 1 && dashes.startsWith("bound")) {
        const [x, y] = points[0];
        path += `M${(x - 5).toFixed(2)},${y}L${(Number(x) + 5).toFixed(2)},${y}`;
      } else if (all || points.length === 1) {
        for (const [x, y] of points) dots += `<circle class="dot" cx="${x}" cy="${y}" r="2.4"/>`;
      }
      points = [];
    };
    for (let i = first; i <= last; i++) {
      if (this.has(values[i])) points.push([this.x(positions[i]).toFixed(2), this.y(values[i]).toFixed(2)]);
      else if (seldom || values[i] !== null) close();
    }
    close();
    const drawn = path ? `<path class="line ${dashes}" d="${path}"/>` : "";
    return `<g class="${color}" data-run="${run}" data-curve="${curve}">${drawn}${dots}</g>`;
  }

  /** Mark NaN and infinite values at the edges; one mark stands for several that would overlap. */
  marks() {
    const shapes = {
      NaN: (x) => `M${x - 3} ${this.frame.bottom - 8}l6 6m0 -6l-6 6`,
      Infinity: (x) => `M${x - 4} ${EDGE.top + 8}h8l-4 -6z`,
      "-Infinity": (x) => `M${x - 4} ${this.frame.bottom - 8}h8l-4 6z`,
    };
    let drawn = "";
    for (const line of this.lines) {
      const taken = {};
      line.values.forEach((value, i) => {
        if (value === null || Number.isFinite(value)) return;
        const x = Math.round(this.x(line.positions[i]));
        if (x - taken[value] < 10) return;
        taken[value] = x;
        drawn += `<path class="mark-${Number.isNaN(value) ? "nan" : "infinite"} ${line.color}" d="${shapes[value](x)}"/>`;
      });
    }
    return drawn;
  }

  /** Say how many points the log axis cannot show. */
  countHidden() {
    const note = this.article.querySelector(".hidden-points");
    note.hidden = this.hidden === 0;
    note.textContent = `${this.hidden} ${this.hidden === 1 ? "point is" : "points are"} 0 or less, which a log axis cannot show. `;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Show a linear axis";
    button.addEventListener("click", () => {
      this.toggleLog();
      this.place.focus(); // the button is removed
    });
    note.append(button);
  }

  /** Hide the layers that the chosen run does not have. */
  showLegend() {
    const drawn = new Set(this.lines.map((line) => line.curve));
    this.article.querySelectorAll(".legend .curve").forEach((entry, i) => (entry.hidden = this.layers && !drawn.has(i)));
  }

  toggleLog() {
    this.isLog = !this.isLog;
    this.draw();
  }

  /** Return the values at a position, the largest first. */
  at(position) {
    const found = [];
    for (const line of this.lines) {
      const i = line.positions.indexOf(position);
      const value = line.values[i];
      if (value !== null && value !== undefined) found.push({ ...line, value, text: withError(value, line.errors?.[i] ?? NaN) });
    }
    const rank = (value) => (Number.isNaN(value) ? -Infinity : value);
    return found.sort((a, b) => (rank(b.value) > rank(a.value) ? 1 : rank(b.value) < rank(a.value) ? -1 : 0));
  }

  nearest(x) {
    const wanted = this.positionAt(x);
    return this.positions.reduce((best, position) => (Math.abs(position - wanted) < Math.abs(best - wanted) ? position : best), this.positions[0]);
  }

  /** Draw a vertical line at a position, and return the values there. */
  cross(position) {
    this.position = position;
    const x = this.x(position).toFixed(2);
    const values = this.at(position);
    const dots = values
      .filter(({ value }) => this.has(value))
      .map(({ value, color }) => `<circle class="${color}" cx="${x}" cy="${this.y(value).toFixed(2)}" r="3.5"/>`);
    this.canvas.querySelector(".cross").innerHTML =
      `<line x1="${x}" x2="${x}" y1="${EDGE.top}" y2="${this.frame.bottom}"/>${dots.join("")}`;
    return values;
  }

  /** Emphasize the lines that match a selector. */
  emphasize(selector) {
    for (const line of this.canvas.querySelectorAll("[data-run]")) line.classList.toggle("closest", line.matches(selector));
  }

  clear() {
    this.position = null;
    this.emphasize(".none");
    const cross = this.canvas.querySelector(".cross");
    if (cross) cross.innerHTML = "";
  }

  /** Return a table of all plotted numbers, with every digit. */
  table() {
    const lines = this.shown();
    const table = document.createElement("table");
    const row = (cells, name) => {
      const line = table.insertRow();
      cells.forEach((text, i) => {
        const cell = document.createElement(i && name === "td" ? "td" : "th");
        if (cell.tagName === "TH") cell.scope = name === "td" ? "row" : "col";
        cell.textContent = text;
        line.append(cell);
      });
    };
    // An error is a column of its own.
    const columns = lines.flatMap((line) => (line.errors ? [line, { ...line, label: line.errorLabel, values: line.errors }] : [line]));
    row([page.axis, ...columns.map((line) => line.label)], "th");
    const positions = new Set(lines.flatMap((line) => line.positions));
    for (const position of [...positions].sort((a, b) => a - b)) {
      const values = columns.map((line) => line.values[line.positions.indexOf(position)] ?? null);
      if (values.some((value) => value !== null)) row([position, ...values.map((value) => value ?? "")], "td");
    }
    return table;
  }
}
