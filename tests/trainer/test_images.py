"""Samples with images, trained beside samples of text: each as HF's own forward computes it alone."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Idefics3Config, LlamaForCausalLM

from pellucid.checks.verify.gradients import difference
from pellucid.config import ModelConfig, TrainerRunConfig
from pellucid.data import TokenTable, TrainingSample
from pellucid.data.images import ImagePrompt, ImageShape
from pellucid.data.tokenizer import load_tokenizer
from pellucid.errors import ConfigError, DataError, ModelError, PayloadError
from pellucid.ledger import Journal, Stage, read_journal
from pellucid.model import ExpertRecorder, ImageInputs, Policy, load_policy, packed_layout, proof
from pellucid.model.tiny import make_tiny_vision_model
from pellucid.orchestrator.chat import ChatTemplate
from pellucid.orchestrator.snapshot import Snapshot, write_snapshot
from pellucid.packing import pack_batch
from pellucid.trainer.batches import OrchestratorBatches, open_batches
from pellucid.trainer.build import build_run, check_way
from pellucid.trainer.loop import accumulate, train
from pellucid.trainer.step import ModelShape
from pellucid.transport import Batch, FilesystemSender, MemoryChannel, decode_batch, encode_batch
from pellucid.transport.sections import Limits
from pictures import hf_logprobs, pixels, sample_of, sampled, user
from tolerance import gradient_bound, near_logprobs

SHAPE = ImageShape(token_id=101, patch_size=8, scale_factor=2)


def settings(weights, folder, lora=None, **trainer) -> TrainerRunConfig:
    values = {"threads": 1, "optim": {"lr": 1e-3}, "experimental": {"token_export": {}}}
    described = {"name": str(weights)} | ({} if lora is None else {"lora": lora})
    return TrainerRunConfig.model_validate(
        {
            "output_dir": folder,
            "max_steps": 1,
            "seq_len": 128,
            "model": described,
            "trainer": values | trainer,
        }
    )


@pytest.fixture(scope="module")
def policy(vision_model):
    return load_policy(ModelConfig(name=str(vision_model)), trainable=True, max_length=128)


@pytest.fixture(scope="module")
def samples(policy, vision_model):
    """A group of two with one picture, text, a sample with two pictures, text: drawn by the engine."""
    chat = ChatTemplate(load_tokenizer(str(vision_model)))
    conversations = [
        user(pixels(0), "how many?"),
        user(pixels(0), "how many?"),
        user("how many?"),
        user("first", pixels(1), "second", pixels(2), "?"),
        user("another one"),
    ]
    prompts, completions = sampled(policy, chat, conversations)
    return [sample_of(*pair, index) for index, pair in enumerate(zip(prompts, completions, strict=True))]


def as_mode(samples, mode):
    return [
        TrainingSample.from_packed(each.arrays, {**each.values, "training_mode": mode}) for each in samples
    ]


def opened(config, table, journal=None):
    channel = MemoryChannel()
    channel.send(0, encode_batch(Batch("run", 0, table)))
    return build_run(config, OrchestratorBatches(channel), journal, [])


def trained(config, table):
    """The step's micro batches, the trainer's logprobs of each, and the gradients, before the optimizer."""
    run = opened(config, table)
    try:
        batch = run.next_batch(0)
        micro_batches = list(batch.micro_batches)
        with torch.no_grad():
            logprobs = [run.forward(each).logprobs for each in micro_batches]
        accumulate(run, batch)
    finally:
        run.close()
    return run, micro_batches, logprobs, {name: each.grad for name, each in run.policy.named_parameters()}


@pytest.mark.parametrize("layout", ["auto", "rows"])
def test_logprobs_and_gradients_are_those_of_each_sample_alone(
    vision_model, samples, policy, tmp_path, layout
) -> None:
    table = TokenTable.from_samples(as_mode(samples, "sft"))
    config = settings(vision_model, tmp_path, model={"layout": layout})
    run, micro_batches, logprobs, gradients = trained(config, table)
    assert run.policy.way == ("rows" if layout == "rows" else "packed")
    assert sorted(sorted(each.packed.indices) for each in micro_batches) == [[0], [1], [2, 4], [3]]
    reference = load_policy(ModelConfig(name=str(vision_model)), trainable=True, max_length=128)
    loss = torch.zeros(())
    for micro_batch, found in zip(micro_batches, logprobs, strict=True):
        start = 0
        for index in micro_batch.packed.indices:
            sample = samples[index]
            alone = hf_logprobs(reference, sample)
            own = found[start + 1 : start + sample.length]
            assert own == near_logprobs(alone, policy, sample.length), f"sample {index}"
            sampled_logprobs = sample.arrays["inference_logprobs"].array()
            assert sampled_logprobs == near_logprobs(alone[-sample.num_sampled :], policy, sample.length)
            loss = loss - alone[-sample.num_sampled :].sum()
            start += sample.length
    (loss / table.num_trainable).backward()
    expected = {name: each.grad for name, each in reference.named_parameters()}
    vision = [name for name in gradients if "vision_model" in name or "connector" in name]
    assert all(gradients[name].abs().max() > 0 for name in vision if "k_proj.bias" not in name)
    assert difference(gradients, expected) <= gradient_bound(policy, table.num_tokens)


def test_a_pixel_changes_logprobs(samples, policy, vision_model) -> None:
    """Of the last pixel's last channel, by one of 255: the smallest change that there is."""
    chat = ChatTemplate(load_tokenizer(str(vision_model)))
    changed = pixels(0)
    changed[-1, -1, -1] ^= 1
    completion = sampled(policy, chat, [user(pixels(0), "?")])[1][0]
    prompts = [chat.prompt(user(each, "?")).token_ids for each in (pixels(0), changed)]
    assert list(prompts[0]) == list(prompts[1])
    found = []
    for prompt in prompts:
        sample = sample_of(prompt, completion)
        batch = pack_batch(TokenTable.from_samples([sample]), seq_len=128, max_tokens=128)
        assert [each.kind.is_multimodal for each in batch.micro_batches(0)] == [True]
        with torch.no_grad():
            found.append(hf_logprobs(policy, sample)[-sample.num_sampled :].double())
    engines = [sampled(policy, chat, [user(each, "?")])[1][0].logprobs[0] for each in (pixels(0), changed)]
    assert engines[0] != engines[1] and not torch.equal(*found)
    # Both ways see the same change, to half of its size: it is not much larger than rounding.
    change = float(found[1][0] - found[0][0])
    assert engines[1] - engines[0] == pytest.approx(change, rel=0.5)


