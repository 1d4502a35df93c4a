"""Optuna's studies of a sweep, in one journal: which numbers an arm tries next.

A trial's numbers are a function of its position, a seed, and the values of the trials before its batch. Nothing is
kept in a sampler's state. So a search that was killed and started again asks for what it would have asked for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lab.config.tuning import Range
from grpo_lab.tracking.files import explained, locked

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages.journal import JournalStorage

_PATIENCE_SECONDS = 60.0  # while another process asks or tells


@dataclass(frozen=True)
class StudyTrial:
    """The numbers of a trial, by key; `value` is None until it was told."""

    numbers: Mapping[str, float | int]
    value: float | None


class Studies:
    """The studies in one journal. Only one process writes at a time; reading waits for none.

    Raises ValueError where Optuna is missing.
    """

    def __init__(self, journal: Path) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ValueError("design.tuning needs Optuna: pip install 'grpo-lab[tuning]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.journal = journal

    def trials(self, study: str) -> list[StudyTrial]:
        """The trials of a study, in order; [] for one that was not begun."""
        if not self.journal.exists():
            return []
        storage = self._storage()
        numbers = {known.study_name: known._study_id for known in storage.get_all_studies()}
        found = storage.get_all_trials(numbers[study]) if study in numbers else []
        return [StudyTrial(trial.params, trial.value) for trial in sorted(found, key=lambda trial: trial.number)]

    def ask(self, study: str, ranges: Mapping[str, Range], number: int, startup: int, seed: int) -> list[StudyTrial]:
        """The first `number` trials of a study, those that it lacks chosen now.

        Until `startup` trials have values, numbers are random: the same for every study of this seed, where ranges
        are equal and stand in the same order. Later ones are chosen by the tree-structured Parzen estimator.
        """
        import optuna
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState, create_trial

        spaces = {key: _distribution(one) for key, one in ranges.items()}
        with self._writing():
            kept = optuna.create_study(
                storage=self._storage(), study_name=study, direction="maximize", load_if_exists=True
            )
            for position in range(len(kept.trials), number):
                digest = hashlib.sha256(f"{seed}/{position}".encode()).digest()
                sampler = TPESampler(n_startup_trials=startup, seed=int.from_bytes(digest[:4], "big"))
                rehearsal = optuna.create_study(direction="maximize", sampler=sampler)
                rehearsal.add_trials(kept.trials)
                params = rehearsal.ask(spaces).params
                numbers = {key: one.rounded(params[key]) for key, one in ranges.items()}
                # In one line of the journal, so that a kill leaves no trial without its numbers.
                kept.add_trial(create_trial(state=TrialState.RUNNING, params=numbers, distributions=spaces))
        return self.trials(study)[:number]

    def tell(self, study: str, values: Mapping[int, float]) -> None:
        """Give trials their values, by position; those that have one keep it."""
        import optuna

        with self._writing():
            kept = optuna.load_study(storage=self._storage(), study_name=study)
            for position in sorted(values):
                kept.tell(position, values[position], skip_if_finished=True)

    def _storage(self) -> JournalStorage:
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        return JournalStorage(JournalFileBackend(str(self.journal)))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Let no other process write, and remove a last line that a kill left unfinished."""
        with explained(self.journal):
            self.journal.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.journal.with_name(f".{self.journal.name}.lock"), _PATIENCE_SECONDS):
            if self.journal.exists():
                content = self.journal.read_bytes()
                whole = content.rfind(b"\n") + 1
                if whole < len(content):
                    os.truncate(self.journal, whole)
            yield


def _distribution(one: Range) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    if one.integer:
        return IntDistribution(int(one.low), int(one.high), log=one.log)
    return FloatDistribution(one.low, one.high, log=one.log)
