// Which tiles of the score matrix FlashAttention visits, in which order, and the bytes that pass
// between memory and chip on the way; beside them those of standard attention.

export const SKIPPED = 0;
export const PARTIAL = 1;
export const FULL = 2;
const BYTES = 2; // an element of Q, K, V, O, S or P in fp16 or bf16
const LSE_BYTES = 4;

/** The keys that a query sees, as first and stop: query i stands on key i. */
export function keysOf(shape, q) {
  const { seqlen, mask, left } = shape;
  const stop = mask === "full" ? seqlen : q + 1;
  return { first: mask === "window" ? Math.max(0, q - left) : 0, stop };
}

/** For each block of queries, what each block of keys is to it. */
export function kinds(shape) {
  const { seqlen, blockM, blockN } = shape;
  const rows = [];
  for (let m = 0; m < seqlen; m += blockM) {
    // Both ends of the band only move to the right, so the first and the last query decide
    const early = keysOf(shape, m);
    const late = keysOf(shape, Math.min(m + blockM, seqlen) - 1);
    const row = [];
    for (let n = 0; n < seqlen; n += blockN) {
      const last = Math.min(n + blockN, seqlen);
      const isSeen = n < late.stop && last > early.first;
      const isFull = last <= early.stop && n >= late.first;
      row.push(isSeen ? (isFull ? FULL : PARTIAL) : SKIPPED);
    }
    rows.push(row);
  }
  return rows;
}

/** The visits in the order of tile/bounds.py: of a row of tiles the partial ones, then the full. */
export function visits(shape) {
  const { seqlen, blockM, blockN, headdim } = shape;
  const found = [];
  kinds(shape).forEach((row, m) => {
    const rows = Math.min(blockM, seqlen - m * blockM);
    const mine = [PARTIAL, FULL].flatMap((kind) =>
      row.map((its, n) => ({ m, n, kind: its })).filter((tile) => tile.kind === kind),
    );
    mine.forEach((tile, i) => {
      const keys = Math.min(blockN, seqlen - tile.n * blockN);
      const isFirst = i === 0;
      const isLast = i === mine.length - 1;
      const read = (2 * keys + (isFirst ? rows : 0)) * headdim * BYTES; // K and V; Q once
      const written = isLast ? rows * (headdim * BYTES + LSE_BYTES) : 0; // O and the lse
      found.push({ ...tile, isFirst, isLast, read, written });
    });
  });
  return found;
}

/** Bytes read and written by the first `count` visits. */
export function flashBytes(found, count) {
  return found
    .slice(0, count)
    .reduce(
      (sum, visit) => ({ read: sum.read + visit.read, written: sum.written + visit.written }),
      { read: 0, written: 0 },
    );
}

/** The three passes of standard attention. Each reads what it needs once and writes once: the least
 * that it can do, as S and P do not fit on the chip. */
export function passes(shape) {
  const { seqlen, headdim } = shape;
  const tensor = seqlen * headdim * BYTES;
  const matrix = seqlen * seqlen * BYTES;
  return [
    { name: "S = Q Kᵀ", read: 2 * tensor, written: matrix },
    { name: "P = softmax(S)", read: matrix, written: matrix },
    { name: "O = P V", read: matrix + tensor, written: tensor },
  ];
}

/** Bytes of standard attention after this share of its way, 0 to 1: passes take equal parts. */
export function standardBytes(shape, share) {
  let [read, written, name] = [0, 0, ""];
  passes(shape).forEach((pass, i) => {
    const part = Math.min(Math.max(share * 3 - i, 0), 1);
    read += pass.read * part;
    written += pass.written * part;
    if (part > 0) name = pass.name;
  });
  return { read: Math.round(read), written: Math.round(written), name };
}

/** What a pair of blocks takes of a multiprocessor's memory: Q, two K and two V, none of S. */
export function onChip(shape) {
  return (shape.blockM + 4 * shape.blockN) * shape.headdim * BYTES;
}
