"use strict";
// Tables sort by a click on their header; without the script they stay as they are.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].textContent.trim();
      const number = (text) => Number.parseFloat(text.replace(/[, \u202f]/g, ""));
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const x = key(a), y = key(b), p = number(x), q = number(y);
        const order = Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q;
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}
