// -- axes: from numbers to positions ----------------------------------------------------------------------------------

/** Place about `count` ticks between low and high, in steps of 1, 2 or 5 times a power of ten. */
function evenTicks(low, high, count, whole = false) {
  const raw = high / count - low / count; // the difference of large doubles may be infinite
  // The smallest doubles are too close to each other for steps.
  if (raw < 1e-305) return [low, high].map((value) => ({ value, label: short(value) }));
  const size = 10 ** Math.floor(Math.log10(raw));
  let step = size * [1, 2, 5, 10].find((factor) => factor * size >= raw * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) {
    // 3 * 0.1 is not 0.3: round to the digits of the step.
    ticks.push(step >= 1 ? i * step : Number((i * step).toPrecision(12)));
  }
  if (ticks.length < 3 && count < 12 && !whole) return evenTicks(low, high, count + 2);
  const labels = evenLabels(ticks, step);
  return ticks.map((value, i) => ({ value, label: labels[i] }));
}

/** Place ticks at powers of ten; if these are few, at 1, 2 and 5 times them; within a decade, in even steps. */
function logTicks(low, high) {
  const [from, to] = [Math.log10(low), Math.log10(high)];
  if (to - from < 1) return evenTicks(low, high, 4).filter((tick) => tick.value > 0);
  const [first, last] = [Math.ceil(from - 1e-9), Math.floor(to + 1e-9)];
  const ticks = [];
  if (last - first < 2) {
    for (let exponent = first - 1; exponent <= last; exponent++) {
      for (const digit of [1, 2, 5]) {
        const value = Number(`${digit}e${exponent}`);
        if (value >= low && value <= high) ticks.push({ value, label: digitAndPower(digit, exponent) });
      }
    }
    return ticks;
  }
  const step = Math.ceil((last - first) / 6);
  for (let exponent = Math.ceil(first / step) * step; exponent <= last; exponent += step) {
    ticks.push({ value: Number(`1e${exponent}`), label: power(exponent) });
  }
  return ticks;
}

/** Make a vertical axis with a margin for these numbers, which are finite, and positive on a log axis. */
function verticalAxis(values, isLog) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) [low, high] = isLog ? [0.1, 10] : [0, 1];
  if (isLog) {
    const air = high / low < 1.0000001 ? 2 : (high / low) ** 0.05;
    [low, high] = [Math.max(low / air, 5e-324), Math.min(high * air, Number.MAX_VALUE)];
    const [from, to] = [Math.log10(low), Math.log10(high)];
    return { ticks: logTicks(low, high), share: (value) => (Math.log10(value) - from) / (to - from) };
  }
  const size = Math.max(Math.abs(low), Math.abs(high));
  const half = high / 2 - low / 2; // the difference of large doubles may be infinite
  const air = half <= size * 1e-12 ? size * 0.05 || 1 : half * 0.1;
  [low, high] = [Math.max(low - air, -Number.MAX_VALUE), Math.min(high + air, Number.MAX_VALUE)];
  return { ticks: evenTicks(low, high, 4), share: (value) => (value / 2 - low / 2) / (high / 2 - low / 2) };
}
