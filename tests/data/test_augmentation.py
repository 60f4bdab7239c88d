"""Augmentations are drawn for seed, epoch and row alone, and do what their names say."""

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate
from torchvision.transforms import v2

from entame_hf.data import AUGMENTATIONS, Augmentation
from entame_hf.data.augmentation import _random_boxes, draw_uniform
from entame_hf.data.resampling import crop_and_resize
from entame_hf.errors import InputError

ROWS = np.arange(64)


@pytest.fixture
def pixels() -> torch.Tensor:
    torch.manual_seed(0)
    small = torch.randint(0, 256, (64, 3, 6, 8), dtype=torch.uint8)
    return interpolate(small, (24, 32), mode="bilinear")


def augment(name, pixels, rows=ROWS, epoch=0, **kwargs):
    return Augmentation(name, **kwargs)(pixels, torch.full((len(pixels),), 1.2), tuple(pixels.shape[-2:]), rows, epoch)


def test_draws_are_uniform_and_independent():
    drawn = draw_uniform(0, 0, "a", np.arange(20_000), 4)
    assert drawn.dtype == np.float32
    assert 0 <= drawn.min() < 0.001
    assert 0.999 < drawn.max() < 1
    np.testing.assert_allclose(drawn.mean(0), 0.5, atol=0.01)
    np.testing.assert_allclose(drawn.var(0), 1 / 12, atol=0.002)
    others = [draw_uniform(1, 0, "a", np.arange(20_000), 1), draw_uniform(0, 1, "a", np.arange(20_000), 1)]
    others += [draw_uniform(0, 0, "b", np.arange(20_000), 1), drawn[1:, :1]]
    columns = np.concatenate([drawn[:-1], *(other[:19_999] for other in others)], axis=1)
    correlations = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlations).max() < 0.03


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_image_is_augmented_alike_in_every_batch(name, pixels):
    whole = augment(name, pixels)
    order = np.random.default_rng(0).permutation(64)
    parts = torch.cat([augment(name, pixels[order[i : i + 16]], ROWS[order[i : i + 16]]) for i in range(0, 64, 16)])
    torch.testing.assert_close(parts, whole[order], atol=1e-3, rtol=0)
    torch.manual_seed(123)
    assert torch.equal(augment(name, pixels), whole)
    for other in (augment(name, pixels, epoch=1), augment(name, pixels, seed=1)):
        assert torch.equal(other, whole) == (name == "none")


def test_half_of_the_images_are_flipped(pixels):
    given = augment("flip", pixels)
    flipped = [torch.equal(g, p.flip(-1)) for g, p in zip(given, pixels, strict=True)]
    kept = [torch.equal(g, p) for g, p in zip(given, pixels, strict=True)]
    assert all(f != k for f, k in zip(flipped, kept, strict=True))
    assert 20 < sum(flipped) < 44


def test_crops_are_distributed_as_torchvisions():
    image, ratios = torch.zeros(3, 120, 200), np.full(4000, 200 / 120, np.float32)
    boxes = _random_boxes(ratios, draw_uniform(0, 0, "crop", np.arange(4000), 22))
    torch.manual_seed(0)
    drawn = np.array([v2.RandomResizedCrop.make_params(v2.RandomResizedCrop(32), [image]) for _ in range(4000)])
    theirs = np.array([[d["top"] / 120, d["left"] / 200, d["height"] / 120, d["width"] / 200] for d in drawn])
    np.testing.assert_allclose(boxes.mean(0), theirs.mean(0), atol=0.02)
    np.testing.assert_allclose(boxes.std(0), theirs.std(0), atol=0.02)
    assert boxes.min() >= 0
    assert (boxes[:, :2] + boxes[:, 2:]).max() <= 1 + 1e-6


def test_a_crop_that_never_fits_is_the_middle():
    boxes = _random_boxes(np.array([10.0], np.float32), np.full((1, 22), 0.999, np.float32))
    np.testing.assert_allclose(boxes, [[0, (1 - 0.4 / 3) / 2, 1, 0.4 / 3]], rtol=1e-5)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(12, 40), (50, 20)], ids=str)
