// Markdown as models write it, into DOM nodes. Text only ever becomes text nodes, so no answer can inject markup.

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const TABLE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
// In the order in which they are tried at one place: code, links, bold, italics, struck out.
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\[([^\]\n]+)\]\(([^()\s]+)\)|\*\*(?=\S)([\s\S]+?)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]+?)\*(?!\w)|~~(?=\S)([^~\n]+?)~~/;

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function inline(text) {
  const nodes = [];
  while (text) {
    const found = INLINE.exec(text);
    if (!found) break;
    const [whole, , code, label, address, bold, italic, struck] = found;
    nodes.push(text.slice(0, found.index));
    if (code !== undefined) nodes.push(element("code", code));
    else if (label !== undefined) nodes.push(link(label, address));
    else if (bold !== undefined) nodes.push(element("strong", ...inline(bold)));
    else if (italic !== undefined) nodes.push(element("em", ...inline(italic)));
    else nodes.push(element("del", ...inline(struck)));
    text = text.slice(found.index + whole.length);
  }
  nodes.push(text);
  return nodes.filter((node) => node !== "");
}

function link(label, address) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return `${label} (${address})`;
  const node = element("a", ...inline(label));
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function table(lines) {
  const sides = cells(lines[1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : ""));
  const row = (line, kind) => {
    const made = cells(line).map((cell) => element(kind, ...inline(cell)));
    made.forEach((cell, i) => { cell.style.textAlign = sides[i] ?? ""; });
    return element("tr", ...made);
  };
  const head = row(lines[0], "th");
  const rows = lines.slice(2).map((line) => row(line, "td"));
  return element("table", element("thead", head), element("tbody", ...rows));
}

// A list from its items; deeper indentation makes lists inside an item.
function list(items) {
  const ordered = /\d/.test(items[0].mark);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(items[0].mark, 10);
  for (let i = 0; i < items.length; ) {
    let next = i + 1;
    while (next < items.length && items[next].indent > items[i].indent) next++;
    const item = element("li", ...inline(items[i].text));
    if (next > i + 1) item.append(list(items.slice(i + 1, next)));
    node.append(item);
    i = next;
  }
  return node;
}

function takeWhile(lines, start, test) {
  let end = start;
  while (end < lines.length && test(lines[end], end)) end++;
  return end;
}

function startsTable(lines, i) {
  return lines[i].includes("|") && TABLE.test(lines[i + 1] ?? "");
}

function startsBlock(line) {
  return !line.trim() || FENCE.test(line) || /^#{1,6}\s/.test(line) || ITEM.test(line) || /^\s*>/.test(line) || RULE.test(line);
}

/** The nodes of a text, which may end anywhere (an open code block runs to the end). */
export function markdown(text) {
  const lines = text.split("\n");
  const nodes = [];
  for (let i = 0; i < lines.length; ) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    const heading = /^(#{1,6})\s+(.*?)\s*#*$/.exec(line);
    if (!line.trim()) {
      i++;
    } else if (fence) {
      const end = takeWhile(lines, i + 1, (other) => !other.trim().startsWith(fence[1]));
      const code = element("code", lines.slice(i + 1, end).join("\n"));
      if (fence[2]) code.dataset.language = fence[2];
      nodes.push(element("pre", code));
      i = end + 1;
    } else if (heading) {
      nodes.push(element(`h${Math.min(heading[1].length, 4)}`, ...inline(heading[2])));
      i++;
    } else if (RULE.test(line)) {
      nodes.push(element("hr"));
      i++;
    } else if (/^\s*>/.test(line)) {
      const end = takeWhile(lines, i, (other) => /^\s*>/.test(other));
      nodes.push(element("blockquote", ...markdown(lines.slice(i, end).map((l) => l.replace(/^\s*>\s?/, "")).join("\n"))));
      i = end;
    } else if (ITEM.test(line)) {
      const items = [];
      for (; i < lines.length && lines[i].trim(); i++) {
        const found = ITEM.exec(lines[i]);
        if (found) items.push({ indent: found[1].length, mark: found[2], text: found[3] });
        else items[items.length - 1].text += " " + lines[i].trim();
      }
      nodes.push(list(items));
    } else if (startsTable(lines, i)) {
      const end = takeWhile(lines, i, (other) => other.includes("|"));
      nodes.push(table(lines.slice(i, end)));
      i = end;
    } else {
      const end = takeWhile(lines, i + 1, (other, at) => !startsBlock(other) && !startsTable(lines, at));
      nodes.push(element("p", ...inline(lines.slice(i, end).join("\n"))));
      i = end;
    }
  }
  return nodes;
}
