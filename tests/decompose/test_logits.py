import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float64, Int64
from oracles import GAUSSIAN_TOLERANCE, ROUNDING, features, normal, properties, seeds
from torch import Tensor

from modegpt.decompose import NotPositiveDefiniteError
from modegpt.decompose.logits import gram, logit_selection

D_HEAD, ROTARY, N_QUERIES, N_KEYS, N_HEADS, N_KV_HEADS = 9, 6, 12, 20, 4, 2
HALF, N_PLAIN = ROTARY // 2, D_HEAD - ROTARY
TINY = 1e-10
"""A ridge so small that its effect, ridge times a condition number below 1e5, stays under 1e-5 of the result."""
pairs_kept, plain_kept = st.integers(0, HALF), st.integers(0, N_PLAIN)
COEFFICIENTS = torch.tensor([1.0] * HALF + [0.0] * HALF + [1.0] * N_PLAIN, dtype=torch.float64)


def rotate(states, positions):
    """The rotary embedding, each pair by its own frequency, as complex numbers."""
    pair = torch.complex(states[..., :HALF].contiguous(), states[..., HALF:ROTARY].contiguous())
    angle = positions[:, None] * torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
    turned = pair * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag, states[..., ROTARY:]), dim=-1)


def turn(query, turns, gains):
    """`q ← (α − iβ) q` on each pair, and gains on the rest."""
    pair = torch.complex(query[..., :HALF].contiguous(), query[..., HALF:ROTARY].contiguous())
    turned = pair * torch.complex(turns[..., 0].contiguous(), -turns[..., 1].contiguous())
    return torch.cat((turned.real, turned.imag, query[..., ROTARY:] * gains), dim=-1)