def test_a_box_is_resized_as_torch_resizes(pixels, filter, size):
    boxes = torch.tensor([[0.0, 0.0, 24.0, 32.0]]).expand(64, 4)
    expected = interpolate(pixels.float(), size, mode=filter, antialias=True)
    torch.testing.assert_close(crop_and_resize(pixels, boxes, size, filter), expected, atol=0.05, rtol=0)
    # A box of whole pixels gives the same as cutting first, away from its border.
    inner = crop_and_resize(pixels, torch.tensor([[4.0, 8.0, 12.0, 16.0]]).expand(64, 4), (12, 16), filter)
    torch.testing.assert_close(inner, pixels[:, :, 4:16, 8:24].float(), atol=1e-3, rtol=0)


def test_rand_augment_changes_most_images_and_keeps_bytes(pixels):
    given = augment("randaugment", pixels)
    assert given.dtype == torch.uint8
    flipped = augment("flip", pixels)
    changed = [not torch.equal(g, f) for g, f in zip(given, flipped, strict=True)]
    assert 40 < sum(changed) < 64


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0), (0, 1.0), (0.8, 1.0)], ids=["mixup", "cutmix", "both"])
def test_labels_are_mixed_as_pixels_are(mixup, cutmix):
    labels = torch.arange(64)
    # Every image is its own number: a mean over pixels tells who is in it.
    images = labels.float()[:, None, None, None].expand(64, 3, 16, 20)
    mixed, targets = Augmentation("none", mixup, cutmix).mix(images, labels, 64, ROWS, 0)
    torch.testing.assert_close(targets.sum(1), torch.ones(64))
    torch.testing.assert_close(mixed.mean((1, 2, 3)), targets @ labels.float(), atol=1e-4, rtol=1e-4)
    assert ((targets > 0).sum(1) <= 2).all()
    blended = [len(image[0].unique()) == 1 for image in mixed]
    if not cutmix:
        assert all(blended)
    elif not mixup:
        assert sum(blended) < 20
    else:
        assert 10 < sum(blended) < 54


@pytest.mark.parametrize("count", [1, 5])
def test_the_last_of_an_odd_number_stays_as_it_is(count):
    images, labels = torch.rand(count, 3, 8, 8), torch.arange(count)
    mixed, targets = Augmentation("none", 0.8).mix(images, labels, 5, ROWS[:count], 0)
    torch.testing.assert_close(mixed[-1], images[-1])
    torch.testing.assert_close(targets[-1], torch.eye(5)[count - 1])
    # Each of the others with its neighbour alone.
    assert (targets[:-1].flatten(1) > 0).sum() == 2 * (count - 1)


def test_shares_follow_the_beta_distribution():
    rows = np.arange(4000)
    labels = torch.arange(4000) % 2
    targets = Augmentation("none", 0.3).mix(torch.zeros(4000, 1, 1, 1), labels, 2, rows, 0)[1]
    own = targets[torch.arange(4000), labels]
    assert own.mean().item() == pytest.approx(0.5, abs=0.02)
    assert own.var().item() == pytest.approx(1 / (4 * (2 * 0.3 + 1)), abs=0.01)


BEYOND = [-1.0, 1e-100, 1e100, float("inf"), float("nan")]


@pytest.mark.parametrize(
    "arguments", [("blur",), *(("flip", a) for a in BEYOND), *(("flip", 0.0, a) for a in BEYOND)], ids=str
)
def test_what_cannot_be_is_named(arguments):
    with pytest.raises(InputError, match=r"`augmentation=blur` .*none, flip|`(mixup|cutmix)_alpha=.* must be 0"):
        Augmentation(*arguments)


@pytest.mark.parametrize("alpha", [1e-6, 1e6])
def test_shares_are_numbers_at_the_ends_of_what_is_allowed(alpha):
    for augmentation in (Augmentation("none", alpha), Augmentation("none", 0.0, alpha)):
        values, targets = augmentation.mix(torch.rand(64, 3, 8, 8), torch.arange(64) % 2, 2, ROWS, 0)
        assert values.isfinite().all()
        torch.testing.assert_close(targets.sum(1), torch.ones(64))


def test_randaugment_refuses_values_that_are_no_bytes(pixels):
    with pytest.raises(InputError, match=r"randaugment` .* gives float32 values: use `augmentation=flip`"):
        augment("randaugment", pixels.float())
