// The online-softmax stepper: one row of scores, block by block, with the numbers of each step.

import { choice, draw, field, make, onWidth, short, stepper, table } from "./dom.js";
import { direct, finish, parseNumbers, walk } from "./online_softmax.js";
import { say } from "./words.js";

const MOST = 16;
const HEIGHT = 190;

/** Puts the piece into the page. */
export function mount(root) {
  const shown = { logits: [], values: [], states: [], block: 2, step: 3, width: 0 };
  const logits = make("input", {
    type: "text",
    value: "1, 3, 2, 0.5, 6, 2, 5, 1",
    spellcheck: "false",
  });
  const values = make("input", {
    type: "text",
    value: "1, 2, 3, 4, 5, 6, 7, 8",
    spellcheck: "false",
  });
  const block = choice([1, 2, 3, 4], 2, read);
  const problem = make("p", { class: "problem", role: "alert" });
  const chart = make("div", { class: "chart" });
  const sums = make("pre", { class: "sums", tabindex: 0, "aria-label": say("This step in numbers") });
  const history = make("div", {
    class: "scroll",
    tabindex: 0,
    role: "region",
    "aria-label": say("All steps so far"),
  });
  const said = make("p", { class: "said", "aria-live": "polite" });
  const steps = stepper(say("Step of the row"), (step) => ((shown.step = step), render()));
  logits.addEventListener("input", read);
  values.addEventListener("input", read);
  root.replaceChildren(
    make(
      "div",
      { class: "fields" },
      field(say("Scores of one row (−inf: masked)"), logits),
      field(say("A value per key"), values),
      field(say("Keys per block"), block),
    ),
    ...[problem, steps.element, said, chart, sums, history],
  );

  function read() {
    const [s, v] = [parseNumbers(logits.value), parseNumbers(values.value)];
    const count = s.numbers.length;
    let wrong = s.problem || v.problem;
    if (!wrong && (count === 0 || count > MOST)) wrong = say("between 1 and {0} scores, please", MOST);
    if (!wrong && v.numbers.length !== count)
      wrong = say("{0} scores and {1} values", count, v.numbers.length);
    if (!wrong && !v.numbers.every(Number.isFinite)) wrong = say("values must be finite");
    problem.textContent = wrong;
    if (wrong) return;
    shown.block = Number(block.value);
    Object.assign(shown, { logits: s.numbers, values: v.numbers });
    shown.states = walk(shown.logits, shown.values, shown.block);
    steps.reset(shown.states.length, shown.step);
  }

  function render() {
    if (!shown.states.length) return;
    said.textContent = sentence(shown);
    sums.textContent = inNumbers(shown);
    history.replaceChildren(historyOf(shown));
    if (shown.width) chart.replaceChildren(bars(shown));
  }

  read();
  onWidth(chart, (width) => ((shown.width = width), render()));
}

/** The state after the step that is shown; the step after the last block divides. */
function stateOf({ states, step }) {
  return states[Math.min(step, states.length - 1)];
}

function sentence({ states, step, logits, values }) {
  const state = stateOf({ states, step });
  if (step === 0) return say("Before the first block: m is −∞, and l and O are 0.");
  if (step === states.length) {
    const [ours, all] = [finish(state), direct(logits, values)];
    const off = Math.abs(ours.out - all.out);
    const gap = off === 0 ? "0" : short(off, 6);
    return say(
      "O / l = {0}. All scores at once give {1}: the difference is {2}.",
      ...[short(ours.out, 6), short(all.out, 6), gap],
    );
  }
  const seen = say("Block {0}, keys {1} to {2}: ", step, state.first, state.stop - 1);
  if (state.m === -Infinity) return seen + say("every score is masked, and nothing is added.");
  if (state.before === -Infinity) return seen + say("the first maximum is {0}.", short(state.m));
  return state.m > state.before
    ? seen +
        say("the maximum rises, so l and O shrink to {0} of what they were.", short(state.alpha))
    : seen + say("the maximum stays, alpha is 1, and nothing is rescaled.");
}

