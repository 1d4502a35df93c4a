"""`grpo-lab audit-reward`: a reward against the adversarial cases, and on samples of a run's own data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lab.instruments.reward_audit.corpus import FORMS, Form, attacks, notations
from grpo_lab.instruments.reward_audit.report import report_json, report_text
from grpo_lab.instruments.reward_audit.trial import Subject, audit, read
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.terminal import say


def audit_reward(arguments: argparse.Namespace) -> None:
    """Print the report and exit with 1 if a wrong answer is accepted, an error or a limit occurs, or a sample fails."""
    functions = [word for word in arguments.reward if "=" not in word]
    overrides = [word for word in arguments.reward if "=" in word]
    slots = sorted({word.split("=")[0].split(".")[0].lstrip("+") for word in overrides} & {"reward", "verifier"})
    if len(functions) + (len(slots) if not functions else 0) != 1:
        raise ValueError("name one reward: FILE.py:FUNCTION, module:function, reward=NAME or verifier=NAME")
    if arguments.seconds <= 0:
        raise ValueError(f"--seconds {arguments.seconds:g}: a response needs some CPU time")
    if functions:
        _require_function(functions[0])
        subject = Subject.function(functions[0], arguments.seconds, arguments.workers)
        grader = [
            "reward=function",
            f"reward.path='{functions[0]}'",
            "reward.lowest=-1e9",
            "reward.highest=1e9",
            "reward.truncated=true",
        ]
    else:
        slot, name = slots[0], next(word for word in overrides if word.lstrip("+").startswith(f"{slots[0]}="))
        own = [word for word in overrides if not word.lstrip("+").startswith("task")]
        subject = Subject.option(slot, own, name, arguments.seconds, arguments.workers)
        grader = []
    forms = [Form.parse(arguments.form)] if arguments.form else FORMS
    if known := [form for form in FORMS if form.name == arguments.form]:
        forms = known
    try:
        reading = read(subject, forms, arguments.correct_at)
        found = audit(subject, [*attacks(), *(notations() if arguments.notations else ())], reading)
    finally:
        subject.pool.close()
    problems = []
    if any(word.startswith("task") for word in overrides):
        threshold = [f"reward.correct_at={reading.accepts_from!r}"] if grader else []
        problems = _data_samples([*grader, *threshold, *overrides], slots[0] if slots else "reward")
    say(report_text(found, problems, arguments.cases))
    if arguments.json:
        write_json(arguments.json, report_json(found, problems))
    if found.false_positives or found.errors or found.over_limits or problems:
        sys.exit(1)


def _require_function(function: str) -> None:
    place, _, name = function.rpartition(":")
    if not place or not name.isidentifier() or (place.endswith(".py") and not Path(place).expanduser().is_file()):
        raise ValueError(f"{function}: write FILE.py:FUNCTION of a file that exists, or module:function")


def _data_samples(overrides: Sequence[str], slot: str) -> list[str]:
    """Faults of the reward on three training problems of the task in the overrides."""
    from grpo_lab.config.hydra_setup import compose_config
    from grpo_lab.config.run_config import to_run
    from grpo_lab.tasks.data_samples import problems_with
    from grpo_lab.tasks.grader_pool import close_all

    run = to_run(compose_config(overrides))
    try:
        return list(problems_with(getattr(run, slot), run.task.problems("train")).values())
    finally:
        close_all()
