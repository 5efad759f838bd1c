"use strict";

// -- numbers as text --------------------------------------------------------------------------------------------------

const NOT_FINITE = { nan: NaN, inf: Infinity, "-inf": -Infinity };

/** Decode a number of the data: a string if it is not finite, null if the row does not have the metric. */
function decoded(value) {
  return typeof value === "string" ? NOT_FINITE[value] : value;
}

/** Format with four significant digits, like Python's format(value, ".4g"). */
function short(value) {
  if (Number.isNaN(value)) return "not a number";
  if (!Number.isFinite(value)) return value > 0 ? "+∞" : "−∞";
  if (value === 0) return "0";
  const [digits, power] = value.toExponential(3).split("e");
  const exponent = Number(power);
  if (exponent >= -4 && exponent < 4) return trimmed(value.toFixed(3 - exponent));
  const sign = exponent < 0 ? "-" : "+";
  return `${trimmed(digits)}e${sign}${String(Math.abs(exponent)).padStart(2, "0")}`;
}

/** Format a value, with two digits of its error if there is one: 0.2134 ± 0.041. */
function withError(value, error) {
  return error >= 0 && Number.isFinite(value) ? `${short(value)} ± ${short(Number(error.toPrecision(2)))}` : short(value);
}

function trimmed(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** Format a power of ten: 10⁻³. */
function power(exponent) {
  const raised = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  return "10" + [...String(exponent)].map((sign) => raised[sign]).join("");
}

/** Format a tick between powers of ten: 0.02, 5, 200, 2×10⁻⁵. */
function digitAndPower(digit, exponent) {
  if (exponent >= -3 && exponent <= 3) return String(Number(`${digit}e${exponent}`));
  return digit === 1 ? power(exponent) : `${digit}×${power(exponent)}`;
}

/** Label evenly spaced ticks, with enough decimals to distinguish them. */
function evenLabels(ticks, step) {
  const largest = Math.max(...ticks.map(Math.abs));
  const order = Math.floor(Math.log10(step) + 1e-9);
  const fixed = (value, decimals) => value.toFixed(Math.min(Math.max(decimals, 0), 20)).replace("-", "−");
  const units = [[1e12, "T", 12], [1e9, "G", 9], [1e6, "M", 6], [1e3, "k", 3]];
  const unit = largest >= 1e4 && largest < 1e15 && units.find(([size]) => largest >= size);
  const exponent = Math.floor(Math.log10(largest || 1));
  return ticks.map((tick) => {
    if (tick === 0) return "0";
    if (unit) return fixed(tick / unit[0], unit[2] - order) + unit[1];
    if (largest >= 1e-3 && largest < 1e15) return fixed(tick, -order);
    return `${fixed(tick / 10 ** exponent, exponent - order)}×${power(exponent)}`;
  });
}