def problem(seed):
    """Queries and keys of every head before and after the rotary embedding, and the attention they give."""
    queries, keys = normal(seed, N_HEADS, N_QUERIES, D_HEAD), normal(seed + 1, N_KV_HEADS, N_KEYS, D_HEAD)
    # Coordinates go together, as in a real head: else there is nothing to correct.
    keys = keys @ (torch.eye(D_HEAD, dtype=torch.float64) + 0.5 * normal(seed + 2, D_HEAD, D_HEAD))
    keys = keys.repeat_interleave(N_HEADS // N_KV_HEADS, dim=0)
    places = torch.arange(N_KEYS - N_QUERIES, N_KEYS).double()
    q, k = rotate(queries, places) * D_HEAD**-0.5, rotate(keys, torch.arange(N_KEYS).double())
    hidden = torch.arange(N_KEYS) > places[:, None]
    attention = (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1)
    return queries, keys, places, q, k, attention


def variance(logits, attention):
    """`Σ_i Var_{j~a_i}` of each head's logits, from its definition."""
    mean = (attention * logits).sum(-1, keepdim=True)
    return (attention * (logits - mean).square()).sum((-1, -2))


def solution(result):
    """`x` of each query head: the coefficients of the features that stay, zero elsewhere."""
    per_group = N_HEADS // N_KV_HEADS
    x = torch.zeros(N_HEADS, D_HEAD, dtype=torch.float64)
    for head in range(N_HEADS):
        pairs, plain = result.pairs[head // per_group], result.plain[head // per_group]
        x[head, pairs], x[head, pairs + HALF] = result.turns[head, :, 0], result.turns[head, :, 1]
        x[head, plain] = result.gains[head]
    return x


def places_of(pairs, plain):
    pairs = torch.tensor(pairs, dtype=torch.long)
    return torch.cat((pairs, pairs + HALF, torch.tensor(plain, dtype=torch.long)))


def corrected(moment, kept, ridge):
    """`min (c − x)ᵀ(H + λD)(c − x)` over `x` on `kept`: the minimiser and the minimum, by an explicit inverse."""
    damped = moment + ridge * moment.diagonal().diag()
    lost = torch.tensor([i for i in range(D_HEAD) if i not in kept.tolist()], dtype=torch.long)
    x = torch.zeros(D_HEAD, dtype=torch.float64)
    x[kept] = COEFFICIENTS[kept]
    if len(kept):
        x[kept] += torch.linalg.inv(damped[kept][:, kept]) @ damped[kept][:, lost] @ COEFFICIENTS[lost]
    return x, (COEFFICIENTS - x) @ damped @ (COEFFICIENTS - x)


@properties
@given(seeds)
def test_the_shares_add_up_to_the_logit_and_turns_commute_with_the_rotary_embedding(seed):
    queries, _keys, places, q, k, _ = problem(seed)
    f = features(q, k, ROTARY)
    assert isinstance(f, Float64[Tensor, f"{N_HEADS} {N_QUERIES} {N_KEYS} {D_HEAD}"])
    torch.testing.assert_close(f @ COEFFICIENTS, q @ k.mT, **ROUNDING)
    # A query that was turned before the embedding gives the logits of the quadratic form.
    turns, gains = normal(seed + 3, HALF, 2), normal(seed + 4, N_PLAIN)
    folded = rotate(turn(queries, turns, gains), places) * D_HEAD**-0.5
    x = torch.cat((turns[:, 0], turns[:, 1], gains))
    torch.testing.assert_close(folded @ k.mT, f @ x, rtol=1e-11, atol=1e-11)  # logits are of size ten


@properties
@given(seeds)
def test_gram_is_the_sum_of_weighted_covariances(seed):
    _, _, _, q, k, attention = problem(seed)
    f = features(q, k, ROTARY)
    expected = torch.zeros(N_HEADS, D_HEAD, D_HEAD, dtype=torch.float64)
    for head, i in itertools.product(range(N_HEADS), range(N_QUERIES)):
        centred = f[head, i] - attention[head, i] @ f[head, i]
        expected[head] += centred.T @ attention[head, i].diag() @ centred
    torch.testing.assert_close(gram(q, k, attention, ROTARY), expected, **GAUSSIAN_TOLERANCE)


@pytest.mark.parametrize("sink", [0.0, 0.9999])
def test_what_all_keys_share_does_not_round_the_rest_away(sink):
    """Key biases of some models are hundreds of times what varies, and attention may lie on one key nearly alone."""
    _, _, _, q, k, attention = problem(0)
    attention = (1 - sink) * attention
    attention[..., 0] += sink
    keys = k + 300 * normal(9, D_HEAD)
    expected = gram(q, keys, attention, ROTARY)
    found = gram(q.float(), keys.float(), attention.float(), ROTARY).double()
    # The keys themselves are rounded to 300 · 6e-8 of what varies, and the mean with them: a few 1e-5. With squares
    # that cancel it was 300² · 6e-8, and 1e4 times that beside the little that a sink leaves.
    assert (found - expected).norm() < 1e-3 * expected.norm()


@properties
@given(seeds)
def test_what_all_keys_share_costs_nothing(seed):
    _, _, _, q, k, attention = problem(seed)
    moment = gram(q, k, attention, ROTARY)
    shifted = gram(q, k + 5 * normal(seed + 5, N_HEADS, 1, D_HEAD), attention, ROTARY)
    torch.testing.assert_close(shifted, moment, **GAUSSIAN_TOLERANCE)
    equal = gram(q, k[:, :1].expand_as(k), attention, ROTARY)
    torch.testing.assert_close(equal, torch.zeros_like(equal), rtol=0, atol=1e-12)


@properties
@given(seeds, pairs_kept, plain_kept, st.sampled_from([TINY, 0.01, 1.0]))
def test_the_error_is_the_variance_of_the_logits_lost(seed, n_pairs, n_plain, ridge):
    queries, _, places, q, k, attention = problem(seed)
    result = logit_selection(gram(q, k, attention, ROTARY), N_KV_HEADS, n_pairs, n_plain, ROTARY, ridge)
    assert isinstance(result.pairs, Int64[Tensor, f"{N_KV_HEADS} {n_pairs}"])
    assert isinstance(result.plain, Int64[Tensor, f"{N_KV_HEADS} {n_plain}"])
    assert isinstance(result.turns, Float64[Tensor, f"{N_HEADS} {n_pairs} 2"])
    assert isinstance(result.gains, Float64[Tensor, f"{N_HEADS} {n_plain}"])
    assert bool((result.pairs.diff() > 0).all())
    assert bool((result.plain.diff() > 0).all())
    # The logits of the model with the corrections folded in and the rest dropped, from the vectors themselves.
    x = solution(result)
    turns = torch.stack((x[:, :HALF], x[:, HALF:ROTARY]), dim=-1)[:, None]
    folded = rotate(turn(queries, turns, x[:, None, ROTARY:]), places) * D_HEAD**-0.5
    lost = variance(folded @ k.mT - q @ k.mT, attention).sum() / variance(q @ k.mT, attention).sum()
    assert result.error**2 == pytest.approx(lost.item(), rel=1e-9, abs=1e-12)


@properties
@given(seeds, st.integers(0, HALF), st.integers(0, N_PLAIN))
def test_what_stays_is_corrected_by_least_squares_on_the_logits(seed, n_pairs, n_plain):
    _, _, _, q, k, attention = problem(seed)
    moment = gram(q, k, attention, ROTARY)
    result = logit_selection(moment, N_KV_HEADS, n_pairs, n_plain, ROTARY, TINY)
    f = features(q, k, ROTARY)
    weighted = ((f - attention[..., None, :] @ f) * attention.sqrt()[..., None]).flatten(1, 2)
    for head, x in enumerate(solution(result)):
        group = head // (N_HEADS // N_KV_HEADS)
        kept = places_of(result.pairs[group].tolist(), result.plain[group].tolist())
        if len(kept):
            fit = torch.linalg.lstsq(weighted[head][:, kept], weighted[head] @ COEFFICIENTS).solution
            torch.testing.assert_close(x[kept], fit, rtol=1e-5, atol=1e-5)  # see TINY


@properties
@given(seeds, pairs_kept, plain_kept, st.sampled_from([0.01, 1.0]))
def test_schur_complements_give_the_correction_of_the_damped_moment(seed, n_pairs, n_plain, ridge):
    _, _, _, q, k, attention = problem(seed)
    moment = gram(q, k, attention, ROTARY)
    result = logit_selection(moment, N_KV_HEADS, n_pairs, n_plain, ROTARY, ridge)
    for head, x in enumerate(solution(result)):
        group = head // (N_HEADS // N_KV_HEADS)
        kept = places_of(result.pairs[group].tolist(), result.plain[group].tolist())
        torch.testing.assert_close(x, corrected(moment[head], kept, ridge)[0], **GAUSSIAN_TOLERANCE)


@pytest.mark.parametrize("removed", ["pair", "plain"])
@pytest.mark.parametrize("ridge", [TINY, 0.01])
@pytest.mark.parametrize("seed", range(5))
def test_the_first_to_go_is_the_one_that_brute_force_removes(seed, ridge, removed):
    _, _, _, q, k, attention = problem(seed)
    moment = gram(q, k, attention, ROTARY)
    sizes = (HALF - 1, N_PLAIN) if removed == "pair" else (HALF, N_PLAIN - 1)
    result = logit_selection(moment, N_KV_HEADS, *sizes, ROTARY, ridge)
    for group, heads in enumerate(moment.unflatten(0, (N_KV_HEADS, -1))):
        losses = {}
        for pairs in itertools.combinations(range(HALF), sizes[0]):
            for plain in itertools.combinations(range(ROTARY, D_HEAD), sizes[1]):
                kept = places_of(pairs, plain)
                losses[pairs, plain] = sum(corrected(head, kept, ridge)[1].item() for head in heads)
        best = min(losses, key=losses.__getitem__)
        assert (tuple(result.pairs[group].tolist()), tuple(result.plain[group].tolist())) == best


def test_a_correction_saves_most_of_what_a_copy_held():
    # Pair 2 repeats pair 0 turned by a right angle: whichever stays can say all that both did.
    _, _, _, q, k, attention = problem(3)
    f = features(q, k, ROTARY)
    f[..., 2], f[..., 2 + HALF] = f[..., HALF], -f[..., 0]
    weighted = ((f - attention[..., None, :] @ f) * attention.sqrt()[..., None]).flatten(1, 2)
    result = logit_selection(weighted.mT @ weighted, N_KV_HEADS, HALF - 1, N_PLAIN, ROTARY, TINY)
    assert 1 in result.pairs[0]
    assert result.error < 1e-4  # the ridge keeps a root of TINY from it
    assert result.turns[..., 1].abs().max() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("rotary_dim", [ROTARY, 8])
def test_everything_kept_changes_nothing(rotary_dim):
    moment = normal(4, N_HEADS, 30, D_HEAD)
    half, n_plain = rotary_dim // 2, D_HEAD - rotary_dim
    result = logit_selection(moment.mT @ moment, N_KV_HEADS, half, n_plain, rotary_dim, 0.01)
    assert result.pairs.tolist() == [list(range(half))] * N_KV_HEADS
    assert result.plain.tolist() == [list(range(rotary_dim, D_HEAD))] * N_KV_HEADS
    assert bool((result.turns == torch.tensor([1.0, 0.0])).all())
    assert bool((result.gains == 1).all())
    assert result.error == 0


def test_without_plain_coordinates_every_head_is_pairs():
    factors = normal(5, N_HEADS, 30, 8)
    result = logit_selection(factors.mT @ factors, N_KV_HEADS, 2, 0, 8, 0.01)
    assert result.pairs.shape == (N_KV_HEADS, 2)
    assert result.plain.shape == (N_KV_HEADS, 0)
    assert result.gains.shape == (N_HEADS, 0)
    assert 0 < result.error < 1


def test_key_heads_do_not_touch_each_other():
    _, _, _, q, k, attention = problem(6)
    moment = gram(q, k, attention, ROTARY)
    both = logit_selection(moment, N_KV_HEADS, 2, 1, ROTARY, 0.01)
    for group in range(N_KV_HEADS):
        heads = slice(2 * group, 2 * group + 2)
        alone = logit_selection(moment[heads], 1, 2, 1, ROTARY, 0.01)
        assert torch.equal(alone.pairs[0], both.pairs[group])
        torch.testing.assert_close(alone.turns, both.turns[heads], **ROUNDING)
        # The scale of a key head is its own affair.
        scaled = logit_selection(1e6 * moment[heads], 1, 2, 1, ROTARY, 0.01)
        assert torch.equal(scaled.pairs, alone.pairs)
        torch.testing.assert_close(scaled.turns, alone.turns, **GAUSSIAN_TOLERANCE)


def test_silent_coordinates_and_heads():
    _, _, _, q, k, attention = problem(7)
    k[..., [1, 1 + HALF, ROTARY]] = 0
    moment = gram(q, k, attention, ROTARY)
    moment[3] = 0
    result = logit_selection(moment, N_KV_HEADS, HALF - 1, N_PLAIN - 1, ROTARY, 0.01)
    assert result.pairs.tolist() == [[0, 2]] * N_KV_HEADS
    assert result.plain.tolist() == [[ROTARY + 1, ROTARY + 2]] * N_KV_HEADS
    assert result.error == pytest.approx(0, abs=1e-9)  # the floor of the damping is eps
    torch.testing.assert_close(result.gains, torch.ones_like(result.gains), **GAUSSIAN_TOLERANCE)
    nothing = logit_selection(torch.zeros_like(moment), N_KV_HEADS, 1, 1, ROTARY, 0.01)
    assert nothing.error == 0
    assert bool(torch.isfinite(nothing.turns).all())


def test_inputs_are_not_mutated():
    _, _, _, q, k, attention = problem(8)
    before = [each.clone() for each in (q, k, attention)]
    moment = gram(q, k, attention, ROTARY)
    assert all(torch.equal(left, right) for left, right in zip(before, (q, k, attention), strict=True))
    kept = moment.clone()
    logit_selection(moment, N_KV_HEADS, 1, 1, ROTARY, 0.01)
    assert torch.equal(moment, kept)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad):
    moment = torch.eye(D_HEAD, dtype=torch.float64).repeat(N_HEADS, 1, 1)
    moment[1, 2, 2] = bad
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinity"):
        logit_selection(moment, N_KV_HEADS, 1, 1, ROTARY, 0.01)


def test_a_moment_with_a_negative_direction_is_refused():
    """Also where the other heads are sound: it is nobody's least-squares problem."""
    moment = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1)
    moment[0, 0, 1] = moment[0, 1, 0] = 1.5
    with pytest.raises(NotPositiveDefiniteError, match="negative direction"):
        logit_selection(moment, n_kv_heads=2, n_pairs=1, n_plain=0, rotary_dim=4, ridge=0.01)


@pytest.mark.parametrize("seed", [7, 24, 37])
def test_each_further_pair_to_go_is_the_best_single_one(seed: int):
    """These are problems on which what the pairs gone before share with the next one decides."""
    *_, q, k, attention = problem(seed)
    moment, plain = gram(q, k, attention, ROTARY), list(range(ROTARY, D_HEAD))
    before, after = (logit_selection(moment, N_KV_HEADS, n, N_PLAIN, ROTARY, 0.01).pairs for n in (2, 1))
    for group, heads in enumerate(moment.unflatten(0, (N_KV_HEADS, -1))):
        losses = {
            pair: sum(corrected(head, places_of([pair], plain), 0.01)[1].item() for head in heads)
            for pair in before[group].tolist()
        }
        assert after[group].tolist() == [min(losses, key=losses.__getitem__)]
