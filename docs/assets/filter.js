// Filters for tables: a list of values for each column that a page names. Without this script, all rows are shown.
//
// <div class="filtered" data-columns="trains, task"> tables </div>

function filtered(box) {
  const tables = [...box.querySelectorAll("table")];
  const rows = tables.flatMap((table) => {
    const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    return [...table.querySelectorAll("tbody tr")].map((row) => ({
      row,
      text: row.textContent.toLowerCase(),
      value: (column) => row.cells[titles.indexOf(column)]?.textContent.trim(),
    }));
  });
  const form = document.createElement("form");
  form.className = "filters";
  form.setAttribute("aria-label", "Filters of the table");
  const add = (title, control) => {
    const label = document.createElement("label");
    label.append(title, control);
    form.append(label);
    return control;
  };
  const search = add("contains", document.createElement("input"));
  search.type = "search";
  const lists = box.dataset.columns.split(",").map((name) => {
    const column = name.trim();
    const values = [...new Set(rows.map((each) => each.value(column)).filter(Boolean))].sort();
    const list = add(column, document.createElement("select"));
    list.append(new Option("any", ""), ...values.map((value) => new Option(value, value)));
    return { column, list };
  });
  const count = document.createElement("output");
  count.setAttribute("aria-live", "polite");
  form.append(count);
  const show = () => {
    const words = search.value.trim().toLowerCase();
    let shown = 0;
    for (const each of rows) {
      const fits = lists.every(({ column, list }) => !list.value || each.value(column) === list.value);
      each.row.hidden = !(fits && each.text.includes(words));
      shown += each.row.hidden ? 0 : 1;
    }
    count.textContent = `${shown} of ${rows.length} rows`;
  };
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  box.prepend(form);
  show();
}

for (const box of document.querySelectorAll(".filtered")) filtered(box);
