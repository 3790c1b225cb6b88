// One row's online softmax, block by block, as tile/softmax.py computes it (there in base 2).
//
// m is the largest score so far, l the sum of e^(s - m), o the sum of e^(s - m) v. A new block can
// only raise m; what was summed before is then too large, and alpha = e^(m_before - m) corrects it.

import { say } from "./words.js";

/** Numbers separated by commas or spaces; "-inf" is a masked score. */
export function parseNumbers(text) {
  const words = text.split(/[\s,;]+/).filter((word) => word);
  const numbers = words.map((word) => (/^-(inf|∞)/i.test(word) ? -Infinity : Number(word)));
  const wrong = words.find((_, i) => Number.isNaN(numbers[i]) || numbers[i] === Infinity);
  return { numbers, problem: wrong === undefined ? "" : say('"{0}" is no finite number or -inf', wrong) };
}

/** The state before any block, then one after each block. */
export function walk(logits, values, block) {
  const states = [
    { first: 0, stop: 0, blockMax: NaN, before: NaN, m: -Infinity, alpha: NaN, p: [], l: 0, o: 0 },
  ];
  for (let first = 0; first < logits.length; first += block) {
    const { m: before, l, o } = states[states.length - 1];
    const scores = logits.slice(first, first + block);
    const blockMax = Math.max(...scores);
    const m = Math.max(before, blockMax);
    const reference = m === -Infinity ? 0 : m; // a row with nothing but masked scores so far
    const alpha = Math.exp(before - reference);
    const p = scores.map((s) => Math.exp(s - reference));
    const added = p.reduce((sum, x) => sum + x, 0);
    const addedO = p.reduce((sum, x, i) => sum + x * values[first + i], 0);
    states.push({
      ...{ first, stop: first + scores.length, blockMax, before, m, alpha, p, added, addedO },
      ...{ lBefore: l, oBefore: o, l: l * alpha + added, o: o * alpha + addedO },
    });
  }
  return states;
}

/** What the last state gives: a row that saw no key has out 0 and lse -inf. */
export function finish(state) {
  if (state.l === 0) return { out: 0, lse: -Infinity };
  return { out: state.o / state.l, lse: state.m + Math.log(state.l) };
}

/** The same from all scores at once, to compare with. */
export function direct(logits, values) {
  const m = Math.max(...logits);
  if (m === -Infinity) return { out: 0, lse: -Infinity };
  const p = logits.map((s) => Math.exp(s - m));
  const l = p.reduce((sum, x) => sum + x, 0);
  return { out: p.reduce((sum, x, i) => sum + x * values[i], 0) / l, lse: m + Math.log(l) };
}
