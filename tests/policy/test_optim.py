"""The optimiser: clipping, warm-up, and the norms that an update reports."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from helpers import F64, assert_close
from hypothesis import settings
from torch import nn

from grpo_lab.policy.muon import orthogonal
from grpo_lab.policy.optim import Adamw, Decay, Muon, Optimizer, Sgd, hidden_matrices

ADAMW = Adamw(
    max_grad_norm=1.0, learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, warmup_updates=4,
    decay=Decay.constant, decay_share=0.25, final_share=0.1,
)  # fmt: skip
SGD = Sgd(
    max_grad_norm=1e9, learning_rate=1e-2, warmup_updates=0, decay=Decay.constant, decay_share=0.25, final_share=0.1,
    momentum=0.0, weight_decay=0.0,
)  # fmt: skip
MUON = Muon(
    max_grad_norm=1e9, learning_rate=1e-2, warmup_updates=0, decay=Decay.constant, decay_share=0.25, final_share=0.1,
    beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, momentum=0.95,
)  # fmt: skip
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (5,))
    return [nn.Parameter(torch.randn(*shape, dtype=F64, generator=generator)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter], update: int, factor: float = 1.0) -> float:
    """Random gradients; returns their norm."""
    generator = torch.Generator().manual_seed(100 + update)
    for parameter in parameters:
        parameter.grad = factor * torch.randn(parameter.shape, dtype=F64, generator=generator)
    return math.sqrt(sum(float(parameter.grad.pow(2).sum()) for parameter in parameters))


def distance(before: list[torch.Tensor], after: list[nn.Parameter]) -> float:
    return math.sqrt(sum(float((new - old).detach().pow(2).sum()) for old, new in zip(before, after)))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1, 5.0])
@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_the_reported_update_norm_is_how_far_the_weights_went(weight_decay, eps) -> None:
    adamw, parameters = replace(ADAMW, weight_decay=weight_decay, eps=eps), weights()
    frozen = nn.Parameter(torch.ones(2, dtype=F64))  # never gets a gradient, never moves
    optimizer = adamw.build([*parameters, frozen])
    for update in range(6):
        before = [parameter.detach().clone() for parameter in parameters]
        set_gradients(parameters, update)
        report = adamw.step(optimizer, update)
        assert_close(report.update_norm, distance(before, parameters), 1e-10, f"update {update}")
    assert report.update_norm > 1e-4
    assert frozen.tolist() == [1.0, 1.0]


def test_the_first_update_of_adam_moves_each_weight_by_the_rate() -> None:
    # Moments corrected for their start are g and g^2, so each of the 17 weights moves by rate * g/|g|.
    parameters = weights()
    optimizer = ADAMW.build(parameters)
    set_gradients(parameters, 0)
    report = ADAMW.step(optimizer, 0)
    assert_close(report.update_norm, 1e-2 / 4 * math.sqrt(17), 1e-8, "rate of the first of four warm-up updates")


def test_the_gradient_norm_is_taken_before_clipping_and_the_update_after() -> None:
    # Adam's first step hides the factor, so eps is large here: the clipped gradient of norm 1 decides.
    adamw, norms = replace(ADAMW, eps=10.0), []
    for factor in (10.0, 100.0):
        parameters = weights()
        optimizer = adamw.build(parameters)
        norm = set_gradients(parameters, 0, factor)
        report = adamw.step(optimizer, 0)
        assert_close(report.gradient_norm, norm, 1e-9, "before clipping")
        norms.append(report.update_norm)
    assert_close(norms[0], norms[1], 1e-8, "both gradients were clipped to norm 1")
    parameters = weights()
    set_gradients(parameters, 0, 0.01)
    assert adamw.step(adamw.build(parameters), 0).update_norm < 0.5 * norms[0]


def test_the_rate_warms_up_linearly_and_then_stays() -> None:
    # (update + 1) / 4 of the full rate
    rates = [ADAMW.rate(update) for update in range(6)]
    assert_close(rates, [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01], 1e-15, "warm-up over four updates")
    assert replace(ADAMW, warmup_updates=0).rate(0) == 0.01
    parameters = weights()
    optimizer = ADAMW.build(parameters)
    set_gradients(parameters, 1)
    assert ADAMW.step(optimizer, 1).learning_rate == 0.005
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_gradients_are_cleared_after_an_update() -> None:
    parameters = weights()
    set_gradients(parameters, 0)
    ADAMW.step(ADAMW.build(parameters), 0)
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_no_weight(bad) -> None:
    parameters = weights()
    optimizer = ADAMW.build(parameters)
    set_gradients(parameters, 0)
    ADAMW.step(optimizer, 0)
    before = [parameter.detach().clone() for parameter in parameters]
    moments = [optimizer.state[parameter]["exp_avg"].clone() for parameter in parameters]
    set_gradients(parameters, 1)
    parameters[1].grad[3] = bad
    with pytest.raises(FloatingPointError, match="update 1"):
        ADAMW.step(optimizer, 1)
    assert distance(before, parameters) == 0
    for parameter, moment in zip(parameters, moments):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moment)


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", 0.0), ("max_grad_norm", -1.0), ("beta1", 1.0), ("beta2", -0.1), ("eps", math.nan),
     ("weight_decay", -1e-3), ("warmup_updates", -1)],
)  # fmt: skip
def test_optimiser_numbers_out_of_range_are_named(field, value) -> None:
    with pytest.raises(ValueError, match=rf"Adamw\.{field} must be"):
        replace(ADAMW, **{field: value})


@pytest.mark.parametrize(
    ("decay", "factors"),
    [
        (Decay.constant, {0.0: 1.0, 0.5: 1.0, 1.0: 1.0}),
        (Decay.cosine, {0.0: 1.0, 0.25: 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 0.5: 0.55, 1.0: 0.1, 1.3: 0.1}),
        (Decay.warmup_stable_decay, {0.0: 1.0, 0.74: 1.0, 0.875: 0.55, 1.0: 0.1}),
    ],
)
def test_the_rate_falls_with_the_budget_as_its_form_says(decay: Decay, factors: dict[float, float]) -> None:
    adamw = replace(ADAMW, decay=decay)
    for spent, factor in factors.items():
        assert adamw.rate(100, spent) == pytest.approx(1e-2 * factor, rel=1e-5), spent
        assert adamw.rate(1, spent) == pytest.approx(0.5e-2 * factor, rel=1e-5), "the warm-up comes on top"


def test_an_update_takes_the_rate_of_its_place_in_the_budget() -> None:
    adamw, parameters = replace(ADAMW, decay=Decay.cosine, final_share=0.0, warmup_updates=0), weights()
    optimizer = adamw.build(parameters)
    set_gradients(parameters, 0)
    assert adamw.step(optimizer, 0, spent=1.0).update_norm == pytest.approx(0, abs=1e-12)
    set_gradients(parameters, 1)
    assert adamw.step(optimizer, 1, spent=0.5).learning_rate == pytest.approx(0.5e-2)


class Small(nn.Module):
    """An embedding, two matrices, a bias and a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table, self.tall, self.wide = nn.Embedding(7, 4), nn.Linear(4, 9), nn.Linear(9, 4, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.double()
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, dtype=F64, generator=generator))

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize(
    ("optimizer", "number"),
    [(SGD, 0), (replace(SGD, momentum=0.9), 1), (replace(SGD, weight_decay=0.3), 0),
     (replace(SGD, momentum=0.9, weight_decay=0.3), 1), (MUON, 2), (replace(MUON, weight_decay=0.3), 2)],
)  # fmt: skip
def test_the_update_norm_of_every_optimiser_is_how_far_the_weights_went(optimizer: Optimizer, number: int) -> None:
    model = Small()
    parameters = list(model.parameters())
    built = optimizer.build(parameters, model)
    for update in range(4):
        before = [parameter.detach().clone() for parameter in parameters]
        set_gradients(parameters, update)
        report = optimizer.step(built, update)
        assert_close(report.update_norm, distance(before, parameters), 1e-10, f"update {update}")
    assert report.update_norm > 1e-4
    matrices = sum(one.numel() for one in hidden_matrices(model))
    moments = [one.numel() for state in built.state.values() for name, one in state.items() if name != "step"]
    assert sum(moments) == optimizer.state_numbers(sum(one.numel() for one in parameters), matrices)
    assert number == 2 or sum(moments) == number * sum(one.numel() for one in parameters)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_by_its_formula(momentum: float, weight_decay: float) -> None:
    sgd, parameters = replace(SGD, momentum=momentum, weight_decay=weight_decay), weights()
    optimizer, moved, buffer = sgd.build(parameters), parameters[0].detach().clone(), torch.zeros(3, 4, dtype=F64)
    for update in range(3):
        set_gradients(parameters, update)
        gradient = parameters[0].grad
        assert gradient is not None
        buffer = momentum * buffer + gradient + weight_decay * moved
        moved = moved - 1e-2 * buffer
        sgd.step(optimizer, update)
        assert_close(parameters[0].detach(), moved, 1e-12, f"update {update}")


