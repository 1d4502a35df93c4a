"""Drawing a token: shortcuts against the plain computation over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_lab.engines.native_sampling import Candidates, _top_p, draw, inverse_cdf, inverse_cdf_by_blocks

TOP_PS = (1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-7, 1.0)


def by_sorting_everything(probabilities: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    ordered, order = probabilities.sort(dim=1, descending=True, stable=True)
    outside = (ordered.cumsum(dim=1) - ordered >= top_ps[:, None]) & (top_ps[:, None] < 1)
    return probabilities.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), 0.0)


def softmax_as_drawn(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1).double().exp()


@pytest.mark.few(11)
@pytest.mark.parametrize("vocabulary", [1, 2, 3, 17, 1000, 150_000])
@pytest.mark.parametrize("step", [0.0, 0.5, 3.0])
def test_top_p_by_candidates_is_top_p_by_a_full_sort(vocabulary: int, step: float) -> None:
    """Flat to peaked rows; `step` rounds the logits, so that many tokens tie, at the threshold too."""
    generator = torch.Generator().manual_seed(vocabulary)
    for spread in (0.0, 0.3, 2.0, 6.0, 40.0):
        logits = spread * torch.randn(len(TOP_PS), vocabulary, generator=generator)
        probabilities = softmax_as_drawn((logits / step).round() * step if step else logits)
        top_ps = torch.tensor(TOP_PS)[torch.randperm(len(TOP_PS), generator=generator)]
        kept = _top_p(probabilities, top_ps)
        assert torch.equal(kept, by_sorting_everything(probabilities, top_ps))
        assert torch.equal(kept[top_ps == 1], probabilities[top_ps == 1])
        assert (kept.sum(dim=1) >= top_ps - 1e-4).all() and ((kept > 0).sum(dim=1) >= 1).all()


@pytest.mark.parametrize("vocabulary", [4, 64, 1000])
def test_a_token_at_the_threshold_of_candidates_is_one(vocabulary: int) -> None:
    """All mass but 1 - top_p on the first tokens, the rest spread evenly: whether they belong hangs on rounding."""
    for top_p in (0.25, 0.5, 0.875, 0.9):
        for head in (1, 2):
            tail = (1 - top_p) / (vocabulary - head)
            row = torch.tensor([top_p / head] * head + [tail] * (vocabulary - head), dtype=torch.float64)
            rows, top_ps = torch.stack([row, row.flip(0), row / row.sum()]), torch.full((3,), top_p)
            assert torch.equal(_top_p(rows, top_ps), by_sorting_everything(rows, top_ps))


def test_rows_without_a_number_stay_as_they_are() -> None:
    """A model that has diverged; without top-p nothing is sorted at all."""
    rows = torch.full((2, 5), torch.nan, dtype=torch.float64)
    for top_ps in (torch.tensor([0.5, 1.0]), torch.ones(2)):
        assert _top_p(rows, top_ps).isnan().all()


def drawn_plainly(
    logits: torch.Tensor, uniforms: torch.Tensor, temperatures: torch.Tensor, top_ps: torch.Tensor | None
) -> torch.Tensor:
    """Tokens by the CDF of the whole vocabulary in float64, one row at a time."""
    tokens = []
    for row, temperature in enumerate(temperatures):
        logprobs = (logits[row].to(torch.promote_types(logits.dtype, torch.float32)) / (temperature or 1)).log_softmax(
            0
        )
        probabilities = logprobs.double().exp()[None]
        if top_ps is not None:
            probabilities = by_sorting_everything(probabilities, top_ps[row : row + 1])
        cdf = probabilities[0].cumsum(0)
        above = (cdf > uniforms[row] * cdf[-1]).nonzero()
        tokens.append(logprobs.argmax() if temperature == 0 else above[0, 0])
    return torch.stack(tokens)


def some_rows(
    rows: int, vocabulary: int, dtype: torch.dtype, spread: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = (spread * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    uniforms = torch.rand(rows, dtype=torch.float64, generator=generator)
    uniforms[:2] = torch.tensor([0.0, 1 - 1e-13], dtype=torch.float64)
    temperatures = torch.tensor([0.0, 0.6, 1.0, 1.3])[torch.randint(4, (rows,), generator=generator)]
    return logits, uniforms, temperatures, torch.tensor(TOP_PS)[torch.randint(8, (rows,), generator=generator)]


@pytest.mark.few(7)
@pytest.mark.parametrize("vocabulary", [2, 128, 300, 20_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_draw_is_the_inverse_cdf_of_the_whole_vocabulary(vocabulary: int, dtype: torch.dtype) -> None:
    """With each row's own temperature and top-p, greedy rows among them."""
    for spread in (0.5, 3.0, 12.0):
        logits, uniforms, temperatures, top_ps = some_rows(60, vocabulary, dtype, spread)
        for cut in (None, top_ps):
            tokens, logprobs = draw(logits, uniforms, temperatures, cut)
            assert torch.equal(tokens, drawn_plainly(logits, uniforms, temperatures, cut))
            assert (logprobs <= 0).all() and logprobs.isfinite().all()


