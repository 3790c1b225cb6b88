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
};

/** The text in the page's language, with its {0}, {1} ... filled in. */
export function say(text, ...values) {
  const isChinese = document.documentElement.lang.startsWith("zh");
  const said = (isChinese && CHINESE[text]) || text;
  return said.replace(/\{(\d)\}/g, (_, place) => values[place]);
}
