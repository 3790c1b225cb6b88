// The tile walk: the score matrix as a grid of tiles, visited one by one, with the bytes that pass.

import { bytes, choice, draw, field, make, onWidth, stepper, table } from "./dom.js";
import {
  FULL,
  PARTIAL,
  flashBytes,
  kinds,
  onChip,
  passes,
  standardBytes,
  visits,
} from "./tile_walk.js";
import { say } from "./words.js";

const WINDOW = 256;
const SM_BYTES = 232448; // of shared memory that one program may use
const NAMES = ["skipped", "partial", "full"];

/** Puts the piece into the page. */
export function mount(root) {
  const shown = { step: 0, width: 0 };
  const seqlen = choice([512, 1024, 2048], 1024, read);
  const masks = [
    ["causal", say("causal")],
    ["window", say("causal, window of {0}", WINDOW)],
    ["full", say("none")],
  ];
  const mask = choice(masks, "causal", read);
  const blockM = choice([64, 128, 256], 128, read);
  const blockN = choice([64, 128, 256], 128, read);
  const headdim = choice([64, 128], 128, read);
  const said = make("p", { class: "said", "aria-live": "polite" });
  const grid = make("div", { class: "chart square" });
  const counters = make("div", { class: "counters" });
  const steps = stepper(say("Tiles visited"), (step) => ((shown.step = step), render()));
  root.replaceChildren(
    make(
      "div",
      { class: "fields" },
      ...[field(say("Queries and keys"), seqlen), field(say("Mask"), mask), field("BLOCK_M", blockM)],
      ...[field("BLOCK_N", blockN), field("headdim", headdim)],
    ),
    ...[
      steps.element,
      said,
      make("div", { class: "side-by-side" }, make("div", {}, grid, legend()), counters),
    ],
  );

  function read() {
    shown.shape = {
      ...{ seqlen: Number(seqlen.value), headdim: Number(headdim.value), mask: mask.value },
      ...{ blockM: Number(blockM.value), blockN: Number(blockN.value), left: WINDOW - 1 },
    };
    shown.kinds = kinds(shown.shape);
    shown.visits = visits(shown.shape);
    if (shown.width) grid.replaceChildren(matrix(shown));
    steps.reset(shown.visits.length, Math.min(shown.visits.length, 12));
  }

  function render() {
    mark(grid, shown);
    said.textContent = sentence(shown);
    counters.replaceChildren(...countersOf(shown));
  }

  read();
  onWidth(grid, (width) => {
    shown.width = width;
    grid.replaceChildren(matrix(shown));
    mark(grid, shown);
  });
}

/** What the colours of tiles mean; partial ones are half drawn. */
function legend() {
  const names = { now: "at work", done: "visited", ahead: "to come", hidden: "skipped" };
  const items = Object.entries(names).map(([name, text]) =>
    make("span", { class: "item" }, make("span", { class: `key ${name}` }), say(text)),
  );
  return make(
    "p",
    { class: "legend" },
    items,
    make("span", { class: "item" }, say("half a tile: partial, masked")),
  );
}

function matrix({ shape, kinds: rows, width }) {
  const side = Math.min(width, 460);
  const [tall, wide] = [side / rows.length, side / rows[0].length];
  const counts = [0, 1, 2].map((kind) => rows.flat().filter((its) => its === kind).length);
  const picture = draw("svg", {
    ...{ width: side, height: side, viewBox: `0 0 ${side} ${side}`, role: "img" },
    "aria-label": say(
      "Score matrix of {0} queries, down, and keys, across: {1} tiles are skipped, {2} need a mask, {3} need none",
      ...[shape.seqlen, ...counts],
    ),
  });
  rows.forEach((row, m) =>
    row.forEach((kind, n) => {
      const at = { x: n * wide + 0.5, y: m * tall + 0.5, width: wide - 1, height: tall - 1 };
      const tile = draw("g", { class: `tile ${NAMES[kind]}`, "data-at": `${m},${n}` });
      tile.append(draw("rect", at));
      if (kind === PARTIAL) {
        const { x, y } = at;
        const corner = `M${x},${y} V${y + at.height} H${x + at.width} Z`;
        tile.append(draw("path", { d: corner, class: "half" }));
      }
      picture.append(tile);
    }),
  );
  return picture;
}

