// The varlen tile scheduler: which SM runs which tile when, in a fixed order and by a counter.

import { choice, draw, field, make, onWidth, stepper, table, tick } from "./dom.js";
import { busy, letter, makespan, parseLengths, plan } from "./tile_schedule.js";
import { say } from "./words.js";

const [MOST, LONGEST, MOST_TILES] = [64, 16384, 2000];
// Okabe and Ito's colours, distinct under colour blindness; letters repeat the distinction.
const COLOURS = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#8FA8FF"];
const [ROW, LABEL] = [20, 44];
const NAMES = {
  static: say("Static: tile i on SM i % SMs"),
  dynamic: say("Dynamic: the next tile to the first SM that is free"),
};

/** Puts the piece into the page. */
export function mount(root) {
  const shown = { step: 0, width: 0, plan: null };
  const lengths = make("input", {
    type: "text",
    value: "160, 300, 2048, 900, 128",
    spellcheck: "false",
  });
  lengths.addEventListener("input", read);
  const nheads = choice([1, 2, 4], 2, read);
  const block = choice([64, 128, 256], 128, read);
  const processors = choice([1, 2, 3, 4, 6, 8, 12], 6, read);
  const causal = tick(say("causal"), true, read);
  const longest = tick(say("last blocks of a head first"), true, read);
  const problem = make("p", { class: "problem", role: "alert" });
  const said = make("p", { class: "said", "aria-live": "polite" });
  const chart = make("div", { class: "chart" });
  const verdict = make("div", {
    class: "scroll",
    tabindex: 0,
    role: "region",
    "aria-label": say("Both schedules in numbers"),
  });
  const steps = stepper(say("Tiles handed out"), (step) => ((shown.step = step), render()));
  root.replaceChildren(
    make(
      "div",
      { class: "fields" },
      ...[field(say("Lengths of the sequences"), lengths), field(say("Heads"), nheads)],
      ...[field(say("Queries per tile"), block), field("SMs", processors)],
      make("div", { class: "ticks" }, causal.element, longest.element),
    ),
    ...[problem, steps.element, said, chart, verdict],
  );

  function read() {
    const found = parseLengths(lengths.value, MOST, LONGEST);
    let wrong = found.problem;
    const asked = {
      ...{ lengths: found.lengths, nheads: Number(nheads.value), block: Number(block.value) },
      ...{ processors: Number(processors.value), causal: causal.box.checked },
      longestFirst: longest.box.checked,
    };
    const made = wrong ? null : plan(asked);
    if (made && !made.tiles.length) wrong = say("no tiles: every sequence is empty");
    if (made && made.tiles.length > MOST_TILES)
      wrong = say("{0} tiles are too many to draw", made.tiles.length);
    problem.textContent = wrong;
    if (wrong) return;
    Object.assign(shown, { asked, plan: made });
    steps.reset(made.tiles.length, made.tiles.length);
  }

  function render() {
    if (!shown.plan) return;
    said.textContent = sentence(shown);
    verdict.replaceChildren(verdictOf(shown));
    if (shown.width) chart.replaceChildren(timelines(shown));
  }

  read();
  onWidth(chart, (width) => ((shown.width = width), render()));
}

function sentence({ plan: { tiles, costs, static: fixed, dynamic }, step }) {
  if (step === 0) return say("No tile has been handed out.");
  const { tile, batch, head, mBlock } = tiles[step - 1];
  const where = (run) => say("SM {0} from {1} to {2}", run.processor, run.start, run.stop);
  const blocks = costs[tile] === 1 ? say("1 block of keys") : say("{0} blocks of keys", costs[tile]);
  return say(
    "Tile {0} (sequence {1}, head {2}, block {3}) visits {4}: static on {5}, dynamic on {6}.",
    ...[tile, letter(batch), head, mBlock, blocks, where(fixed[tile]), where(dynamic[tile])],
  );
}

function verdictOf({ plan: made, asked }) {
  const until = makespan(made.static);
  const rows = ["static", "dynamic"].map((name) => [
    say(name),
    String(makespan(made[name])),
    `${(100 * busy(made[name], asked.processors)).toFixed(1)} %`,
    (until / makespan(made[name])).toFixed(2),
  ]);
  const heads = ["", say("until"), say("busy"), say("speed-up")];
  return table(say("All tiles, in blocks of keys"), heads, rows);
}

function timelines({ plan: made, asked, step, width }) {
  const panel = 26 + asked.processors * ROW + 10;
  const total = Math.max(makespan(made.static), makespan(made.dynamic), 1);
  const scale = (width - LABEL - 4) / total;
  const height = 2 * panel + 4;
  const picture = draw("svg", {
    ...{ width, height, viewBox: `0 0 ${width} ${height}`, role: "img" },
    "aria-label": say(
      "Timelines of {0} SMs and {1} tiles: static until {2}, dynamic until {3}",
      ...[asked.processors, made.tiles.length, makespan(made.static), makespan(made.dynamic)],
    ),
  });
  Object.keys(NAMES).forEach((name, place) => {
    const top = place * panel + 24;
    const bottom = top + asked.processors * ROW;
    picture.append(draw("text", { x: 2, y: top - 9, class: "caption" }, NAMES[name]));
    for (let sm = 0; sm < asked.processors; sm++) {
      const y = top + sm * ROW;
      picture.append(draw("text", { x: 2, y: y + 13, class: "row-label" }, `SM ${sm}`));
      picture.append(
        draw("rect", { x: LABEL, y, width: total * scale, height: ROW - 3, class: "idle" }),
      );
    }
    for (const run of made[name].slice(0, step))
      picture.append(box(run, made, { top, scale, step }));
    const end = LABEL + makespan(made[name].slice(0, step)) * scale;
    picture.append(draw("line", { x1: end, x2: end, y1: top - 4, y2: bottom + 2, class: "until" }));
  });
  return picture;
}

/** A tile on its SM's row, with its letter where there is room for it. */
function box(run, { tiles }, { top, scale, step }) {
  const { batch, head, mBlock } = tiles[run.tile];
  const [x, y] = [LABEL + run.start * scale, top + run.processor * ROW];
  const width = Math.max((run.stop - run.start) * scale - 0.8, 0.4);
  const name = say(
    "tile {0}: sequence {1}, head {2}, block {3}; {4} to {5}",
    ...[run.tile, letter(batch), head, mBlock, run.start, run.stop],
  );
  const made = draw(
    "g",
    { class: run.tile === step - 1 ? "run now" : "run" },
    draw("title", {}, name),
  );
  const fill = COLOURS[batch % COLOURS.length];
  made.append(draw("rect", { x, y, width, height: ROW - 3, fill }));
  if (width > 10) made.append(draw("text", { x: x + 3, y: y + 13 }, letter(batch)));
  return made;
}
