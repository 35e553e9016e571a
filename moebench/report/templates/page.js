"use strict";
// Tables sort by their headers and narrow down by words. Without the script they stay as they are, and links work.
const SCALES = {
  ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40,
  kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, FLOP: 1, kFLOP: 1e3, MFLOP: 1e6, GFLOP: 1e9, TFLOP: 1e12, PFLOP: 1e15,
};
const LONG = 12; // rows above which a table gets a filter
const words = new Intl.Collator("en", { numeric: true });

function number(text) {
  const found = /^([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([A-Za-z]*)/.exec(text);
  return found ? Number(found[1].replaceAll(",", "")) * (SCALES[found[2]] ?? 1) : NaN;
}

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Rows without a value stay at the end in both directions.
function sort(table, column, up) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", up ? "ascending" : "descending");
  const isNumeric = heads[column].classList.contains("n");
  const keyed = [...table.tBodies[0].rows].map((row) => {
    const text = row.cells[column].textContent.trim();
    const value = isNumeric ? number(text) : text;
    return { row, value, isEmpty: isNumeric ? Number.isNaN(value) : text === "" || text === "–" };
  });
  keyed.sort((a, b) => {
    if (a.isEmpty || b.isEmpty) return a.isEmpty - b.isEmpty;
    const order = isNumeric ? a.value - b.value : words.compare(a.value, b.value);
    return up ? order : -order;
  });
  table.tBodies[0].append(...keyed.map((entry) => entry.row));
}

// Every word must occur in a row; `a|b` is either, `-word` must not.
function wanted(query) {
  const parts = query.toLowerCase().split(/\s+/).filter((word) => word && word !== "-");
  return (text) => parts.every((part) => {
    const isOut = part.startsWith("-");
    const isIn = (isOut ? part.slice(1) : part).split("|").some((word) => word && text.includes(word));
    return isIn !== isOut;
  });
}

function tools(table) {
  const rows = [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells];
  const count = element("output", {});
  const filter = element("input", { type: "search", placeholder: "words, a|b, -without", spellcheck: false });
  const show = () => {
    const test = wanted(filter.value);
    let kept = 0;
    for (const row of rows) {
      row.search ??= [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
      row.hidden = !test(row.search);
      kept += !row.hidden;
    }
    count.textContent = filter.value.trim() ? `${kept.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows` : "";
  };
  filter.addEventListener("input", show);
  table.filterBy = (text) => { filter.value = text; show(); };
  // A narrow page has no header row to click on.
  const name = table.parentElement.getAttribute("aria-label"); // a page has many filters
  filter.ariaLabel = `Filter ${name}`;
  const order = element("select", { ariaLabel: `Order ${name}` }, element("option", { value: "", textContent: "as given" }));
  heads.forEach((head, column) => {
    for (const [sign, up] of [["↑", 1], ["↓", 0]]) {
      order.append(element("option", { value: `${column},${up}`, textContent: `${head.textContent} ${sign}` }));
    }
  });
  order.addEventListener("change", () => {
    const [column, up] = order.value.split(",").map(Number);
    if (order.value) sort(table, column, up === 1);
    else table.tBodies[0].append(...rows);
  });
  const bar = element("div", { className: "tools" },
    element("label", {}, "Filter ", filter), element("label", { className: "order" }, "Order ", order), count);
  table.parentElement.before(bar);
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  if (table.tBodies[0].rows.length > LONG) tools(table);
  heads.forEach((head, column) => {
    const button = element("button", { type: "button", textContent: head.textContent });
    head.replaceChildren(button);
    button.addEventListener("click", () => sort(table, column, head.getAttribute("aria-sort") !== "ascending"));
  });
}

// A link may lead into a fold, or to a row that a filter hides; some lead to a table and say what to show of it.
function reveal() {
  const target = document.getElementById(location.hash.slice(1));
  if (!target) return;
  for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
  if (target.hidden) target.closest("table").filterBy("");
  target.scrollIntoView({ block: target.tagName === "TR" ? "center" : "start" });
}
addEventListener("hashchange", reveal);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-filter]");
  const target = link && document.getElementById(link.hash.slice(1));
  target?.querySelector("table")?.filterBy?.(link.dataset.filter);
  if (link && link.hash === location.hash) reveal();
});
reveal();