/** Marks the visited tiles; the last of them is the one at work. */
function mark(grid, { visits: all, step }) {
  const place = new Map(all.map((visit, i) => [`${visit.m},${visit.n}`, i]));
  for (const tile of grid.querySelectorAll(".tile")) {
    const its = place.get(tile.dataset.at);
    tile.classList.toggle("done", its !== undefined && its < step - 1);
    tile.classList.toggle("now", its === step - 1);
  }
}

function sentence({ visits: all, step, shape }) {
  if (step === 0) return say("Nothing has been read yet.");
  const { m, n, kind, isFirst, isLast } = all[step - 1];
  const visit = say("Block {0} of queries visits block {1} of keys", m, n);
  const parts = [kind === FULL ? "all pairs are seen: no mask" : "some pairs are hidden: masked"];
  if (isFirst) parts.push("Q was read first");
  if (isLast) parts.push("then O and the lse are written");
  const size = bytes(onChip(shape));
  const held =
    onChip(shape) > SM_BYTES
      ? say("{0}: more than the {1} of a Hopper SM", size, bytes(SM_BYTES))
      : size;
  return say(
    "{0} ({1}). With a block of Q, two of K and two of V a program holds {2}.",
    ...[visit, parts.map((part) => say(part)).join(say("; ")), held],
  );
}

function countersOf({ shape, visits: all, step }) {
  const share = step / all.length;
  const [flash, standard] = [flashBytes(all, step), standardBytes(shape, share)];
  const end = passes(shape).reduce((sum, pass) => sum + pass.read + pass.written, 0);
  const done = flashBytes(all, all.length);
  const most = Math.max(end, done.read + done.written);
  const bar = (name, its) => {
    const total = its.read + its.written;
    const part = (n) => `width: ${(100 * n) / most}%`;
    return make(
      "div",
      { class: "counter" },
      make(
        "div",
        { class: "counter-name" },
        make("span", {}, name),
        make("strong", {}, bytes(total)),
      ),
      make(
        "div",
        { class: "meter", "aria-hidden": "true" },
        make("span", { class: "read", style: part(its.read) }),
        make("span", { class: "written", style: part(its.written) }),
      ),
    );
  };
  const ratio = (end / (done.read + done.written)).toFixed(1);
  const tilesOf = (kind) => all.filter((visit) => visit.kind === kind).length;
  const skipped =
    Math.ceil(shape.seqlen / shape.blockM) * Math.ceil(shape.seqlen / shape.blockN) - all.length;
  return [
    bar("FlashAttention", flash),
    bar(
      standard.name ? say("standard attention, at {0}", standard.name) : say("standard attention"),
      standard,
    ),
    make(
      "p",
      { class: "legend" },
      make("span", { class: "item" }, make("span", { class: "key read" }), say("read")),
      make("span", { class: "item" }, make("span", { class: "key written" }), say("written")),
      make("span", { class: "item" }, say("both at the same share of their way")),
    ),
    table(
      say("Bytes of one head, of the whole way"),
      ["", say("read"), say("written")],
      [
        ["FlashAttention", bytes(done.read), bytes(done.written)],
        ...passes(shape).map((pass) => [pass.name, bytes(pass.read), bytes(pass.written)]),
      ],
    ),
    make(
      "p",
      {},
      say(
        "{0} tiles with a mask, {1} without, {2} skipped. Standard attention moves {3} times the bytes.",
        ...[tilesOf(PARTIAL), tilesOf(FULL), skipped, ratio],
      ),
    ),
  ];
}
