"""What only a CUDA device can show."""

import copy
import math

import pytest
import timm
import torch
import torch.distributed as dist
from conftest import RandomImages, WaitCounter
from reproduction.source_task import CLASSES, SourceTask
from test_batches import folder as photos  # noqa: F401
from test_batches import images
from test_jpeg import JPEGS
from torch.nn.functional import cross_entropy

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, apply_entame, fold_entame, inspect_head
from entame_hf.data.batches import batch_loader
from entame_hf.layers import ZNorm
from entame_hf.layers.statistics import batch_statistics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_seed_gives_the_same_head_on_every_device():
    def head(device):
        model = timm.create_model("test_resnet", num_classes=10).to(device)
        return apply_entame(model, generator=torch.Generator().manual_seed(3)).fc.weight.cpu()

    assert torch.equal(head("cpu"), head("cuda"))


def test_a_rebuilt_head_stays_on_the_device_in_its_dtype():
    model = timm.create_model("test_resnet").to("cuda", torch.bfloat16)
    apply_entame(model, num_labels=7)
    assert model.fc.weight.device.type == model.fc.znorm.mean.device.type == "cuda"
    assert model.fc.weight.dtype == torch.bfloat16
    assert model.fc.znorm.mean.dtype == torch.float32
    assert model(torch.randn(8, 3, 32, 32, device="cuda", dtype=torch.bfloat16)).shape == (8, 7)


# The loss itself is in half precision there: bfloat16 has steps of 1/64 at ln 10.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)], ids=str)
def test_step_0_under_autocast(dtype, tolerance):
    model = apply_entame(timm.create_model("test_resnet", num_classes=10).cuda()).train()
    with torch.autocast("cuda", dtype):
        loss = cross_entropy(model(torch.randn(64, 3, 32, 32, device="cuda")), torch.arange(64, device="cuda") % 10)
    assert loss.item() == pytest.approx(math.log(10), abs=tolerance)


