"use strict";
(() => {
  const { responses, legend } = JSON.parse(document.getElementById("rollout-data").textContent);
  const byId = (id) => document.getElementById("rollout-" + id);
  const nameOf = (row) => (row.level ? row.level + ": " : "") + row.arm;
  const keyOf = (row) => row.step + "|" + row.problem + "|" + row.response;
  const names = [...new Set(responses.map(nameOf))];
  const LIMIT = 40;

  function fill(select, values, first) {
    const chosen = select.value;
    select.replaceChildren(...(first ? [new Option(first, "")] : []), ...values.map((v) => new Option(v, v)));
    if (values.includes(chosen)) select.value = chosen;
  }

  // White for no advantage, blue for a positive and vermillion for a negative one, as on a terminal.
  function shade(advantage, scale) {
    const strength = Math.min(1, Math.abs(advantage) / scale) ** 0.5 * 0.75;
    const end = advantage > 0 ? [0, 114, 178] : [213, 94, 0];
    return "rgb(" + end.map((value) => Math.round(255 + (value - 255) * strength)).join(",") + ")";
  }

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function textOf(row, scale) {
    const box = element("p", "rollout-text");
    const advantages = row.advantages.flatMap(([value, count]) => Array(count).fill(value));
    const gap = row.left_out ? Math.floor(row.tokens.length * 0.75) : -1;
    row.tokens.forEach((token, index) => {
      if (index === gap) box.append(element("em", "masked", ` [${row.left_out} tokens left out] `));
      const inLoss = row.flags.in_loss[index] === "1";
      const span = element("span", "", token);
      if (inLoss) span.style.background = shade(advantages[index], scale);
      else span.classList.add("masked");
      if (row.flags.clipped[index] === "1") span.classList.add("clipped");
      if (row.flags.sampled[index] === "0") span.classList.add("injected");
      span.title = inLoss ? `advantage ${advantages[index]}` : "not in the loss";
      box.append(span);
    });
    return box;
  }

  function factsOf(row) {
    const parts = Object.entries(row.parts).map(([name, value]) => `${name} ${value >= 0 ? "+" : ""}${value}`);
    const masked = [...row.flags.in_loss].filter((flag) => flag === "0").length;
    const clipped = [...row.flags.clipped].filter((flag) => flag === "1").length;
    return [
      row.outcome === null ? "not graded" : row.outcome === 1 ? "right" : "wrong",
      `reward ${row.reward} (${parts.join(", ")})`,
      `advantage ${row.advantage}`,
      `${row.length} tokens`,
      row.truncated ? "truncated" : "",
      row.trained ? "" : "not in the loss",
      row.counted ? "" : "not in the group's statistics",
      masked && row.trained && !row.whole ? `${masked} tokens masked` : "",
      clipped ? `${clipped} clipped` : "",
      row.whole ? "tokens were not saved" : "",
    ].filter(Boolean).join("; ");
  }

  function sideOf(row, scale, named) {
    const side = element("div", "rollout-side");
    if (named) side.append(element("p", "rollout-name", nameOf(row)));
    side.append(textOf(row, scale), element("p", "rollout-facts", factsOf(row)));
    return side;
  }

  const passes = (row) =>
    [["outcome", String(row.outcome)], ["truncated", row.truncated ? "1" : "0"], ["trained", row.trained ? "1" : "0"]]
      .every(([id, value]) => byId(id).value === "" || byId(id).value === value);

  function draw() {
    const own = responses.filter((row) => nameOf(row) === byId("arm").value);
    const other = new Map(responses.filter((row) => nameOf(row) === byId("other").value).map((row) => [keyOf(row), row]));
    const two = byId("other").value !== "";
    const otherSteps = new Set([...other.values()].map((row) => row.step));
    const steps = [...new Set(own.map((row) => row.step))].filter((step) => !two || otherSteps.has(step)).map(String);
    fill(byId("step"), steps);
    const here = own.filter((row) => String(row.step) === byId("step").value);
    const pairs = here.map((row) => [row, other.get(keyOf(row))]).filter((pair) => !two || pair[1]);
    const passed = pairs.filter((pair) => pair.some((row) => row && passes(row)));
    const scale = Math.max(1e-9, ...pairs.flat().filter(Boolean).map((row) => Math.abs(row.advantage)));
    byId("count").textContent = two && !pairs.length
      ? "This page holds no responses of both arms to the same prompt; grpo-lab rollouts shows other steps."
      : `${passed.length} of ${pairs.length} ${two ? "pairs" : "responses"} shown here pass the filters` +
        (passed.length > LIMIT ? `; the first ${LIMIT} are below` : "") +
        `; seed ${own.length ? own[0].seed : ""}` + (two ? ", same prompt and noise on both sides; a pair is shown where either side passes." : ".");
    byId("list").replaceChildren(...passed.slice(0, LIMIT).map(([row, beside]) => {
      const pair = element("div", "rollout-pair" + (two ? " two" : ""));
      pair.append(element("h4", "", `${row.question}  (answer ${row.answer}; problem ${row.problem}, response ${row.response})`));
      pair.append(sideOf(row, scale, two));
      if (two) pair.append(sideOf(beside, scale, true));
      return pair;
    }));
  }

  byId("legend").textContent = legend[0].toUpperCase() + legend.slice(1) + ".";
  fill(byId("arm"), names);
  fill(byId("other"), names, "nothing");
  for (const id of ["arm", "other", "step", "outcome", "truncated", "trained"]) byId(id).addEventListener("change", draw);
  draw();
})();