def changed(sample, **values):
    return TrainingSample.build(**{**sample.arrays, **sample.values, **values})


def wrong_samples(samples):
    """Each with what is wrong about it."""
    image, two = samples[0], samples[3]
    types = image.arrays["mm_token_type_ids"].array()
    return {
        "holds images of 8 tokens, and 4 tokens": changed(image, mm_tensors=two.values["mm_tensors"]),
        "holds images of 4 tokens, and 5 tokens": changed(
            image, mm_token_type_ids=np.maximum(types, np.arange(len(types)) == 1)
        ),
        "is no safetensors payload": changed(image, mm_token_type_ids=types, mm_tensors=b""),
        "holds images of 4 tokens, and 0 tokens": changed(image, mm_token_type_ids=np.zeros_like(types)),
        "mm_token_type_ids holds 2; 1 is an image": changed(image, mm_token_type_ids=2 * types),
    }


@pytest.mark.parametrize("index", range(5))
def test_images_that_do_not_fill_their_places_are_refused(vision_model, samples, tmp_path, index) -> None:
    """When they come off the wire, and where a transport does not look, before they are trained."""
    message, wrong = list(wrong_samples(samples).items())[index]
    table = TokenTable.from_samples([samples[2], wrong])
    named = message if "holds 2" in message else f"mm_tensors of sample s0 {message}"
    with pytest.raises(PayloadError, match=re.escape(f"sequence 1: {named}")):
        decode_batch(encode_batch(Batch("run", 0, table)), sender="me", limits=Limits(images=SHAPE))
    run = opened(settings(vision_model, tmp_path), table)
    try:
        with pytest.raises(DataError, match=re.escape(f"sequence 1: {named}")):
            run.next_batch(0)
    finally:
        run.close()


def test_samples_arrive_with_their_images(vision_model, samples, tmp_path) -> None:
    table = TokenTable.from_samples(samples)
    payload = encode_batch(Batch("run", 0, table))
    found = decode_batch(payload, sender="me", limits=Limits(images=SHAPE)).table
    assert found["mm_tensors"].tolist() == [each.values.get("mm_tensors", b"") for each in samples]
    assert found["mm_token_type_ids"].sum() == 4 + 4 + 8
    with pytest.raises(PayloadError, match="train a model of idefics3 or smolvlm"):
        decode_batch(payload, sender="me", limits=Limits(text_only=True))
    FilesystemSender(tmp_path).send(0, payload)
    received = open_batches(settings(vision_model, tmp_path)).receive(0)
    assert received.table["mm_tensors"][3] == samples[3].values["mm_tensors"]


