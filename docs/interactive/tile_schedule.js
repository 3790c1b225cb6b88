// The tile scheduler of ragged batches: the twin of tilewise.testing.schedule, line for line.

import { say } from "./words.js";

/** The tiles of a packed batch in the order of their numbers: batch, head, block. */
export function tiles(lengths, nheads, block, longestFirst) {
  const found = [];
  lengths.forEach((length, batch) => {
    const blocks = Array.from({ length: Math.ceil(length / block) }, (_, i) => i);
    if (longestFirst) blocks.reverse();
    for (let head = 0; head < nheads; head++) {
      for (const mBlock of blocks) found.push({ tile: found.length, batch, head, mBlock });
    }
  });
  return found;
}

/** How many blocks of keys a tile visits in the self-attention of its sequence: its cost. */
export function keyBlocks(length, mBlock, block, causal) {
  return causal ? mBlock + 1 : Math.ceil(length / block);
}

/** When each tile runs and where, by tile number. Static: tile i runs on processor i % processors.
 * Dynamic: the next tile goes to the first free SM; of several, to the lowest number. */
export function simulate(costs, processors, dynamic) {
  const free = Array.from({ length: processors }, () => 0);
  return costs.map((cost, tile) => {
    const processor = dynamic ? free.indexOf(Math.min(...free)) : tile % processors;
    const start = free[processor];
    free[processor] = start + cost;
    return { processor, start, stop: start + cost, tile };
  });
}

/** When the last tile is done. */
export function makespan(runs) {
  return Math.max(0, ...runs.map((run) => run.stop));
}

/** The share of its time until the makespan that a processor is at work, over all of them. */
export function busy(runs, processors) {
  const work = runs.reduce((sum, run) => sum + run.stop - run.start, 0);
  return work ? work / (processors * makespan(runs)) : 1;
}

/** Everything that a reader's choice gives. */
export function plan(choice) {
  const { lengths, nheads, block, processors, causal, longestFirst } = choice;
  const found = tiles(lengths, nheads, block, longestFirst);
  const costs = found.map((tile) => keyBlocks(lengths[tile.batch], tile.mBlock, block, causal));
  return {
    tiles: found,
    costs,
    static: simulate(costs, processors, false),
    dynamic: simulate(costs, processors, true),
  };
}

/** The letter of a sequence; after z comes a again. */
export function letter(batch) {
  return "abcdefghijklmnopqrstuvwxyz"[batch % 26];
}

/** Lengths from text, at most `most` of them, none over `longest`. */
export function parseLengths(text, most, longest) {
  const words = text.split(/[\s,;]+/).filter((word) => word);
  const lengths = words.map(Number);
  const wrong = words.find((_, i) => !Number.isInteger(lengths[i]) || lengths[i] < 0);
  if (wrong !== undefined) return { lengths, problem: say('"{0}" is no length', wrong) };
  const long = lengths.find((length) => length > longest);
  if (long !== undefined) return { lengths, problem: say("{0} is over {1}", long, longest) };
  const problem = lengths.length > most ? say("more than {0} sequences", most) : "";
  return { lengths, problem };
}
