"""The axes whose options select tokens, rows, groups or questions; without torch, for whatever reads declarations."""

from __future__ import annotations

from enum import Enum


class Selects(Enum):
    """The axes whose options select something, in the order in which they act.

    question_filter  training questions
    pass_rate        training questions, among those whose pass rate was measured
    truncation       rows of the batch that are in the loss
    group_filter     groups: of a round of generation if others replace them, else of the batch
    correction       tokens or rows whose weight is not their ratio
    rejection        tokens or rows that are in the loss
    entropy          tokens in the loss
    token_credit     tokens in the loss with an advantage other than 0
    surrogate        tokens of an optimiser step in the loss with such an advantage; rows if a row has one ratio
    update_mask      the same tokens; rows if it judges whole responses
    """

    question_filter = "question_filter"
    pass_rate = "pass_rate"
    truncation = "truncation"
    group_filter = "group_filter"
    correction = "correction"
    rejection = "rejection"
    entropy = "entropy"
    token_credit = "token_credit"
    surrogate = "surrogate"
    update_mask = "update_mask"

    @property
    def stream(self) -> str:
        """The stream of random numbers by which the twin draws."""
        return f"twin/{self.value}"
