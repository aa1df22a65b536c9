"use strict";
// Values under the pointer, and on a live page the newest numbers. Texts are set as texts, never as HTML of a run's files.
const hover = document.getElementById("hover"), content = document.getElementById("content");
const written = (value, percent) => percent ? `${(100 * value).toFixed(1)}%` : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : `${Number(value.toPrecision(4))}`;

function place(event, text) {
  hover.textContent = text;
  hover.hidden = false;
  const box = hover.getBoundingClientRect();
  hover.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 4))}px`;
  hover.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
}

function pointAt(event) {
  const figure = event.target.closest(".chart"), token = event.target.closest("[data-t]");
  document.querySelectorAll(".cursor:not([hidden])").forEach(cursor => cursor.setAttribute("hidden", ""));
  if (token) return place(event, token.dataset.t);
  if (!figure) { hover.hidden = true; return; }
  const picture = figure.querySelector("svg"), box = picture.getBoundingClientRect();
  const x = (event.clientX - box.left) * 360 / box.width;
  let nearest = null;
  const lines = [...figure.querySelectorAll("[data-values]")].map(line => {
    line.points_ ??= JSON.parse(line.dataset.values);
    const point = line.points_.reduce((best, each) => Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best);
    if (!nearest || Math.abs(point[0] - x) < Math.abs(nearest[0] - x)) nearest = point;
    return [line.dataset.label, point];
  });
  if (!nearest) return;
  const cursor = figure.querySelector(".cursor");
  cursor.setAttribute("d", `M${nearest[0]} 8V154`);
  cursor.removeAttribute("hidden");
  const percent = figure.dataset.percent === "yes", several = lines.length > 1;
  const rows = lines.filter(([, point]) => point[1] === nearest[1]).map(([label, point]) => `${several ? label + "  " : ""}${written(point[2], percent)}`);
  place(event, [`step ${nearest[1]}`, ...rows].join("\n"));
}

addEventListener("pointermove", pointAt);
addEventListener("pointerdown", pointAt);
addEventListener("scroll", () => { hover.hidden = true; }, { passive: true });

function tellAges() {
  document.querySelectorAll("time[data-at]").forEach(time => {
    const age = Math.max(0, Date.now() / 1000 - Number(time.dataset.at));
    time.textContent = age < 90 ? `${Math.round(age)} s ago` : age < 5400 ? `${Math.round(age / 60)} min ago` : `${(age / 3600).toFixed(1)} h ago`;
  });
}
tellAges();

document.querySelectorAll(".filters select").forEach(select => select.addEventListener("change", () => select.form.requestSubmit()));

if (document.body.dataset.live === "yes" && !document.querySelector(".filters")) {
  let seen = null;
  const refresh = async () => {
    const connection = document.getElementById("connection");
    try {
      const answer = await fetch("part", { headers: seen ? { "If-None-Match": seen } : {}, cache: "no-store" });
      if (answer.status === 200) {
        // The server has escaped it, and the page's policy runs no script but this one.
        const open = new Map([...document.querySelectorAll("details[id]")].map(each => [each.id, each.open]));
        seen = answer.headers.get("ETag");
        content.innerHTML = await answer.text();
        open.forEach((is, id) => { const each = document.getElementById(id); if (each) each.open = is; });
        hover.hidden = true;
      } else if (answer.status !== 304) throw new Error(answer.status);
      connection.textContent = "refreshed every few seconds";
    } catch (error) { connection.textContent = "the server does not answer; these are the last numbers that came"; }
    tellAges();
  };
  setInterval(() => { if (!document.hidden) refresh(); }, 4000);
  setInterval(tellAges, 1000);
}
