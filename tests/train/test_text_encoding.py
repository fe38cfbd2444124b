"""Rows that keep the ids of their texts' tokens: trainings and evaluations see what rows that keep features show."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddm_ray.config import load_recipe
from ddm_ray.core.condition import Text, TextIds
from ddm_ray.data.loading.loader import Loader, load_rows
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.text_encoding import StoredTexts
from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import expert, shard
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from ddm_ray.train.batches import RankBatches
from ddm_ray.train.heldout import LOSSES, HeldoutLoss
from ddm_ray.train.job import train_job
from ddm_ray.train.trial import trial
from ddm_ray.train.worker import train
from tests.pretend_streams import pretended
from tests.sampling import tiny_components
from tests.train.results import curve_of
from tests.train.test_gpu_step import move

pytestmark = pytest.mark.contract

FP16 = 2.0**-10
"""Relative precision of the features that rows keep."""
EXPERT = expert(0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Two runs of the same pictures and captions, partitioned, by what their rows keep of a text."""
    root = tmp_path_factory.mktemp("texts")
    for name in ("clip", "pooled"):
        tiny_components.text_model().save_pretrained(root / name)
        tiny_components.tokenizer(root / name).save_pretrained(root / name)
    return {stored: made(root, stored) for stored in ("features", "ids")}


def made(root: Path, stored: str) -> Run:
    dim = tiny_components.TEXT_DIM
    text = f"{{encoder: {root}/clip, tokens: 6, dim: {dim}, pooled_dim: {dim}, pooled_encoder: {root}/pooled}}"
    settings = (
        f"data={{source: 'shapes:120', image_size: 8, channels: 3, heldout: 0.3, text: {text}}}",
        f"data.text.stored={stored}",
        "embedder={kind: pixels, dim: 4}",
        "partition={num_clusters: 2, num_fine: 8}",
        "expert.model={patch_size: 4, width: 16, depth: 1, heads: 2}",
        "router.model={patch_size: 4, width: 16, depth: 1, heads: 2}",
        "expert.train={steps: 40, batch: 8, learning_rate: 1.0e-2, ema_decay: 0.5, condition_dropout: 0.3}",
        "evaluate.clip=null",
    )
    run = Run.create(str(root / stored), load_recipe("laion256-k8", ("data.latents=null", *settings)))
    prepare(run, execute=serial)
    partition(run, with_report=False)
    return run


def conditions(run: Run, device: torch.device, step: int = 1) -> tuple[Text, Text]:
    """Those of a step of an expert's training, and the null one."""
    job = train_job(run, EXPERT)
    with Loader(run, job.shards, job.train.seed, job.batch) as loader:
        assert loader.null_text is not None
        texts = StoredTexts.of(run, job.shards[0], device)
        assert (texts is None) is (run.config.data.text is not None and run.config.data.text.stored == "features")
        ((batch, _),) = RankBatches(job, loader, 0, 1, job.batch, texts=texts).at(step, device, most=1)
        assert isinstance(batch.encoded, Text)
        return batch.encoded, loader.null_text


def assert_as_stored(text: Text, stored: Text, tolerance: float = FP16) -> None:
    def close(own: Tensor | None, theirs: Tensor | None) -> None:
        assert own is not None and theirs is not None
        torch.testing.assert_close(own, theirs, rtol=tolerance, atol=tolerance)

    assert torch.equal(text.mask_BL, stored.mask_BL)
    close(text.tokens_BLE, stored.tokens_BLE)
    close(text.pooled_BP, stored.pooled_BP)


def texts_of(run: Run) -> StoredTexts:
    texts = StoredTexts.of(run, shard(0), "cpu")
    assert texts is not None
    return texts


def first_ids(run: Run) -> TextIds:
    """Of a few rows, one of which is dropped."""
    with Loader(run, [shard(0)], 0, 4) as loader:
        ids = loader.batch(0, torch.arange(4)).condition
    assert isinstance(ids, TextIds)
    return replace(ids, dropped_B=torch.tensor([False, True, False, False]))


def test_trainings_and_evaluations_see_the_texts_that_features_show(runs: dict[str, Run]) -> None:
    (stored, null), (text, _) = (conditions(runs[kind], torch.device("cpu")) for kind in ("features", "ids"))
    assert_as_stored(text, stored)
    assert len({*stored.mask_BL.sum(1).tolist()}) > 1, "texts of different lengths"
    dropped_B = (text.tokens_BLE == null.tokens_BLE).flatten(1).all(1)
    assert 0 < dropped_B.sum() < len(dropped_B)
    assert torch.equal(dropped_B, (stored.tokens_BLE == null.tokens_BLE).flatten(1).all(1))
    both = [load_rows(runs[kind], [shard(0), shard(1)]) for kind in ("features", "ids")]
    assert both[0].ids == both[1].ids and both[0].captions == both[1].captions
    assert both[0].text is not None and both[1].text is not None
    assert_as_stored(both[1].text, both[0].text)


