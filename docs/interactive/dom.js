// The few parts that all pieces are made of. Every control has a label and works by keyboard.

import { say } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat());
  return node;
}

/** An HTML element; attributes that begin with "on" listen. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

let count = 0;

/** A control under its label. */
export function field(label, control) {
  control.id ||= `interactive-${++count}`;
  return make("div", { class: "field" }, make("label", { for: control.id }, label), control);
}

/** A choice among a few values, [value, what it is called] or both in one. */
export function choice(options, chosen, onchange) {
  const items = options.map((option) => {
    const [value, text] = Array.isArray(option) ? option : [option, option];
    return make("option", { value, selected: value === chosen }, String(text));
  });
  return make("select", { onchange }, items);
}

/** A box to tick, with its label behind it. */
export function tick(label, checked, onchange) {
  const box = make("input", { type: "checkbox", checked, onchange });
  return { box, element: make("label", { class: "tick" }, box, label) };
}

/** A table; of `rows` the first cell is the row's heading. */
export function table(caption, heads, rows) {
  const line = (cells) =>
    make(
      "tr",
      {},
      cells.map((cell, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, cell)),
    );
  return make(
    "table",
    {},
    make("caption", {}, caption),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        heads.map((head) => make("th", { scope: "col" }, head)),
      ),
    ),
    make("tbody", {}, rows.map(line)),
  );
}

/** Buttons and a slider that walk through steps 0 .. count; `onstep` is told each. */
export function stepper(label, onstep) {
  let [at, last, timer] = [0, 0, 0];
  const slider = make("input", {
    ...{ type: "range", min: 0, max: 0, value: 0, "aria-label": label },
    oninput: () => (stop(), go(Number(slider.value))),
  });
  const button = (text, to) =>
    make("button", { type: "button", onclick: () => (stop(), go(to())) }, text);
  const back = button(say("Back"), () => at - 1);
  const next = button(say("Next"), () => at + 1);
  const first = button(say("Start"), () => 0);
  const end = button(say("End"), () => last);
  const play = make("button", { type: "button", onclick: () => (timer ? stop() : run()) }, say("Play"));
  const shown = make("span", { class: "place" });

  function stop() {
    clearInterval(timer);
    timer = 0;
    play.textContent = say("Play");
  }
  function run() {
    if (at === last) go(0);
    play.textContent = say("Pause");
    timer = setInterval(() => (at < last ? go(at + 1) : stop()), Math.min(900, 12000 / last));
  }
  function go(to) {
    at = Math.min(Math.max(to, 0), last);
    slider.value = at;
    slider.setAttribute("aria-valuetext", say("{0} of {1}", at, last));
    shown.textContent = `${at} / ${last}`;
    for (const one of [first, back]) one.setAttribute("aria-disabled", at === 0);
    for (const one of [next, end]) one.setAttribute("aria-disabled", at === last);
    onstep(at);
  }
  const element = make(
    "div",
    { class: "stepper", role: "group", "aria-label": label },
    make("div", { class: "buttons" }, first, back, next, end, play, shown),
    slider,
  );
  const reset = (steps, to = 0) => {
    stop();
    last = steps;
    slider.max = steps;
    go(to);
  };
  return { element, reset };
}

/** Calls `redraw(width)` now and whenever the element's width changes. */
export function onWidth(element, redraw) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    if (width) redraw(width);
  }).observe(element);
}

/** A number for readers: short, and with a true minus sign. */
export function short(x, digits = 3) {
  if (x === Infinity) return "∞";
  if (x === -Infinity) return "−∞";
  if (Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? x.toExponential(2) : x.toFixed(digits);
  return text.replaceAll("-", "−");
}

/** Bytes in the unit that suits them. */
export function bytes(n) {
  if (n < 1024) return `${n} B`;
  const kib = n / 1024;
  return kib < 1024 ? `${kib.toFixed(1)} KiB` : `${(kib / 1024).toFixed(2)} MiB`;
}
