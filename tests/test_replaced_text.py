"""Coverage windows: copies of calibration windows with strange words."""

import pytest
import torch

from modegpt.replaced_text import REPLACED, replace_tokens


def problem(samples: int = 40, seq_len: int = 50) -> torch.Tensor:
    # Only the lower half of the vocabulary stands in the text.
    return torch.randint(500, (samples, seq_len), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("count", [0, 1, 10, 11, 40])
def test_copies_are_of_evenly_spaced_windows(count: int):
    windows = problem()
    copies = replace_tokens(windows, count, None, 1000, seed=0)
    assert copies.shape == (count, 50)
    assert copies.dtype == windows.dtype
    sources = [index * 40 // count for index in range(count)]
    # The windows are drawn at random, so that only a copy agrees with its source in most places.
    assert bool(((copies == windows[sources]).float().mean(1) > 0.4).all())


def test_a_share_of_the_tokens_becomes_any_of_the_vocabulary():
    windows = problem(400)
    copies = replace_tokens(windows, 400, None, 1000, seed=0)
    changed = copies != windows
    # 20,000 draws: the standard deviation of a share of 0.3 is 0.003. One token in a thousand is drawn again.
    assert changed.float().mean() == pytest.approx(REPLACED, abs=0.015)
    drawn = copies[changed]
    assert (drawn >= 500).float().mean() == pytest.approx(0.5, abs=0.03)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < 1000
    assert len(drawn.unique()) > 950  # of 1000, six draws each: 2 or 3 are missed on average
    assert bool((changed.float().mean(1) < 0.7).all())  # every copy keeps its context


def test_the_seed_decides_and_input_and_global_state_are_left_alone():
    windows = problem()
    before, state = windows.clone(), torch.get_rng_state()
    first, again, other = (replace_tokens(windows, 20, None, 1000, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(windows, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_token_that_begins_every_window_stays():
    windows = torch.cat((torch.full((40, 1), 7), torch.zeros(40, 9, dtype=torch.long)), dim=1)
    copies = replace_tokens(windows, 40, 7, 1000, 0)
    assert (copies[:, 0] == 7).all()
    assert (copies[:, 1:] != 0).any()