@pytest.mark.parametrize("num_places", [0, 5])
def test_a_sample_that_is_cut_off_in_an_image_keeps_the_rest_of_it(
    vision_model, samples, policy, tmp_path, num_places
) -> None:
    """The first of its places have the embeddings that they have in the whole sample; there may be none."""
    config = settings(vision_model, tmp_path)
    whole = trained(config, TokenTable.from_samples([samples[3]]))[2][0]
    places = np.flatnonzero(samples[3].arrays["mm_token_type_ids"].array())
    stop = int(places[num_places])
    cut = config.model_copy(update={"output_dir": tmp_path / "cut"})
    cut = cut.model_copy(
        update={
            "trainer": cut.trainer.model_copy(
                update={"model": cut.trainer.model.model_copy(update={"seq_len": stop})}
            )
        }
    )
    run = opened(cut, TokenTable.from_samples([samples[3]]))
    try:
        (micro_batch,) = run.next_batch(0).micro_batches
        assert micro_batch.table.num_tokens == stop
        with torch.no_grad():
            found = run.forward(micro_batch).logprobs
    finally:
        run.close()
    assert found[1:stop] == near_logprobs(whole[1:stop], policy, stop)


def test_a_tile_that_transformers_leaves_out_does_not_shift_the_others(policy) -> None:
    """Of a sequence that was cut off there are places enough for what is left: the tiles are counted."""
    pixel_values = torch.ones(2, 3, 32, 32)
    pixel_values[0] = 0
    ids, places = torch.full((6,), SHAPE.token_id), torch.arange(1, 5)
    with pytest.raises(ModelError, match="makes 4 embeddings of images of 8 tokens, in the place of 4"):
        policy.embed(ids, ImageInputs([places], [pixel_values]))
    with pytest.raises(ModelError, match="makes 4 embeddings of images of 4 tokens, in the place of 6"):
        policy.embed(ids, ImageInputs([torch.arange(6)], [pixel_values[1:]]))


def test_replayed_experts_see_the_images(vision_model, policy, tmp_path, samples) -> None:
    """An Idefics3 whose language model has experts: replaying its own choice changes not a bit."""
    make_tiny_vision_model(tmp_path, hidden_size=32, family="Idefics3")
    config = AutoConfig.from_pretrained(tmp_path).to_dict()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    config["text_config"] |= {"model_type": "qwen3_moe", **experts}
    hf = AutoModelForImageTextToText.from_config(Idefics3Config.from_dict(config))
    hf.save_pretrained(tmp_path)
    mixture = load_policy(ModelConfig(name=str(tmp_path)), trainable=True, max_length=128)
    recorder = ExpertRecorder(mixture.hf)
    ids = torch.from_numpy(samples[0].arrays["token_ids"].array().astype(np.int64))
    places = np.flatnonzero(samples[0].arrays["mm_token_type_ids"].array())
    images, other = (
        ImageInputs.of([(places, each.values["mm_tensors"])], policy.device)
        for each in (samples[0], sample_with(vision_model, policy, 7))
    )
    inputs = ids, torch.arange(len(ids)), torch.ones(len(ids)), packed_layout([len(ids)])
    with torch.no_grad():
        expected = mixture(*inputs, images=images)
        chosen = recorder.last()
        mixture.replay_experts()
        found = mixture(*inputs, chosen, images=images)
        of_other = mixture(*inputs, chosen, images=other)
    assert torch.equal(found.logprobs, expected.logprobs) and not found.replaced.any()
    assert not torch.equal(of_other.logprobs, expected.logprobs)


def test_the_vision_tower_is_not_counted_as_work_of_every_token(policy) -> None:
    text = LlamaForCausalLM(policy.hf.config.text_config)
    assert ModelShape.of(policy).num_active == ModelShape.of(Policy(text)).num_active


