"""`tenure fit` of a model without a program: configurations, ranks, cards, and what is refused."""

import json
import os
import re
import subprocess
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

# private: the parts of `tenure fit`, of which a user sees the answer alone
from tenure._cli._fleet import answer
from tenure._cli._fleet._configured import Configured
from tenure._cli._fleet._setup import Setup, recipe
from tenure._cli._fleet._work import in_memory, making, shard
from tenure._torch.fake_ranks import fake_ranks
from tenure.adaptive import memory_budget, predict_peak
from tests.adaptive.ranks.launch import run_ranks
from tests.programs import main
from tests.true_peak import counted_bytes, step_of, true_peak_bytes

pytest.importorskip("transformers")
# before ranks are forked; the model takes seconds, too
from transformers import CONFIG_MAPPING, LlamaForCausalLM  # noqa: F401

MIB = 2**20
TEXT = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
}  # fmt: skip
IMAGES = {
    "image_size": 32, "patch_size": 8, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_hidden_layers": 2,
}  # fmt: skip
PAIRS = {
    "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
MIXED = {
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": IMAGES | {"model_type": "clip_vision_model"},
    "image_token_id": 7,
}
FREE = {
    "text_config": TEXT | {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "vision_config": {"depth": 2, "embed_dim": 64, "num_heads": 4, "hidden_size": 64},
    "image_token_id": 7, "vision_start_token_id": 8, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def saved_config(folder, model_type="llama", **values):
    """A small model's configuration, in a folder of its own."""
    made = CONFIG_MAPPING[model_type](**values if "text_config" in values else TEXT | values)
    path = Path(folder, model_type)
    made.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return saved_config(tmp_path_factory.mktemp("configs"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """For answers that take many predictions; a folder may have a colon."""
    folder = tmp_path_factory.mktemp("a:b")
    return saved_config(folder, num_hidden_layers=1, vocab_size=200)


def answered(capsys, *arguments):
    """The exit code, and what the JSON says."""
    code = main(["fit", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def predicted(setup, device="cpu"):
    found = Configured(setup)
    with making(setup, found) as made:
        batch = found.batch(setup.batch, torch.device("meta"))
        return predict_peak(made.fn, batch, optimizer=made.optimizer, device=device)


@pytest.mark.parametrize(
    ("model_type", "values", "options"),
    [
        ("llama", {"eos_token_id": [2, 3]}, {"sequence": 32}),
        ("bert", {}, {"sequence": 32}),
        ("t5", PAIRS, {"sequence": 32}),
        ("vit", IMAGES, {}),
        ("llava", MIXED, {"sequence": 32}),
        ("qwen2_vl", FREE, {"sequence": 300}),
        ("llama", {}, {"sequence": 32, "checkpointing": True, "dtype": "bfloat16", "lora": 4}),
    ],
)
def test_what_a_configuration_takes_is_what_the_real_model_takes(
    tmp_path, model_type, values, options
):
    if "lora" in options:
        pytest.importorskip("peft")
    setup = Setup(saved_config(tmp_path, model_type, **values), batch=3, **options)
    numbers = []

    def work():
        model, batch = in_memory(setup, Configured(setup), torch.device("cpu"))
        numbers.append(sum(p.numel() for p in model.parameters()))
        optimizer = torch.optim.AdamW(
            (p for p in model.parameters() if p.requires_grad), foreach=False
        )
        return step_of(lambda batch: model(**batch).loss, batch, optimizer)()

    report, truth_bytes = predicted(setup), true_peak_bytes(work)
    assert truth_bytes <= report.peak_bytes <= truth_bytes * 1.02
    # weights that a model ties, as BERT's, are counted once
    with making(setup, Configured(setup)) as made:
        assert [made.size.n_parameters] == numbers


# --- ranks: what they really take in a step


def measured(rank, setups):
    """The bytes of a step of each setup beyond what was there before."""
    asked = [Setup(**setup) for setup in setups]
    return [_replicated(each) if each.shard == "ddp" else _sharded(each) for each in asked]


def _sharded(asked):
    """The bytes of a first step beyond what was there before, as a budget counts them."""
    found = []
    mesh = init_device_mesh("cpu", (asked.ranks,))
    # a thread of gloo may hold what it has sent for a moment longer
    for _ in range(4):
        model, batch = in_memory(asked, Configured(asked), torch.device("cpu"))
        shard(model, mesh, offloads=asked.offloads)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        step = step_of(lambda batch, model=model: model(**batch).loss, batch, optimizer)
        with memory_budget("4GiB") as budget:
            step()
        found.append(budget.peak_bytes)
    return min(found)


def _replicated(asked):
    """The bytes of the second step, buckets included, as the allocator counts them."""

    def work(model, batch):
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        step = step_of(lambda batch: replica(**batch).loss, batch, optimizer)
        step()
        optimizer.zero_grad()
        return step()

    # a thread of gloo may hold what it has sent for a moment longer
    return min(
        true_peak_bytes(partial(work, *in_memory(asked, Configured(asked), torch.device("cpu"))))
        for _ in range(4)
    )


def predicted_sharded(setup, rank):
    found = Configured(setup)
    with making(setup, found, rank) as made:
        batch = found.batch(setup.batch, torch.device("meta"))
        return counted_bytes(made.fn, batch, made.optimizer)


@pytest.mark.slow
# of BERT's logits, which nobody writes into
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
def test_each_rank_takes_what_is_predicted(llama, tmp_path):
    # its words are tied to its head: no block of their own
    bert = saved_config(tmp_path, "bert")
    setups = [
        Setup(model, batch=4, sequence=32, ranks=2, **options)
        for model, options in (
            (llama, {}), (llama, {"offloads": True}), (bert, {}), (llama, {"shard": "ddp"}),
        )
    ]  # fmt: skip
    asked = [asdict(setup) for setup in setups]
    found = run_ranks(measured, 2, timeout=180, setups=asked)
    for which, setup in enumerate(setups[:-1]):
        assert [of_rank[which] for of_rank in found] == [
            predicted_sharded(setup, rank) for rank in range(2)
        ]
    report = predicted(setups[-1], "cpu")
    alone = predicted(Setup(llama, batch=4, sequence=32))
    with making(setups[-1], Configured(setups[-1])) as made:
        bucket_bytes = 4 * made.size.n_parameters
    assert report.baseline_bytes - alone.baseline_bytes == bucket_bytes
    # a rank may keep the numbers of what it tells others of for a moment
    predicted_bytes = report.later_peak_bytes - report.baseline_bytes + bucket_bytes
    assert all(0 <= of_rank[-1] - predicted_bytes <= 2048 for of_rank in found)


def test_a_generated_text_takes_its_whole_cache(tiny):
    n_layers, n_heads, width = 1, 2, 16
    short, long = (
        predicted(Setup(tiny, batch=8, sequence=32, generate=n)).peak_bytes for n in (301, 401)
    )
    cache_bytes = 2 * n_layers * 8 * 100 * n_heads * width * 4
    assert long - short >= cache_bytes
    # and, while a layer's is made longer, that of the layer once more
    assert long - short <= cache_bytes * (1 + 2 / n_layers) + 64 * 1024


@pytest.mark.parametrize("options", [{}, {"model_type": "t5", **PAIRS}])
def test_generating_takes_what_is_predicted(tmp_path, options):
    path = saved_config(tmp_path, **options)
    setup = Setup(path, batch=4, sequence=32, generate=40)
    report = predicted(setup)

    def work():
        model, batch = in_memory(setup, Configured(setup), torch.device("cpu"))
        ids = batch["input_ids"]
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=40, max_new_tokens=40,
            do_sample=False,
        )  # fmt: skip

    assert abs(true_peak_bytes(work) / report.peak_bytes - 1) < 0.03


def test_cards_have_a_verdict_each_and_a_change_that_makes_it_fit(tiny):
    setup = Setup(tiny, batch=4, sequence=384)
    found = answer(setup, [1], [80 * MIB, 104 * MIB], "cuda")
    small, large = found.facts()["cases"]
    assert (found.fits, small["fits"], large["fits"]) == (False, False, True)
    # the allocator may have to give back what it caches
    assert small["remedy"]["needed_bytes"] <= 100 * MIB
    assert "    step(\n        lambda part: model" in small["remedy"]["how"]
    assert large["remedy"] is None
    largest = replace(setup, batch=small["largest_batch"])
    assert predicted(largest, "cuda").fits(small["memory_bytes"])
    above = replace(setup, batch=small["largest_batch"] + 1)
    assert not predicted(above, "cuda").fits(small["memory_bytes"])
    first, line, *others = found.text(width=200).splitlines()
    assert first.endswith(
        f"; largest batch {largest.batch}. It fits with {small['remedy']['what']}."
    )
    told = re.fullmatch(
        r"Fits in 104\.0 MiB: yes; it needs (.+) MiB, (.+) MiB to spare; largest batch \d+\.", line
    )
    assert told is not None
    needed, spare = map(float, told.groups())
    assert needed + spare == pytest.approx(104, abs=0.2)
    # and what it needs is the sum of what it is for
    assert any(line.endswith(f"{needed} MiB in all.") for line in " ".join(others).split("  "))


def test_a_peak_in_the_loss_is_at_the_model(tiny, capsys):
    main(["fit", tiny, "--batch", "8", "--sequence", "64", "--optimizer", "none"])
    assert "in the backward pass, at model (" in " ".join(capsys.readouterr().out.split())


def test_a_peak_in_the_step_of_the_optimizer_has_no_line_of_the_command(tiny, capsys):
    main(["fit", tiny, "--sequence", "8", "--optimizer", "adamw-foreach", "--device", "cpu"])
    told = " ".join(capsys.readouterr().out.split())
    assert "of cpu at most: in the optimizer step, in aten._foreach" in told


def test_a_model_whose_shared_weights_can_not_be_sharded_is_answered_without_shards(
    tmp_path, capsys
):
    bert = saved_config(tmp_path, "bert", num_hidden_layers=1, vocab_size=300)
    words = "--ranks 2 --shard ddp --checkpointing --device-memory 16MiB"
    code, found = answered(capsys, bert, *words.split())
    # and a change that does not help is not named
    assert (code, found["fits"], found["cases"][0]["remedy"]) == (1, False, None)


def test_images_of_a_model_in_two_parts_have_the_size_of_its_vision(tmp_path):
    text = TEXT | {"projection_dim": 64}
    folder = saved_config(
        tmp_path, "clip", text_config=text, vision_config=IMAGES, projection_dim=64
    )
    assert Configured(Setup(folder)).sample_in_words() == "32 x 32 pixels"
    assert predicted(Setup(folder, batch=2)).peak_bytes > 0


def test_ranks_and_paging_take_less_and_the_fewest_ranks_that_help_are_named(tmp_path, capsys):
    # of weights, mostly
    shape = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 20_000}
    wide = saved_config(tmp_path, **shape)
    words = wide, "--sequence", "8", "--checkpointing"
    code, found = answered(capsys, *words, "--ranks", "1,2,4", "--ranks", "8")
    needed = [case["needed_bytes"] for case in found["cases"]]
    assert code == 0
    assert needed == sorted(needed, reverse=True)
    code, found = answered(capsys, *words, "--device-memory", f"{needed[2]}B")
    remedy = found["cases"][0]["remedy"]
    assert (code, remedy["what"]) == (1, "4 ranks, each with a device")
    assert 'init_device_mesh("cuda", (4,))' in remedy["how"]
    assert remedy["needed_bytes"] == needed[2] < needed[1]
    _, replicated = answered(capsys, *words, "--ranks", "8", "--shard", "ddp")
    assert replicated["cases"][0]["needed_bytes"] > needed[-1]
    code, paged = answered(capsys, *words, "--optimizer", "paged")
    assert code == 0
    weight_bytes = 4 * paged["n_parameters"]
    # units are rounded up, and there are buffers
    assert weight_bytes <= paged["report"]["weight_bytes"] <= 1.01 * weight_bytes
    assert paged["cases"][0]["needed_bytes"] < needed[0]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Own"}}, "own code is not run"),
    ],
)
def test_what_a_prediction_leaves_out_is_named(values, told, tmp_path):
    folder = saved_config(tmp_path, **values)
    assert any(told in note for note in Configured(Setup(folder, sequence=8)).notes)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
# of peft
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
@pytest.mark.parametrize(
    "options",
    [
        {"batch": 4},
        {"batch": 4, "checkpointing": True, "optimizer": "sgd", "lora": 4, "dtype": "bfloat16"},
        {"ranks": 2},
        {"ranks": 2, "offloads": True, "checkpointing": True},
    ],
)
def test_lines_to_paste_run_as_they_are(llama, tmp_path, monkeypatch, options):
    setup = Setup(llama, sequence=16, **options)
    maximum = None if setup.ranks > 1 else 2
    lines = recipe(setup, blocks=("LlamaDecoderLayer",), maximum=maximum)
    assert all(len(line) < 80 for line in lines.splitlines())
    monkeypatch.chdir(tmp_path)
    plain = Setup(llama, batch=setup.batch, sequence=16)
    model, batch = in_memory(plain, Configured(plain), torch.device("cpu"))
    dataset = [{name: each[0] for name, each in batch.items()}] * 4
    with fake_ranks(0, setup.ranks) if setup.ranks > 1 else nullcontext():
        names = {"model": model, "batches": [batch], "dataset": dataset}
        exec(lines.replace('"cuda"', '"cpu"'), names)
    # what was predicted is what is set
    assert names["optimizer"].defaults["foreach"] is False
    assert names.get("options", {}).get("reshard_after_forward", True) is True
    assert ("offload_policy" in names.get("options", {})) is setup.offloads
    state = names["optimizer"].state
    assert all(state[p] or setup.optimizer == "sgd" for p in names["weights"])
    assert (len(names["weights"]) < len([*model.parameters()])) == (setup.lora is not None)


@pytest.fixture(scope="module")
def places(tmp_path_factory, llama):
    """What the arguments of a mistake name."""
    folder = tmp_path_factory.mktemp("mistakes")
    made = {"folder": folder, "llama": llama}
    values = {
        "vit": IMAGES, "bert": TEXT | {"max_position_embeddings": 64}, "llava": MIXED,
        "hubert": {},
    }  # fmt: skip
    made |= {name: saved_config(folder, name, **each) for name, each in values.items()}
    heads = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5}
    texts = {"broken": "{", "unknown": '{"model_type": "martian"}', "heads": json.dumps(heads)}
    for name, text in texts.items():
        made[name] = folder / f"{name}.json"
        made[name].write_text(text)
    return made


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "'nowhere' is no folder, no file, no MODULE:FUNCTION, and not in the local"),
        (["./nothing.json"], "There is no file './nothing.json'."),
        (["{folder}"], "has no config.json. Name the folder of a model of transformers."),
        (["{llama}", "--batch", str(2**62)], "fails on a batch of its configuration"),
        (["{llama}", "--ranks", str(2**31)], "is above 2147483647"),
        (["{llama}", "--device-memory", "24"], "write the unit, such as 24GiB"),
        (["{llama}", "--device-memory", "24 gigs"], "'24 gigs' is not a number of bytes. Write an"),
        (["{llama}", "--device", "rtx"], "'rtx' is no device of torch; write cuda, cuda:1"),
        (
            ["{llama}", "--ranks", "2", "--shard", "tp"],
            "--shard: invalid choice: 'tp' (choose from",
        ),
        (["{llama}", "--generate", "5", "--lora", "4"], "--lora is for training."),
        (["{llama}", "--generate", "5", "--optimizer", "sgd"], "--optimizer is for training."),
        (["{llama}", "--ranks", "1", "--shard", "ddp"], "--shard is for several ranks."),
        (["{bert}", "--sequence", "4096"], "It is made for at most 64 tokens."),
        (["{heads}"], "The hidden size (64) is not a multiple of the number of attention heads (5"),
        (["{llama}", "--generate", "5", "--ranks", "2", "--shard", "ddp"], "DDP exchanges"),
        (["{llama}", "--optimizer", "paged", "--ranks", "2"], "paged is for one device."),
        (["{llama}", "--images", "1"], "--images is for models of text and images."),
        (["{llava}", "--sequence", "16"], "The images of a sample are 16 tokens, and it has 16."),
        (["{llama}", "--cpu-offload"], "--cpu-offload is for shards: give --ranks above 1"),
        (["{vit}", "--sequence", "5"], "--sequence says nothing of images."),
        (["{hubert}"], "A hubert has no class that is trained on text"),
        (["train.py:setup", "--batch", "4"], "--batch is for a MODEL."),
        (["train.py:setup", "--device-memory", "1GiB,2GiB"], "Name one."),
        (["{broken}"], "can't be read as JSON"),
        (["{unknown}"], "names the type 'martian', of which transformers"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(places, capsys, arguments, told):
    try:
        code = main(["fit", *(each.format(**places) for each in arguments)])
    except SystemExit as error:
        code = error.code
    assert code == 2
    lines = [each for each in capsys.readouterr().err.splitlines() if "error:" in each]
    assert len(lines) == 1
    assert told in lines[0]


@pytest.mark.parametrize(
    ("comment", "code", "is_held"),
    [
        ("fit /models/llama --ranks 16 --device-memory 80GiB", 1, True),
        ("fit /models/llama --ranks 16 --device-memory 80GiB", 0, False),
        # a mistake in the comment holds no job
        ("fit /models/llama --device-memory 80", 2, False),
        ("fit train.py:setup", 1, False),
    ],
)
def test_the_prolog_of_the_examples_holds_what_does_not_fit(tmp_path, comment, code, is_held):
    script = Path(__file__).parents[2] / "examples" / "prolog_slurmctld.sh"
    for name, ends in (("tenure", code), ("scontrol", 0)):
        stand_in = tmp_path / name
        stand_in.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.called\nexit {ends}\n')
        stand_in.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_COMMENT": comment,
    }
    subprocess.run(["sh", script], env=environment, check=True)
    called = {path.name: path.read_text() for path in tmp_path.glob("*.called")}
    is_asked = comment.startswith("fit ") and ":" not in comment
    assert called.get("tenure.called") == (f"{comment}\n" if is_asked else None)
    assert called.get("scontrol.called") == ("requeuehold 7\n" if is_held else None)
