from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Int64
from oracles import ROUNDING, algorithm_2_grouped_scores, algorithm_2_scores, normal, properties, seeds, states
from torch import Tensor

from modegpt.decompose import NotPositiveDefiniteError, cr

N_TOKENS, D_HEAD = 30, 8


def heads(seed, n_heads, d_head=D_HEAD):
    """`(n_heads, tokens, d_head)` states with coordinates of different scale."""
    return torch.stack([states(seed + h, N_TOKENS, d_head) for h in range(n_heads)])


def energy(x):
    return x.square().sum(1)


def rotate(x, rotary_dim):
    """Turn coordinates `j` and `j + r/2` by `position · 10000^(-2j/r)`, one pair at a time."""
    out = x.clone()
    for position in range(x.shape[1]):
        for j in range(rotary_dim // 2):
            angle = torch.tensor(position * 10000 ** (-2 * j / rotary_dim), dtype=torch.float64)
            a, b = x[:, position, j], x[:, position, j + rotary_dim // 2]
            out[:, position, j] = a * angle.cos() - b * angle.sin()
            out[:, position, j + rotary_dim // 2] = a * angle.sin() + b * angle.cos()
    return out


def top(scores, k):
    return sorted(scores.argsort(descending=True)[:k].tolist())


@properties
@given(seeds, st.integers(0, D_HEAD), st.integers(1, 3))
def test_without_rotation_equals_algorithm_2_as_printed(seed, rank, n_heads):
    q, k = heads(seed, n_heads), heads(seed + 50, n_heads)
    result = cr(energy(q), energy(k), 0, rank, 0)
    assert isinstance(result.plain, Int64[Tensor, f"{n_heads} {rank}"])
    assert isinstance(result.pairs, Int64[Tensor, f"{n_heads} 0"])
    assert result.plain.tolist() == [top(algorithm_2_scores(q[h], k[h]), rank) for h in range(n_heads)]


@properties
@given(seeds, st.integers(1, D_HEAD), st.integers(1, 3))
def test_grouped_queries_share_the_choice_of_the_printed_group_score(seed, rank, per_group):
    q, k = heads(seed, 2 * per_group), heads(seed + 50, 2)
    result = cr(energy(q), energy(k), 0, rank, 0)
    for group in range(2):
        members = list(q[group * per_group : (group + 1) * per_group])
        assert result.plain[group].tolist() == top(algorithm_2_grouped_scores(members, k[group]), rank)


@properties
@given(seeds, st.sampled_from([(4, 0, 8), (3, 0, 8), (1, 0, 8), (1, 2, 4), (2, 1, 4), (0, 3, 4), (2, 0, 6)]))
def test_rotary_pairs_are_scored_whole_and_as_after_rotation(seed, sizes):
    n_pairs, n_plain, rotary_dim = sizes
    half = rotary_dim // 2
    q, k = heads(seed, 2), heads(seed + 50, 1)
    result = cr(energy(q), energy(k), n_pairs, n_plain, rotary_dim)

    # The paper measures the states after the rotation (its sigma_r). The score of a set of columns of C^{1/2} is its
    # Frobenius norm, and a pair's is the same on rotated states, so measuring before the rotation loses nothing.
    turned_q, turned_k = rotate(q, rotary_dim), rotate(k, rotary_dim)
    scores = torch.zeros(half, dtype=torch.float64)
    for j in range(half):
        columns = [j, j + half]
        for h in range(2):
            scores[j] += (turned_q[h][:, columns].norm() * turned_k[0][:, columns].norm()) ** 2
    assert result.pairs[0].tolist() == top(scores, n_pairs)
    plain = algorithm_2_grouped_scores(list(q), k[0])[rotary_dim:]
    assert result.plain[0].tolist() == [rotary_dim + i for i in top(plain, n_plain)]

    after = cr(energy(turned_q), energy(turned_k), n_pairs, n_plain, rotary_dim)
    assert torch.equal(after.pairs, result.pairs)
    assert torch.equal(after.plain, result.plain)
    # sqrt of a sum of squares that survived one rotation: a few eps, amplified where the error is small (above 1e-2).
    assert after.error == pytest.approx(result.error, rel=1e-10, abs=1e-12)


def test_kept_pairs_give_the_rotated_logits_of_the_dense_head_with_the_rest_zeroed():
    q, k = heads(1, 1), heads(2, 1)
    pairs = cr(energy(q), energy(k), 2, 0, D_HEAD).pairs[0]
    columns = torch.cat((pairs, pairs + D_HEAD // 2))
    zeroed_q, zeroed_k = torch.zeros_like(q), torch.zeros_like(k)
    zeroed_q[..., columns], zeroed_k[..., columns] = q[..., columns], k[..., columns]
    dense = rotate(zeroed_q, D_HEAD)[0] @ rotate(zeroed_k, D_HEAD)[0].T
    # Rotating and then selecting must be selecting and then rotating, which holds only for whole pairs.
    kept = rotate(q, D_HEAD)[0][:, columns] @ rotate(k, D_HEAD)[0][:, columns].T
    torch.testing.assert_close(kept, dense, **ROUNDING)


@properties
@given(seeds, st.integers(1, 3))
def test_no_other_choice_of_pairs_keeps_more_energy(seed, n_pairs):
    q, k = heads(seed, 2), heads(seed + 50, 1)
    result = cr(energy(q), energy(k), n_pairs, 0, D_HEAD)
    half = D_HEAD // 2

    def dropped_share(kept):
        shares = torch.zeros(half, dtype=torch.float64)
        for j in range(half):
            for h in range(2):
                pair_q, pair_k = q[h][:, [j, j + half]], k[0][:, [j, j + half]]
                shares[j] += pair_q.square().sum() * pair_k.square().sum()
        return ((shares.sum() - shares[list(kept)].sum()) / shares.sum()).sqrt().item()

    best = min(dropped_share(kept) for kept in combinations(range(half), n_pairs))
    assert dropped_share(result.pairs[0].tolist()) == best
    # error² = discarded over total energy; the sums differ in order only, by a few eps over an error² above 1e-4.
    assert result.error == pytest.approx(best, rel=1e-10)


@pytest.mark.parametrize("sizes", [(4, 0, 8), (2, 4, 4), (0, 8, 0)])
def test_full_rank_keeps_everything_without_error(sizes):
    result = cr(energy(heads(3, 2)), energy(heads(4, 2)), *sizes)
    assert result.pairs.tolist() == [list(range(sizes[2] // 2))] * 2
    assert result.plain.tolist() == [list(range(sizes[2], D_HEAD))] * 2
    assert result.error == 0


def test_keeping_nothing_loses_everything():
    assert cr(energy(heads(3, 2)), energy(heads(4, 2)), 0, 0, 4).error == 1


@properties
@given(seeds, st.integers(0, 4), st.integers(0, 4))
def test_permutation_equivariance(seed, n_pairs, n_plain):
    d_head, half = 12, 4
    q, k = energy(heads(seed, 4, d_head)), energy(heads(seed + 50, 2, d_head))
    generator = torch.Generator().manual_seed(seed)
    pair_order, plain_order = torch.randperm(half, generator=generator), torch.randperm(4, generator=generator)
    order = torch.cat((pair_order, pair_order + half, plain_order + 2 * half))
    plain = cr(q, k, n_pairs, n_plain, 2 * half)
    permuted = cr(q[:, order], k[:, order], n_pairs, n_plain, 2 * half)
    assert torch.equal(pair_order[permuted.pairs].sort().values, plain.pairs)
    assert torch.equal(plain_order[permuted.plain - 2 * half].sort().values + 2 * half, plain.plain)
    assert permuted.error == pytest.approx(plain.error, rel=1e-10, abs=1e-7)  # abs: root of one rounding error

    swapped = cr(q.reshape(2, 2, -1).flip(0).flatten(0, 1), k.flip(0), n_pairs, n_plain, 2 * half)
    assert torch.equal(swapped.pairs.flip(0), plain.pairs)
    assert torch.equal(swapped.plain.flip(0), plain.plain)


def test_both_energies_count():
    q = torch.tensor([[100.0, 3.0, 1.0, 2.0]], dtype=torch.float64)
    k = torch.tensor([[0.01, 2.0, 100.0, 2.0]], dtype=torch.float64)
    assert cr(q, k, 0, 2, 0).plain.tolist() == [[1, 2]]


def test_inputs_are_not_mutated():
    q, k = energy(heads(5, 4)), energy(heads(6, 2))
    before = q.clone(), k.clone()
    cr(q, k, 1, 2, 4)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_dead_coordinates_go_first_and_change_no_logit():
    q, k = heads(7, 1), heads(8, 1)
    k[..., [1, 5]] = 0  # pair 1 of four
    q[..., [3, 7]] = 0  # pair 3
    result = cr(energy(q), energy(k), 2, 0, D_HEAD)
    assert result.pairs.tolist() == [[0, 2]]
    assert result.error == 0
    kept = [0, 2, 4, 6]
    torch.testing.assert_close(q[0][:, kept] @ k[0][:, kept].T, q[0] @ k[0].T, **ROUNDING)


def test_a_pair_with_one_dead_half_is_still_a_pair():
    # As singles, coordinates 0 and 2 (products 9 and 0) and 1 and 3 (4 and 4) would split the pairs (0,2) and (1,3).
    q = torch.tensor([[3.0, 2.0, 0.0, 2.0]], dtype=torch.float64)
    k = torch.tensor([[3.0, 2.0, 0.0, 2.0]], dtype=torch.float64)
    assert cr(q, k, 1, 0, 4).pairs.tolist() == [[1]]


def test_ties_go_to_the_lower_number():
    ones = torch.ones(1, D_HEAD, dtype=torch.float64)
    result = cr(ones, ones, 1, 2, 4)
    assert (result.pairs.tolist(), result.plain.tolist()) == ([[0]], [[4, 5]])


def test_all_dead_is_no_error():
    zeros = torch.zeros(2, D_HEAD, dtype=torch.float64)
    result = cr(zeros, zeros, 2, 0, D_HEAD)
    assert result.pairs.tolist() == [[0, 1], [0, 1]]
    assert result.error == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_not_finite_is_refused(which, bad):
    energies = [energy(heads(9, 2)), energy(heads(10, 2))]
    energies[which][1, 3] = bad
    with pytest.raises(NotPositiveDefiniteError, match=("query", "key")[which]):
        cr(*energies, 2, 0, D_HEAD)


def test_huge_and_tiny_heads_are_judged_apart():
    # The choice is by head, so scaling one head changes nothing in another, nor in itself.
    q, k = normal(11, 2, D_HEAD).square(), normal(12, 2, D_HEAD).square()
    scale = torch.tensor([[2.0**60], [2.0**-60]], dtype=torch.float64)
    assert torch.equal(cr(scale * q, scale * k, 2, 0, D_HEAD).pairs, cr(q, k, 2, 0, D_HEAD).pairs)