function inNumbers({ states, step }) {
  const x = stateOf({ states, step });
  if (step === 0) return "m = −∞\nl = 0\nO = 0";
  if (step === states.length) {
    const done = finish(x);
    return [
      `out = O / l = ${short(x.o)} / ${short(x.l)} = ${short(done.out)}`,
      `lse = m + ln l = ${short(x.m)} + ${short(Math.log(x.l))} = ${short(done.lse)}`,
    ].join("\n");
  }
  const m = x.m === -Infinity ? "0" : short(x.m);
  return [
    `m     = max(${short(x.before)}, ${short(x.blockMax)}) = ${short(x.m)}`,
    `alpha = exp(${short(x.before)} − ${m}) = ${short(x.alpha)}`,
    `p     = exp(s − m) = ${x.p.map((p) => short(p)).join(", ")}`,
    `l     = ${short(x.alpha)} · ${short(x.lBefore)} + ${short(x.added)} = ${short(x.l)}`,
    `O     = ${short(x.alpha)} · ${short(x.oBefore)} + ${short(x.addedO)} = ${short(x.o)}`,
  ].join("\n");
}

function historyOf({ states, step }) {
  const rows = states
    .slice(0, step + 1)
    .map((state, i) => [
      i === 0 ? say("start") : say("block {0}", i),
      ...[state.blockMax, state.m, state.alpha, state.l, state.o].map((x) => short(x)),
    ]);
  if (step === states.length) {
    const { out, lse } = finish(states[states.length - 1]);
    rows.push([say("end"), "", "", "", `lse ${short(lse)}`, `out ${short(out)}`]);
  }
  const heads = ["", say("max of block"), "m", "alpha", "l", "O"];
  return table(say("What is kept after each block"), heads, rows);
}

/** Scores above, with m as a line; below what each key weighs under the present m. */
function bars(shown) {
  const { logits, block, width } = shown;
  const state = stateOf(shown);
  const finite = logits.filter(Number.isFinite);
  const [low, high] = [Math.min(0, ...finite), Math.max(0, ...finite, 1e-9)];
  const column = (width - 2) / logits.length;
  const scale = 100 / (high - low);
  const y = (s) => 22 + (high - s) * scale;
  const picture = draw("svg", {
    ...{ width, height: HEIGHT + 40, viewBox: `0 0 ${width} ${HEIGHT + 40}`, role: "img" },
    "aria-label": say(
      "Scores {0}; m is {1}",
      ...[logits.map((s) => short(s, 2)).join(", "), short(state.m)],
    ),
  });
  const heading = (text, at) => draw("text", { x: 2, y: at, class: "caption" }, text);
  picture.append(
    heading(say("scores s, and m (dashed)"), 12),
    heading(say("weights exp(s − m) so far"), 146),
  );
  const isStep = shown.step > 0 && shown.step < shown.states.length;
  logits.forEach((s, i) => {
    const kind = i >= state.stop ? "ahead" : i >= state.first && isStep ? "now" : "seen";
    const x = 1 + i * column + column * 0.12;
    const wide = column * 0.76;
    if (Number.isFinite(s)) {
      const [top, bottom] = [y(Math.max(s, 0)), y(Math.min(s, 0))];
      picture.append(
        draw("rect", {
          x,
          y: top,
          width: wide,
          height: Math.max(bottom - top, 1),
          class: `bar ${kind}`,
        }),
      );
    }
    const label = Number.isFinite(s) ? String(s).replace("-", "−") : "−∞";
    picture.append(draw("text", { x: x + wide / 2, y: HEIGHT + 34, class: "tick-label" }, label));
    if (i < state.stop && state.m > -Infinity) {
      const weight = Math.exp(s - state.m) * 50;
      const at = { x, y: HEIGHT + 18 - weight, width: wide, height: Math.max(weight, 0.5) };
      picture.append(draw("rect", { ...at, class: `bar ${kind}` }));
    }
    if (i && i % block === 0) {
      const edge = 1 + i * column;
      picture.append(draw("line", { x1: edge, x2: edge, y1: 16, y2: HEIGHT + 38, class: "edge" }));
    }
  });
  const base = HEIGHT + 18;
  picture.append(draw("line", { x1: 0, x2: width, y1: base, y2: base, class: "axis" }));
  picture.append(draw("line", { x1: 0, x2: width, y1: y(0), y2: y(0), class: "axis" }));
  if (Number.isFinite(state.m)) {
    const at = y(state.m);
    picture.append(draw("line", { x1: 0, x2: width, y1: at, y2: at, class: "maximum" }));
  }
  return picture;
}