def adversarial_rows(vocabulary: int) -> torch.Tensor:
    """Logits: flat, one token, two, ties at every boundary, a long tail behind a peak, none alike."""
    places, drawn = torch.arange(vocabulary), torch.Generator().manual_seed(vocabulary)
    shuffled = torch.randperm(vocabulary, generator=drawn)
    rows = [
        places * 0, -200 * (places != 3), -200 * (places % 7 > 1), -(places // 5), (shuffled // 40) / 8,
        9 * (shuffled == 0), 3 * torch.randn(vocabulary, generator=drawn),
    ]  # fmt: skip
    return torch.stack([row.double() for row in rows])


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("count", [1, 8, 130, 700])
def test_candidates_draw_what_a_full_sort_draws_or_say_that_they_are_too_few(dtype: torch.dtype, count: int) -> None:
    """Token for token in float64, and of the rows in fp32 at least 99.9%."""
    logits, same, told = adversarial_rows(700).to(dtype).repeat(20, 1), [], []
    uniforms = torch.rand(len(logits), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for top_p in (1e-9, 0.1, 0.5, 0.75, 0.95, 1 - 1e-6, 1.0):
        top_ps, temperatures = torch.full((len(logits),), top_p), torch.ones(len(logits))
        expected = drawn_plainly(logits, uniforms, temperatures, top_ps)
        nuclei = (by_sorting_everything(softmax_as_drawn(logits), top_ps) > 0).sum(1) * (top_ps < 1)
        for row, nucleus in enumerate(nuclei.tolist()):
            few = Candidates(count, torch.zeros(1, dtype=torch.bool))
            one = slice(row, row + 1)
            drawn, _ = draw(logits[one], uniforms[one], temperatures[one], top_ps[one], True, few)
            told.append(bool(few.too_few))
            assert told[-1] or nucleus <= count, "never a token of a nucleus cut short"
            same += [] if told[-1] else [bool(drawn == expected[row])]
    assert sum(same) >= (1 if dtype is torch.float64 else 0.999) * len(same) > 0.1 * len(told)
    assert any(told) == (count < 700), "the whole vocabulary is enough"


@pytest.mark.few(3)
@pytest.mark.parametrize("vocabulary", [1, 2, 127, 128, 129, 5000, 49_152])
def test_a_search_by_blocks_finds_the_token_of_the_whole_cdf(vocabulary: int) -> None:
    """Always from float64 probabilities, and at least 999 times of 1000 from fp32 ones; never a token without mass."""
    rows, same, total = (2000 if vocabulary < 1000 else 60), 0, 0
    for spread in (0.05, 1.0, 4.0, 15.0):
        logits, uniforms, _, top_ps = some_rows(rows, vocabulary, torch.float32, spread)
        logprobs = torch.log_softmax(logits, dim=-1)
        exact, single = logprobs.double().exp(), logprobs.exp()
        for wide, narrow in ((exact, single), (_top_p(exact, top_ps), _top_p(single, top_ps))):
            expected = inverse_cdf(wide, uniforms)
            assert torch.equal(inverse_cdf_by_blocks(wide, uniforms), expected)
            found = inverse_cdf_by_blocks(narrow, uniforms)
            assert (narrow.gather(1, found[:, None]) > 0).all()
            same, total = same + int((found == expected)[2:].sum()), total + rows - 2  # the first two lie at the ends
    assert same >= 0.999 * total


def test_a_uniform_at_either_end_draws_a_token_with_mass() -> None:
    """The first and the last of them, whole blocks without any before and after."""
    row = torch.zeros(1, 1000, dtype=torch.float64)
    row[0, [301, 420, 555]] = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    for search in (inverse_cdf, inverse_cdf_by_blocks):
        ends = [int(search(row, torch.tensor([u], dtype=torch.float64))) for u in (0.0, 0.25, 0.75, 1 - 2**-53, 1.0)]
        assert ends == [301, 420, 555, 555, 555]
        nothing = search(torch.full((2, 1000), math.nan, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
        assert ((nothing >= 0) & (nothing < 1000)).all(), "a row without a number is no reason to read beyond the end"