def test_an_experts_training_is_that_of_features(runs: dict[str, Run], world_of_one: None, tmp_path: Path) -> None:
    """Its losses, held out too, are nearer to each other's than to those of a network that is shown no text."""
    shutil.copytree(runs["ids"].url, tmp_path / "null")
    every = {**runs, "null": Run.open(str(tmp_path / "null"))}
    for kind, run in every.items():
        with pytest.MonkeyPatch.context() as patch:
            if kind == "null":
                patch.setattr(StoredTexts, "__call__", lambda texts, ids: texts.null[torch.zeros(len(ids)).long()])
            train(run.url, EXPERT, TrainPlacement(heldout_rows=8))
    ids, features, null = (curve_of(every[kind], EXPERT) for kind in ("ids", "features", "null"))
    for name in ("loss", LOSSES):
        apart = (ids[name] - features[name]).abs().max()
        assert apart < 0.05 * (ids[name] - null[name]).abs().max(), name


def test_trial_steps_encode_as_a_training_does(
    runs: dict[str, Run], world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = list[int](), StoredTexts.__call__

    def counted(texts: StoredTexts, ids: TextIds) -> Text:
        encoded.append(len(ids))
        return encode(texts, ids)

    monkeypatch.setattr(StoredTexts, "__call__", counted)
    monkeypatch.setattr("ddm_ray.train.trial.SECONDS", 0.01)
    for kind, run in runs.items():
        encoded.clear()
        seconds, _ = trial(train_job(run, EXPERT), run.config.data, 2, TrainPlacement())
        assert seconds > 0
        assert ({*encoded} == {train_job(run, EXPERT).batch}) is (kind == "ids")


def on_meta(texts: StoredTexts) -> StoredTexts:
    for encoder in (texts.encoder, texts.encoder.pooled):
        assert encoder is not None
        move(encoder.model, torch.device("meta"))
    return replace(texts, null=texts.null.to("meta"))


def test_they_are_encoded_on_the_gpu_and_nobody_waits(runs: dict[str, Run]) -> None:
    ids = first_ids(runs["ids"])
    texts = texts_of(runs["ids"])
    expected = texts(ids)
    with pretended() as gpu:
        on_gpu, pinned = on_meta(texts), ids.pin_memory()
        gpu.waits.clear()
        text = on_gpu(pinned)
        assert text.tokens_BLE.device.type == "meta"
        assert not gpu.waits, gpu.waits
        back = text.to("cpu")
    assert_as_stored(back, expected, 1e-5)


def test_a_training_whose_heldout_ids_are_unknown_measures_nothing(runs: dict[str, Run], world_of_one: None) -> None:
    run, job = runs["ids"], train_job(runs["ids"], EXPERT)
    texts = texts_of(run)
    measuring, problem = HeldoutLoss.of(run, job, TrainPlacement(heldout_rows=8), 4, texts)
    assert measuring is not None and not problem
    texts.encoder.model.get_input_embeddings().num_embeddings = 1
    measuring, problem = HeldoutLoss.of(run, job, TrainPlacement(heldout_rows=8), 4, texts)
    assert measuring is None and "that the text encoder knows" in problem


def test_ids_of_an_unknown_encoder_are_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    shutil.copytree(runs["ids"].url, tmp_path / "run")
    run = Run.open(str(tmp_path / "run"))
    manifest = run.require(shard(0))
    path = Path(run.url) / shard(0) / NAME
    without = replace(manifest, info={**manifest.info, "networks": {}})
    path.write_bytes(without.to_json())
    (Path(run.url) / "partition" / NAME).unlink()
    with pytest.raises(CorruptArtifact, match="doesn't say which text encoder its ids are of"):
        StoredTexts.of(run, shard(0), "cpu")


def test_an_id_that_the_encoder_has_not_is_refused(runs: dict[str, Run]) -> None:
    texts = texts_of(runs["ids"])
    known: int = texts.encoder.model.get_input_embeddings().num_embeddings
    ids = texts.encoder.ids(["a circle"])
    assert ids.pooled is not None
    texts(ids)
    many_BL = torch.zeros(1, texts.encoder.tokens + 1, dtype=torch.int64)
    with pytest.raises(CorruptArtifact, match=f"has {many_BL.shape[1]} tokens of {texts.encoder.tokens} that"):
        texts(replace(ids, ids_BL=many_BL, mask_BL=many_BL == 0))
    for wrong in (known, -1):
        bad_BL = ids.ids_BL.clone()
        bad_BL[0, 1] = wrong
        for bad in (replace(ids, ids_BL=bad_BL), replace(ids, pooled=TextIds(bad_BL, ids.mask_BL))):
            with pytest.raises(CorruptArtifact, match=f"has token {wrong} of {known} that the text encoder knows"):
                texts(bad)


@pytest.mark.parametrize(("rank", "refused"), [("0", True), ("", True), ("1", False)])
def test_another_encoder_than_that_of_the_rows_is_refused_by_a_machines_first_rank(
    runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch, rank: str, refused: bool
) -> None:
    """Whose end is all ranks' end; each would read as many gigabytes again."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    run = runs["ids"]
    assert run.config.data.text is not None
    folder = Path(run.config.data.text.encoder)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    tiny_components.text_model(seed=5).save_pretrained(folder)
    try:
        with pytest.raises(DriftError, match="text encoder") if refused else nullcontext():
            conditions(run, torch.device("cpu"))
    finally:
        for name, data in kept.items():
            (folder / name).write_bytes(data)