def test_half_the_gradient_is_half_of_sgds_update_and_all_of_the_others() -> None:
    for optimizer in (SGD, ADAMW, MUON):
        norms = []
        for factor in (1.0, 0.5):
            model = Small()
            parameters = list(model.parameters())
            set_gradients(parameters, 0, factor)
            norms.append(optimizer.step(optimizer.build(parameters, model), 0).update_norm)
        assert_close(norms[1] / norms[0], 1.0 if optimizer.scale_invariant else 0.5, 1e-6, str(optimizer))


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = Small()
    names = {id(one): name for name, one in model.named_parameters()}
    assert [names[id(one)] for one in hidden_matrices(model)] == ["tall.weight", "wide.weight"]
    plain, adamw = Small(), Adamw(**{name: getattr(MUON, name) for name in vars(ADAMW)})
    built, other = MUON.build(model.parameters(), model), adamw.build(plain.parameters())
    for update in range(3):
        set_gradients(list(model.parameters()), update)
        set_gradients(list(plain.parameters()), update)
        MUON.step(built, update)
        adamw.step(other, update)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters()):
        alike = torch.equal(mine, theirs)
        assert alike == (name not in ("tall.weight", "wide.weight")), name


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_muon_is_torchs_up_to_its_bfloat16(weight_decay: float, shape: tuple[int, int]) -> None:
    """torch orthogonalises in bfloat16: the same matrix in that type, with its rounding at each of five steps."""
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(shape[1], shape[0], bias=False)
    twin = nn.Linear(shape[1], shape[0], bias=False)
    twin.load_state_dict(layer.state_dict())
    muon = replace(MUON, weight_decay=weight_decay)
    built = muon.build(layer.parameters(), layer)
    other = torch.optim.Muon(
        twin.parameters(), 1e-2, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for update in range(3):
        before = layer.weight.detach().clone()
        layer.weight.grad = torch.randn(shape, generator=generator)
        twin.weight.grad = layer.weight.grad.clone()
        report = muon.step(built, update)
        other.step()
        mine, theirs = layer.weight.detach(), twin.weight.detach()
        apart = float((mine - theirs).norm()) / float((mine - before).norm())
        assert apart < 0.03 * (update + 1), update
        if not weight_decay:  # an update has about the root mean square of AdamW's, 0.2 times the rate
            assert 0.7 < report.update_norm / (1e-2 * 0.2 * math.sqrt(36)) < 1.3


def test_newton_schulz_by_singular_values() -> None:
    """Each singular value s, of the matrix over its norm, becomes a s + b s^3 + c s^5 five times over."""
    matrix = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(2))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert_close(orthogonal(matrix), left @ torch.diag(values) @ right, 1e-9, "singular vectors stay")
    assert_close(orthogonal(matrix.T), orthogonal(matrix).T, 1e-12, "tall or wide")
    assert orthogonal(torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("optimizer", [SGD, replace(SGD, momentum=0.9), MUON], ids=["sgd", "momentum", "muon"])
def test_an_optimiser_goes_on_from_its_state_as_if_it_never_stopped(optimizer: Optimizer) -> None:
    model, other = Small(), Small()
    built = optimizer.build(model.parameters(), model)
    for update in range(4):
        if update == 2:
            other.load_state_dict(model.state_dict())
            again = optimizer.build(other.parameters(), other)
            again.load_state_dict(copy.deepcopy(built.state_dict()))
        set_gradients(list(model.parameters()), update)
        optimizer.step(built, update)
        if update >= 2:
            set_gradients(list(other.parameters()), update)
            optimizer.step(again, update)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), other.parameters()))