def test_z_norm_agrees_with_the_cpu():
    torch.manual_seed(0)
    x = (400 * torch.randn(256, 2048)).half()
    on_cpu, on_gpu = ZNorm(2048).train(), ZNorm(2048, device="cuda").train()
    torch.testing.assert_close(on_gpu(x.cuda()).cpu(), on_cpu(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(on_gpu.var.cpu(), on_cpu.var, rtol=1e-4, atol=1e-3)


def test_z_norm_waits_for_nothing():
    """No value travels to the host, nor where statistics are those of several processes."""
    layer, x = ZNorm(512, device="cuda").train(), torch.randn(64, 512, device="cuda", requires_grad=True)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
        batch_statistics(x, -1, sync=True).var.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_training_and_folding(tmp_path, precision):
    args = EntameTrainingArguments(
        str(tmp_path),
        max_steps=30,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        fp16=precision == "fp16",
        bf16=precision == "bf16",
        save_strategy="no",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    data = RandomImages(256)
    trainer = EntameTrainer(timm.create_model("test_resnet", num_classes=10), args, train_dataset=data)
    trainer.train()
    losses = [entry["energy/entropy"] for entry in trainer.state.log_history if "energy/entropy" in entry]
    assert losses[0] == pytest.approx(math.log(10), abs=1e-3)
    # Without accelerate's autocast around the forward.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()
    images = data.images[:16].cuda()
    with torch.no_grad():
        expected = model(images).logits
        torch.testing.assert_close(fold_entame(copy.deepcopy(model))(images).logits, expected, rtol=1e-3, atol=1e-4)
    assert cross_entropy(expected, data.labels[:16].cuda()) < math.log(10)


def test_compiles_without_a_graph_break_or_a_recompile_for_the_last_batch():
    torch._dynamo.reset()
    model = apply_entame(timm.create_model("test_vit", num_classes=10, img_size=32).cuda(), EntameConfig()).train()
    compiled = torch.compile(model, fullgraph=True)
    for count in (64, 64, 17, 23):
        compiled(torch.randn(count, 3, 32, 32, device="cuda")).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(torch.randn(31, 3, 32, 32, device="cuda")).sum().backward()


def test_synchronised_batch_normalisation_beside_it():
    torch.manual_seed(0)
    model = apply_entame(timm.create_model("test_resnet", num_classes=10).cuda(), EntameConfig()).train()
    twin = copy.deepcopy(model)
    images = torch.randn(32, 3, 32, 32, device="cuda")
    for each in (torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), twin):
        cross_entropy(each(images), torch.arange(32, device="cuda") % 10).backward()
    torch.testing.assert_close(model.fc.znorm.mean, twin.fc.znorm.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.fc.weight.grad, twin.fc.weight.grad, rtol=1e-3, atol=1e-5)


def measured(folder, *callbacks, **changes):
    args = EntameTrainingArguments(
        str(folder),
        per_device_train_batch_size=64,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **{"entame_method": "base", "max_steps": 6, **changes},
    )
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10)
    trainer = EntameTrainer(model, args, train_dataset=RandomImages(64), callbacks=list(callbacks))
    trainer.train()
    return [
        {name: value for name, value in entry.items() if name.startswith("energy/")}
        for entry in trainer.state.log_history
        if "energy/total" in entry
    ]


def test_steps_that_are_not_measured_wait_for_nothing_more(tmp_path):
    def waits(steps):
        counter = WaitCounter()
        logged = measured(tmp_path, counter, energy_logging_steps=steps)
        return len(logged), counter.count

    waits(0)  # What is done once for all.
    off, on = waits(0), waits(1)
    assert (off[0], on[0]) == (0, 1)
    # Trainer itself reads the loss of every step, so that the count is known to count.
    assert on[1] == off[1] > 0


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_energies_in_half_precision_are_those_in_full(tmp_path, precision):
    """fp16 scales the loss by 65,536, which is taken out again."""
    changes = {"max_steps": 1, "energy_logging_steps": 1}
    (full,) = measured(tmp_path, **changes)
    (half,) = measured(tmp_path, **changes, **{precision: True})
    names = {"total", "noise_share", "features", "feature_var", "grad_norm_backbone", "grad_norm_head"}
    if precision == "fp16":
        # The backbone's gradient overflows at that scale, which the scaler takes back later: it is left out.
        names.remove("grad_norm_backbone")
        assert "energy/grad_norm_backbone" not in half
    for name in names:
        assert half[f"energy/{name}"] == pytest.approx(full[f"energy/{name}"], rel=0.1), name


def test_inspecting_a_model_on_the_gpu():
    torch.manual_seed(0)
    model, data = timm.create_model("test_resnet", num_classes=10), RandomImages(64)
    on_cpu = inspect_head(model, [(data.images, data.labels)]).methods
    state = torch.cuda.get_rng_state()
    on_gpu = inspect_head(model.cuda(), [(data.images, data.labels)]).methods
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for method, start in on_cpu.items():
        assert vars(on_gpu[method]) == pytest.approx(vars(start), rel=2e-2, abs=1e-6), method
    half = inspect_head(model.half(), [(data.images, data.labels)]).methods
    assert half["base"].features == pytest.approx(on_cpu["base"].features, rel=0.1)


@pytest.mark.parametrize("augmentation", ["none", "flip", "random_resized_crop", "randaugment"])
def test_batches_are_those_of_the_cpu(photos, augmentation, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    cuda, rows = torch.device("cuda"), list(range(60))
    expected = images(photos, augmentation, cache_gb=0)
    expected = expected.finish(expected.read(rows))
    data = images(photos, augmentation)
    # Half of the files are JPEGs, which nvJPEG decodes a little differently; afterwards all are in the cache.
    first, again = (next(iter(batch_loader(data, 60, cuda))).to(cuda) for _ in range(2))
    assert torch.equal(first["pixel_values"], again["pixel_values"])
    assert torch.equal(first["labels"].cpu(), expected["labels"])
    difference = (first["pixel_values"].cpu() - expected["pixel_values"]).abs()
    assert difference.mean() < 3 * 2 / 255
    pngs = torch.tensor([path["path"].endswith("png") for path in data.dataset["image"]])
    assert difference[pngs].mean() < 0.5 * 2 / 255


def test_what_a_gpu_cannot_decode_is_decoded_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for i, (name, data) in enumerate(JPEGS.items()):
        path = tmp_path / "photos" / str(i % 2) / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    data = images(tmp_path / "photos", "none")
    rows = list(range(len(data)))
    on_gpu = data.read(rows, device=torch.device("cuda"))
    on_cpu = images(tmp_path / "photos", "none", cache_gb=0).read(rows)
    assert torch.equal(on_gpu.ratios, on_cpu.ratios)
    pixels = on_gpu.pixels_on(torch.device("cuda")).cpu()
    assert (pixels.int() - on_cpu.pixels.int()).abs().float().mean() < 6


def test_images_of_the_source_task_are_drawn_on_the_device_and_learnt(tmp_path):
    task, device = SourceTask(64 * 200), torch.device("cuda")
    batches = [task.finish(task.read(list(range(100)), 0, device), device) for _ in range(2)]
    assert torch.equal(batches[0]["pixel_values"], batches[1]["pixel_values"])
    assert batches[0]["pixel_values"].device.type == "cuda"
    torch.manual_seed(0)
    args = EntameTrainingArguments(
        tmp_path,
        entame_method="keep",
        max_steps=200,
        per_device_train_batch_size=64,
        learning_rate=1e-2,
        bf16=True,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
    )
    model = timm.create_model("test_resnet", num_classes=CLASSES)
    trainer = EntameTrainer(model, args, train_dataset=task)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    # It begins at ln 100 = 4.6.
    assert losses[-1] < 4


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_measured_head_rate(tmp_path, precision, optimizer):
    """A step that the scaler of fp16 skips has been measured all the same, and the schedule continues."""

    def run(**changes):
        args = EntameTrainingArguments(
            str(tmp_path),
            recipe="recommended",
            optim=optimizer,
            max_steps=6,
            per_device_train_batch_size=64,
            lr_scheduler_type="cosine",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **changes,
        )
        torch.manual_seed(0)
        model = timm.create_model("test_resnet", num_classes=10)
        trainer = EntameTrainer(model, args, train_dataset=RandomImages(64))
        trainer.train()
        return trainer, [entry["head_lr"] for entry in trainer.state.log_history if "head_lr" in entry]

    _, full = run()
    trainer, measured_rates = run(**{precision: True})
    assert measured_rates == pytest.approx(full, rel=5e-2)
    base, head = trainer.optimizer.param_groups[0], trainer.optimizer.param_groups[-1]
    assert head["initial_lr"] == measured_rates[0]
    assert head["lr"] * base["initial_lr"] == pytest.approx(base["lr"] * head["initial_lr"])
