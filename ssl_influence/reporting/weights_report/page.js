"use strict";

// Everything that comes from data becomes text nodes or attributes; nothing is parsed as markup.

(() => {
  const byId = (id) => document.getElementById(id);
  const CARDS = 24;
  const SUSPECTS = 20;
  const MOST_FOUND = 24;
  const STRANGER = -2;

  const darkPreferred = matchMedia("(prefers-color-scheme: dark)");
  const theme = byId("theme");
  let themeChosen = null;
  const isDark = () => (themeChosen === null ? darkPreferred.matches : themeChosen === "dark");
  const showTheme = () => theme.setAttribute("aria-pressed", String(isDark()));
  theme.addEventListener("click", () => {
    themeChosen = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = themeChosen;
    showTheme();
  });
  darkPreferred.addEventListener("change", showTheme);
  showTheme();

  const holder = byId("data");
  if (holder === null) {
    return;
  }
  const data = JSON.parse(holder.textContent);
  holder.textContent = "";

  const TYPES = { Float32: Float32Array, Uint32: Uint32Array, Int32: Int32Array, Uint16: Uint16Array };
  const decode = (array) => {
    const text = atob(array.data);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i += 1) {
      bytes[i] = text.charCodeAt(i);
    }
    return new TYPES[array.type](bytes.buffer);
  };
  const columns = {
    id: decode(data.id),
    weight: decode(data.weight),
    updates: decode(data.updates),
  };
  const label = decode(data.label);
  const slot = decode(data.slot);
  const pseudo = data.predicted && decode(data.predicted.class);
  if (data.predicted) {
    columns.confidence = decode(data.predicted.confidence);
  }
  const size = columns.id.length;
  const history = data.history;
  const levels = decode(history.levels);
  const placeOf = new Map();
  columns.id.forEach((id, place) => placeOf.set(id, place));
  const anyTruth = label.some((one) => one >= 0 || one === STRANGER);

  const make = (tag, properties = {}, ...children) => {
    const made = document.createElement(tag);
    Object.assign(made, properties);
    made.append(...children);
    return made;
  };
  const makeSvg = (tag, attributes, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    made.append(...children);
    return made;
  };
  const count = (number) => number.toLocaleString("en-US");
  const brief = (number) => String(Number(number.toPrecision(4)));
  const percent = (share) => {
    const shown = (100 * share).toFixed(1);
    return shown === "100.0" && share < 1 ? ">99.9%" : `${shown}%`;
  };
  const truth = (place) => {
    if (label[place] === STRANGER) {
      return "stranger";
    }
    return label[place] < 0 ? "unknown" : data.classes[label[place]];
  };
  const isWrong = (place) => label[place] >= 0 && pseudo[place] !== label[place];
  const isRight = (place) => label[place] >= 0 && pseudo[place] === label[place];

  // Sheets of pictures are decoded when a card first needs one.
  const sheets = new Map();
  const sheet = (number) => {
    if (!sheets.has(number)) {
      const image = new Image();
      const held = byId(`sheet-${number}`);
      image.src = `data:${data.image.type};base64,${held.textContent}`;
      sheets.set(number, image.decode().then(() => image));
    }
    return sheets.get(number);
  };
  const picture = (place) => {
    const { width, height, columns: across, perSheet } = data.image;
    const canvas = make("canvas", { width, height });
    const described = pseudo ? `, pseudo-label ${data.classes[pseudo[place]]}` : "";
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Picture of example ${columns.id[place]}${described}`);
    const within = slot[place] % perSheet;
    const x = (within % across) * width;
    const y = Math.floor(within / across) * height;
    sheet(Math.floor(slot[place] / perSheet)).then((image) => {
      canvas.getContext("2d").drawImage(image, x, y, width, height, 0, 0, width, height);
      canvas.dataset.drawn = "true";
    });
    return canvas;
  };
  const input = (place) => {
    if (slot[place] < 0) {
      return make("p", { className: "none", textContent: "not in this page" });
    }
    if (data.kind === "image") {
      return picture(place);
    }
    const text = data.texts[slot[place]];
    if (data.kind === "text") {
      return make("blockquote", { textContent: text });
    }
    return make("p", { className: "vector", textContent: `(${text})` });
  };

  const weightAt = (place, step) => {
    const level = levels[slot[place] * history.steps.length + step];
    return history.low + ((history.high - history.low) * level) / 65535;
  };
  const sparkline = (place) => {
    const { steps, low, high } = history;
    const [bottom, top] = [Math.min(low, data.initial), Math.max(high, data.initial)];
    const y = (weight) => (30 - (28 * (weight - bottom)) / (top - bottom || 1)).toFixed(1);
    const last = steps.length - 1;
    const x = (i) => ((100 * (steps[i] - steps[0])) / (steps[last] - steps[0] || 1)).toFixed(1);
    const points = steps.map((_, i) => `${x(i)},${y(weightAt(place, i))}`).join(" ");
    const described =
      `Weight ${brief(weightAt(place, 0))} at step ${count(steps[0])}, ` +
      `${brief(weightAt(place, last))} at step ${count(steps[last])}`;
    return makeSvg(
      "svg",
      { viewBox: "0 0 100 32", preserveAspectRatio: "none", class: "spark", role: "img", "aria-label": described },
      makeSvg("title", {}, described),
      makeSvg("line", { x1: 0, x2: 100, y1: y(data.initial), y2: y(data.initial) }),
      makeSvg("polyline", { points }),
    );
  };

  const tag = (place) => {
    if (label[place] === STRANGER) {
      return make("span", { className: "tag bad", textContent: "stranger" });
    }
    if (pseudo && label[place] >= 0) {
      const wrong = isWrong(place);
      const className = `tag ${wrong ? "bad" : "good"}`;
      return make("span", { className, textContent: wrong ? "wrong" : "right" });
    }
    return "";
  };
  const card = (place) => {
    const facts = make("dl");
    const fact = (name, value, className = "") => {
      const shown = make("dd", { textContent: value, className });
      facts.append(make("div", {}, make("dt", { textContent: name }), shown));
    };
    fact("weight", brief(columns.weight[place]), "number");
    fact("updates", count(columns.updates[place]), "number");
    if (pseudo) {
      fact("pseudo-label", data.classes[pseudo[place]]);
      fact("confidence", percent(columns.confidence[place]), "number");
    }
    if (anyTruth) {
      fact("truth", truth(place));
    }
    if (data.names) {
      fact("name", data.names[place]);
    }
    const made = make(
      "li",
      { className: "card" },
      make("h4", {}, make("span", { textContent: `#${columns.id[place]}` }), tag(place)),
      input(place),
      facts,
    );
    made.dataset.id = columns.id[place];
    if (data.learned && slot[place] >= 0 && history.steps.length > 1) {
      made.append(sparkline(place));
    }
    return made;
  };
  const showCards = (list, places) => {
    list.dataset.kind = data.kind;
    list.replaceChildren(...Array.from(places, card));
  };

  // Equal ones are mixed, as many weights lie on a bound: see `embedding.mixed`.
  const mixed = columns.id.map((id) => Math.imul(id, 0x9e3779b1) >>> 0);
  const sorted = (places, order) => {
    const descending = order.startsWith("-");
    const key = columns[descending ? order.slice(1) : order];
    const compare = descending
      ? (a, b) => key[b] - key[a] || mixed[a] - mixed[b]
      : (a, b) => key[a] - key[b] || mixed[a] - mixed[b];
    return places.sort(compare);
  };

  // A list in pages: `show(start, end)` draws one, `total()` says how many entries there are.
  const pager = (id, perPage, total, show) => {
    const nav = byId(id);
    const entry = nav.querySelector("input");
    const buttons = Object.fromEntries(
      Array.from(nav.querySelectorAll("button"), (button) => [button.dataset.go, button]),
    );
    let page = 1;
    const pages = () => Math.max(1, Math.ceil(total() / perPage));
    const go = (wanted) => {
      page = Math.min(Math.max(1, wanted), pages());
      entry.value = page;
      entry.max = pages();
      nav.querySelector("[data-total]").textContent = `of ${count(pages())}`;
      // Not `disabled`, which would take the focus away from whoever pressed it.
      ["first", "previous"].forEach((name) => buttons[name].setAttribute("aria-disabled", page === 1));
      ["next", "last"].forEach((name) => buttons[name].setAttribute("aria-disabled", page === pages()));
      const start = (page - 1) * perPage;
      show(start, Math.min(start + perPage, total()));
    };
    buttons.first.addEventListener("click", () => go(1));
    buttons.previous.addEventListener("click", () => go(page - 1));
    buttons.next.addEventListener("click", () => go(page + 1));
    buttons.last.addEventListener("click", () => go(pages()));
    entry.addEventListener("change", () => go(Math.floor(Number(entry.value)) || 1));
    return go;
  };

  // The strips of the lowest and the highest weights, and of the least confident.
  const everybody = () => Uint32Array.from({ length: size }, (_, place) => place);
  [["lowest", "weight"], ["highest", "-weight"], ["unsure", "confidence"]].forEach(([id, order]) => {
    const list = byId(id);
    if (list) {
      showCards(list, sorted(everybody(), order).slice(0, Number(list.dataset.most)));
    }
  });

  // All examples, sorted and filtered.
  let matching = everybody();
  const choice = (id) => byId(id)?.value ?? "";
  const describeRange = (start, end, total) =>
    total ? `${count(start + 1)} to ${count(end)} of ${count(total)}` : "none";
  const goToCards = pager("pages", CARDS, () => matching.length, (start, end) => {
    showCards(byId("cards"), matching.subarray(start, end));
    const all = matching.length === size ? "" : ` (of ${count(size)} in all)`;
    byId("matches").textContent = matching.length
      ? `Showing ${describeRange(start, end, matching.length)} examples${all}.`
      : `No example matches${all}.`;
  });
  const filter = () => {
    const wantedPseudo = choice("pseudo");
    const wantedLabel = choice("label");
    const judged = choice("judged");
    const least = Number(choice("least")) || 0;
    const kept = everybody().filter(
      (place) =>
        columns.updates[place] >= least &&
        (wantedPseudo === "" || pseudo[place] === Number(wantedPseudo)) &&
        (wantedLabel === "" || label[place] === Number(wantedLabel)) &&
        (judged === "" || (judged === "wrong" ? isWrong(place) : isRight(place))),
    );
    matching = sorted(kept, choice("sort"));
    goToCards(1);
  };
  const filters = byId("filters");
  filters.addEventListener("input", filter);
  filters.addEventListener("submit", (event) => event.preventDefault());
  byId("clear").addEventListener("click", () => {
    filters.reset();
    filter();
  });
  filter();

  // Search by id.
  const search = () => {
    const asked = [...new Set(byId("ids").value.split(/[\s,;]+/).filter((part) => part !== ""))];
    const known = asked.filter((part) => /^\d+$/.test(part) && placeOf.has(Number(part)));
    const unknown = asked.filter((part) => !known.includes(part));
    const shown = known.slice(0, MOST_FOUND);
    showCards(byId("found"), shown.map((part) => placeOf.get(Number(part))));
    const said = asked.length ? [`${count(known.length)} found.`] : ["Type the id of an example."];
    if (known.length > shown.length) {
      said.push(`The first ${MOST_FOUND} are shown.`);
    }
    if (unknown.length) {
      const named = unknown.slice(0, 5).join(", ") + (unknown.length > 5 ? ", ..." : "");
      said.push(`Not the id of an unlabeled example: ${named}.`);
    }
    byId("found-status").textContent = said.join(" ");
  };
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    search();
  });

  // Suspects.
  const rows = byId("suspect-rows");
  if (rows === null) {
    return;
  }
  const suspects = decode(data.suspects.rows);
  const suspectRow = (place, rank) => {
    const show = make("button", { type: "button", className: "link", textContent: columns.id[place] });
    show.setAttribute("aria-label", `Show example ${columns.id[place]}`);
    show.addEventListener("click", () => {
      byId("ids").value = columns.id[place];
      search();
      byId("search-heading").focus();
      byId("search-heading").scrollIntoView();
    });
    const head = make("th", { scope: "row", textContent: rank });
    const cells = [show, brief(columns.weight[place]), count(columns.updates[place])];
    if (pseudo) {
      cells.push(data.classes[pseudo[place]], percent(columns.confidence[place]));
    }
    if (anyTruth) {
      cells.push(truth(place));
    }
    if (data.names) {
      cells.push(data.names[place]);
    }
    return make("tr", {}, head, ...cells.map((cell) => make("td", {}, cell)));
  };
  const goToSuspects = pager("suspect-pages", SUSPECTS, () => suspects.length, (start, end) => {
    const shown = Array.from(suspects.subarray(start, end));
    rows.replaceChildren(...shown.map((place, i) => suspectRow(place, start + i + 1)));
    byId("suspects-status").textContent =
      `Showing ${describeRange(start, end, suspects.length)} suspects.`;
  });
  goToSuspects(1);
  byId("download").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([data.suspects.csv], { type: "text/csv" }));
    make("a", { href: url, download: "suspects.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000); // the download may begin later
  });
})();