def test_a_resumed_run_ends_with_the_same_weights(vision_model, samples, tmp_path) -> None:
    tables = [TokenTable.from_samples(each) for each in (samples[:3], samples[2:], samples[1:4])]
    results = []
    for name, stops in (("whole", [3]), ("resumed", [2, 3])):
        folder = tmp_path / name
        for step, table in enumerate(tables):
            FilesystemSender(folder).send(step, encode_batch(Batch("run", step, table)))
        write_snapshot(folder, Snapshot(batches_sent=3))
        for number, stop in enumerate(stops):
            config = settings(vision_model, folder, ckpt={"interval": 1}).model_copy(
                update={"max_steps": stop, "resume": number > 0}
            )
            journal = Journal(folder / "ledger" / "trainer.jsonl", Stage.TRAINER, resume=number > 0)
            run = build_run(config, OrchestratorBatches(open_batches(config)), journal, [], publishes=True)
            try:
                if number:
                    run.restore()
                train(run)
            finally:
                run.close()
        results.append({name: each.detach() for name, each in run.policy.named_parameters()})
        states = [entry for entry in read_journal(folder / "ledger" / "trainer.jsonl")]
        assert len(states) > 0
    assert all(torch.equal(*pair) for pair in zip(results[0].values(), results[1].values(), strict=True))
    exported = [
        json.loads(line)
        for line in (folder / "token_exports" / "step_1" / "rank_0.jsonl").read_text().splitlines()
    ]
    found = {each["sample_id"]: each["mm_token_type_ids"] for each in exported}
    assert found.keys() == {"s2", "s3", "s4"}
    assert found["s3"] == samples[3].arrays["mm_token_type_ids"].array().tolist()
    assert not np.any([0 if each is None else each for each in found["s2"] or [0]])
    loaded = load_policy(ModelConfig(name=str(folder / "model")))
    assert loaded.images == SHAPE
    assert ChatTemplate(load_tokenizer(str(folder / "model"))).prompt(user(pixels(0), "?")).token_ids


def test_an_adapter_learns_from_images(vision_model, samples, policy, tmp_path) -> None:
    """New, it changes nothing; its gradient depends on the picture, and the vision tower has none."""
    lora = {"rank": 4, "alpha": 8.0}
    other = changed(samples[0], mm_tensors=sample_with(vision_model, policy, 7).values["mm_tensors"])
    results = []
    for index, sample in enumerate((samples[0], other)):
        config = settings(vision_model, tmp_path / str(index), lora)
        _, _, (logprobs,), gradients = trained(config, TokenTable.from_samples([sample]))
        alone = hf_logprobs(load_policy(ModelConfig(name=str(vision_model))), sample)
        assert logprobs[1:] == near_logprobs(alone, policy, sample.length)
        results.append({name: each for name, each in gradients.items() if each is not None})
    assert all(".text_model.layers." in name and ".lora_" in name for name in results[0])
    moved = difference(*results)
    assert moved > 100 * gradient_bound(policy, samples[0].length)


def sample_with(vision_model, policy, seed):
    chat = ChatTemplate(load_tokenizer(str(vision_model)))
    prompts, completions = sampled(policy, chat, [user(pixels(seed), "how many?")])
    assert isinstance(prompts[0], ImagePrompt)
    return sample_of(prompts[0], completions[0])


def test_bfloat16_trains_on_images(vision_model, samples, policy, tmp_path) -> None:
    config = settings(vision_model, tmp_path, model={"precision": "bfloat16"})
    _, _, (logprobs,), gradients = trained(config, TokenTable.from_samples([samples[0]]))
    alone = hf_logprobs(policy, samples[0]).detach()
    gap = float((logprobs[1:] - alone).abs().max())
    assert 0 < gap <= 256 * torch.finfo(torch.bfloat16).eps  # layers, and logits of about 5
    assert all(each.dtype == torch.float32 for each in gradients.values() if each is not None)


def test_what_is_not_proven_for_images_is_refused(vision_model, tmp_path) -> None:
    table = TokenTable.from_samples([TrainingSample.from_turn([5], [6], [-4.0], env_name="a")])
    with pytest.raises(ConfigError, match="compile = true is not proven for models with images"):
        opened(settings(vision_model, tmp_path, model={"compile": True}), table)
    policy = load_policy(ModelConfig(name=str(vision_model)))
    policy.go_in_rows("its layers keep a state")
    with pytest.raises(ConfigError, match="cp = 2 needs packed sequences"):
        check_way(policy, settings(vision_model, tmp_path).trainer.model.model_copy(update={"cp": 2}))


@pytest.mark.parametrize("family", ["SmolVLM", "Idefics3"])
def test_every_family_is_proven_with_an_image_at_load(tmp_path, family, monkeypatch) -> None:
    make_tiny_vision_model(tmp_path, hidden_size=32, family=family)
    policy = load_policy(ModelConfig(name=str(tmp_path)), max_length=64)
    assert (policy.way, policy.images) == ("packed", SHAPE)
    embed = type(policy).embed
    monkeypatch.setattr(type(policy), "embed", lambda self, ids, images: embed(self, ids, images).flip(0))
    with pytest.raises(ModelError, match="a sequence with an image has other logprobs than HF's own"):
        proof.prove(policy, 64)


def test_other_families_with_images_are_refused_with_those_that_train(tmp_path) -> None:
    """Named before any weights are read, which the folder does not have."""
    from transformers import Qwen2_5_VLConfig

    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="of those with images, idefics3 and smolvlm .* are trained"):
        load_policy(ModelConfig(name=str(tmp_path)))
