"use strict";
(() => {
  const responses = JSON.parse(document.getElementById("rollout-data").textContent);
  const form = document.getElementById("rollout-form"), chosen = form.elements;
  const keyOf = (row) => `${row.step}|${row.problem}|${row.response}`;
  const LIMIT = 40;

  // White for no advantage, blue for a positive and vermillion for a negative one, as on a terminal.
  function shade(advantage, scale) {
    const strength = Math.min(1, Math.abs(advantage) / scale) ** 0.5 * 0.75;
    const end = advantage > 0 ? [0, 114, 178] : [213, 94, 0];
    return `rgb(${end.map((value) => Math.round(255 + (value - 255) * strength)).join(",")})`;
  }

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    made.className = className;
    made.append(...children);
    return made;
  }

  function pieceOf([text, advantage, classes], scale) {
    const masked = classes.includes("masked"), span = element("span", classes, text);
    if (!masked) span.style.background = shade(advantage, scale);
    span.title = masked ? "not in the loss" : `advantage ${advantage}`;
    return span;
  }

  function sideOf(row, scale, named) {
    const side = element("div", "rollout-side", ...(named ? [element("p", "rollout-name", row.arm)] : []));
    side.append(element("p", "rollout-text", ...row.pieces.map((piece) => pieceOf(piece, scale))), element("p", "small", row.facts));
    return side;
  }

  const passes = (row) => ["outcome", "truncated", "in_loss"].every((name) => ["", row[name]].includes(chosen[name].value));

  function fillSteps(rows) {
    const steps = [...new Set(rows.map((row) => String(row.step)))], before = chosen.step.value;
    chosen.step.replaceChildren(...steps.map((step) => new Option(step, step)));
    if (steps.includes(before)) chosen.step.value = before;
  }

  function countText(passed, pairs, two, seed) {
    if (two && !pairs.length) return "This page holds no responses of both arms to the same prompt; grpo-lab rollouts shows other steps.";
    const first = passed.length > LIMIT ? `; the first ${LIMIT} are below` : "";
    const sides = two ? ", same prompt and noise on both sides; a pair is shown where either side passes" : "";
    return `${passed.length} of ${pairs.length} ${two ? "pairs" : "responses"} shown here pass the filters${first}; seed ${seed}${sides}.`;
  }

  function draw() {
    const two = chosen.other.value !== "";
    const others = new Map(responses.filter((row) => row.arm === chosen.other.value).map((row) => [keyOf(row), row]));
    const own = responses.filter((row) => row.arm === chosen.arm.value), steps = new Set([...others.values()].map((row) => row.step));
    fillSteps(own.filter((row) => !two || steps.has(row.step)));
    const here = own.filter((row) => String(row.step) === chosen.step.value);
    const pairs = here.map((row) => (two ? [row, others.get(keyOf(row))] : [row])).filter((pair) => pair.every(Boolean));
    const passed = pairs.filter((pair) => pair.some(passes));
    const scale = Math.max(1e-9, ...pairs.flat().map((row) => Math.abs(row.advantage)));
    document.getElementById("rollout-count").textContent = countText(passed, pairs, two, own[0].seed);
    document.getElementById("rollout-list").replaceChildren(...passed.slice(0, LIMIT).map((pair) => element("div", `rollout-pair${two ? " two" : ""}`,
      element("h4", "", `${pair[0].question}  (answer ${pair[0].answer}; problem ${pair[0].problem}, response ${pair[0].response})`),
      ...pair.map((row) => sideOf(row, scale, two)))));
  }

  form.addEventListener("change", draw);
  draw();
})();
