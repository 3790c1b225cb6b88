// What the pieces say, in the language of their page. English is written where it is said, and is the
// key to what says the same in Chinese.

const CHINESE = {
  "at work": "正在计算",
  "visited": "已访问",
  "to come": "还没到",
  "skipped": "跳过",
  "half a tile: partial, masked": "半个分块：部分可见，需要掩码",
  "Tiles visited": "访问过的分块",
  "Queries and keys": "查询与键的个数",
  "Mask": "掩码",
  "causal": "因果",
  "causal, window of {0}": "因果，窗口 {0}",
  "none": "无",
  "Score matrix of {0} queries, down, and keys, across: {1} tiles are skipped, {2} need a mask, {3} need none":
    "{0} 个查询（向下）与键（向右）的分数矩阵：{1} 个分块跳过，{2} 个需要掩码，{3} 个不需要",
  "Nothing has been read yet.": "还什么都没有读。",
  "Block {0} of queries visits block {1} of keys": "第 {0} 块查询访问第 {1} 块键",
  "all pairs are seen: no mask": "每一对都可见：不需要掩码",
  "some pairs are hidden: masked": "有些对被遮住：需要掩码",
  "Q was read first": "先读了 Q",
  "then O and the lse are written": "随后写出 O 与 lse",
  "{0} ({1}). With a block of Q, two of K and two of V a program holds {2}.":
    "{0}（{1}）。一块 Q、两块 K 与两块 V，一个程序共占 {2}。",
  "{0}: more than the {1} of a Hopper SM": "{0}，超过 Hopper 一个 SM 的 {1}",
  "standard attention": "标准注意力",
  "standard attention, at {0}": "标准注意力，正在做 {0}",
  "read": "读",
  "written": "写",
  "both at the same share of their way": "两者走到同样的比例",
  "Bytes of one head, of the whole way": "一个头从头到尾的字节数",
  "{0} tiles with a mask, {1} without, {2} skipped. Standard attention moves {3} times the bytes.":
    "{0} 个分块要掩码，{1} 个不要，{2} 个跳过。标准注意力搬运的字节是它的 {3} 倍。",
  "Back": "后退",
  "Next": "前进",
  "Start": "开头",
  "End": "结尾",
  "Play": "播放",
  "Pause": "暂停",
  "{0} of {1}": "{0}，共 {1}",
  "; ": "；",
  // Online softmax
  "This step in numbers": "这一步的数值",
  "All steps so far": "到目前为止的所有步骤",
  "Step of the row": "这一行的步骤",
  "Scores of one row (−inf: masked)": "一行分数（−inf：被遮住）",
  "A value per key": "每个键的值",
  "Keys per block": "每块键数",
  '"{0}" is no finite number or -inf': "“{0}”不是有限的数，也不是 -inf",
  "between 1 and {0} scores, please": "请输入 1 到 {0} 个分数",
  "{0} scores and {1} values": "{0} 个分数与 {1} 个值",
  "values must be finite": "值必须有限",
  "Before the first block: m is −∞, and l and O are 0.": "第一块之前：m 是 −∞，l 与 O 是 0。",
  "O / l = {0}. All scores at once give {1}: the difference is {2}.":
    "O / l = {0}。一次用上所有分数得到 {1}：相差 {2}。",
  "Block {0}, keys {1} to {2}: ": "第 {0} 块，键 {1} 到 {2}：",
  "every score is masked, and nothing is added.": "所有分数都被遮住，什么都不加。",
  "the first maximum is {0}.": "第一个最大值是 {0}。",
  "the maximum rises, so l and O shrink to {0} of what they were.":
    "最大值变大，l 与 O 缩小到原来的 {0}。",
  "the maximum stays, alpha is 1, and nothing is rescaled.": "最大值不变，alpha 是 1，无需缩放。",
  "start": "开始",
  "block {0}": "第 {0} 块",
  "end": "结束",
  "What is kept after each block": "每块之后保存的值",
  "max of block": "块内最大值",
  "Scores {0}; m is {1}": "分数 {0}；m 是 {1}",
  "scores s, and m (dashed)": "分数 s 与 m（虚线）",
  "weights exp(s − m) so far": "目前的权重 exp(s − m)",
  // The tile scheduler
  "Static: tile i on SM i % SMs": "静态：分块 i 在 SM i % SMs 上",
  "Dynamic: the next tile to the first SM that is free": "动态：下一个分块给最先空闲的 SM",
  "last blocks of a head first": "先做每个头靠后的块",
  "Both schedules in numbers": "两种调度的数值",
  "Tiles handed out": "已分配的分块",
  "Lengths of the sequences": "序列长度",
  "Heads": "头数",
  "Queries per tile": "每个分块的查询数",
  "no tiles: every sequence is empty": "没有分块：所有序列都是空的",
  "{0} tiles are too many to draw": "{0} 个分块太多，画不下",
  '"{0}" is no length': "“{0}”不是长度",
  "{0} is over {1}": "{0} 超过 {1}",
  "more than {0} sequences": "超过 {0} 条序列",
  "No tile has been handed out.": "还没有分配分块。",
  "SM {0} from {1} to {2}": "SM {0}，{1} 到 {2}",
  "1 block of keys": "1 块键",
  "{0} blocks of keys": "{0} 块键",
  "Tile {0} (sequence {1}, head {2}, block {3}) visits {4}: static on {5}, dynamic on {6}.":
    "分块 {0}（序列 {1}，头 {2}，块 {3}）访问 {4}：静态在 {5}；动态在 {6}。",
  "static": "静态",
  "dynamic": "动态",
  "All tiles, in blocks of keys": "所有分块，以键块为单位",
  "until": "结束于",
  "busy": "忙碌",
  "speed-up": "加速",
  "Timelines of {0} SMs and {1} tiles: static until {2}, dynamic until {3}":
    "{0} 个 SM 与 {1} 个分块的时间线：静态到 {2}，动态到 {3}",
  "tile {0}: sequence {1}, head {2}, block {3}; {4} to {5}":
    "分块 {0}：序列 {1}，头 {2}，块 {3}；{4} 到 {5}",
};

/** The text in the page's language, with its {0}, {1} ... filled in. */
export function say(text, ...values) {
  const isChinese = globalThis.document?.documentElement.lang.startsWith("zh");
  const said = (isChinese && CHINESE[text]) || text;
  return said.replace(/\{(\d)\}/g, (_, place) => values[place]);
}
