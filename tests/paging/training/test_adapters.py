"""Adapters of peft over a paged base that is frozen, and Trainers of transformers, are exact."""

import peft
import pytest
import torch
from accelerate.utils import send_to_device
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tenure.integrations.transformers import AdaptiveTrainer
from tenure.paging import PagingError, page

from ..support import about_values, weight_bytes

pytestmark = [
    about_values,
    # what peft calls and passes, transformers has renamed
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

_CAUSAL = {"task_type": "CAUSAL_LM"}
_LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **_CAUSAL}
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(lora_dropout=0.1, **_LORA),
    "dora": lambda: peft.LoraConfig(use_dora=True, **_LORA),
    "lora of the words": lambda: peft.LoraConfig(
        r=4, target_modules=["embed_tokens"], modules_to_save=["lm_head"], **_CAUSAL
    ),
    # has large buffers that all layers share
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], **_CAUSAL),
}


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def build(kind="lora"):
    return peft.get_peft_model(llama(), ADAPTERS[kind]())


def sentences(sim, n=2):
    torch.manual_seed(1)
    return [torch.randint(40, (2, 5)).to(sim.device) for _ in range(n)]


def loss_of(model, x):
    return model(input_ids=x, labels=x).loss


def step(model, x):
    """A step, or what comes before its backward pass, where gradients are off."""
    model.zero_grad()
    loss = loss_of(model, x)
    if torch.is_grad_enabled():
        loss.backward()
    return loss.detach().cpu()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_train_as_over_a_base_on_the_device_and_only_their_gradients_go_home(
    sim, pair, kind
):
    both, d2h_bytes = pair(build(kind)), []
    trained = [
        [p for p in model.parameters() if p.requires_grad] for model in (both.host, both.there)
    ]
    optimizers = [torch.optim.AdamW(each, lr=0.01) for each in trained]
    trained_bytes = sum(p.nbytes for p in trained[0])
    # of the buffers that are read and could be a batch norm's: the frequencies of positions
    buffers = both.host.named_buffers()
    vector_bytes = sum(each.nbytes for name, each in buffers if name.endswith(".inv_freq"))

    def whole_step(model, x):
        before_bytes = sim.copied_bytes("d2h")
        loss = step(model, x)
        d2h_bytes.append(sim.copied_bytes("d2h") - before_bytes)
        return loss

    with both.page(0.7) as handle:
        assert handle.plan.ring_bytes
        assert handle.plan.allocated_bytes < both.weight_bytes - trained_bytes
        for x in sentences(sim):
            both.agree(lambda model, x=x: whole_step(model, x))
            ours, theirs = d2h_bytes[-2:]
            assert ours - theirs == trained_bytes + vector_bytes
            for optimizer in optimizers:
                optimizer.step()
        assert both.values_differ() == []


def merged(model, x, _):
    model.merge_adapter()
    with torch.no_grad():
        loss = loss_of(model, x).cpu()
    model.unmerge_adapter()
    return [loss]


def switched(model, x, _):
    with model.disable_adapter(), torch.no_grad():
        losses = [loss_of(model, x).cpu()]
    model.set_adapter("second")
    losses.append(step(model, x))
    model.set_adapter("default")
    return losses


def saved(model, x, folder):
    model.save_pretrained(folder)
    files = load_file(folder / "adapter_model.safetensors")
    own = peft.get_peft_model_state_dict(model)
    return [*files.values(), *(each.cpu() for each in own.values())]


def loaded(model, x, _):
    values = {name: each + 1 for name, each in peft.get_peft_model_state_dict(model).items()}
    peft.set_peft_model_state_dict(model, values)
    return [step(model, x)]


def merged_and_unloaded(model, x, _):
    with torch.no_grad():
        return [loss_of(model.merge_and_unload(), x).cpu()]


@pytest.mark.parametrize(
    ("verb", "trains"),
    [
        (merged, True),
        (merged, False),
        (switched, True),
        (saved, False),
        (loaded, True),
        (merged_and_unloaded, False),
    ],
)
def test_verbs_of_adapters_do_what_they_do_to_a_base_on_the_device(
    sim, pair, tmp_path, verb, trains
):
    model = build()
    model.add_adapter("second", peft.LoraConfig(**_LORA))
    # merged weights are computed on the host, so numbers are such that all kernels round alike
    with torch.no_grad():
        for each in model.parameters():
            each.copy_((each * 16).round() / 16)
    both = pair(model)
    (x,) = sentences(sim, 1)
    budget = int(both.weight_bytes * 0.7)
    if not trains:
        both.host.eval()
        both.there.eval()
    with page(both.host, sim.device, budget=budget, training=trains):
        with torch.set_grad_enabled(trains):
            both.agree(lambda model: step(model, x))
            both.agree(lambda model: verb(model, x, tmp_path))
        assert both.values_differ() == []


def test_an_adapter_that_came_later_is_named(sim, pair):
    both = pair(build())
    (x,) = sentences(sim, 1)
    with both.page(0.7):
        both.host.add_adapter("late", peft.LoraConfig(**_LORA))
        both.host.set_adapter("late")
        with pytest.raises(RuntimeError, match="same device") as caught:
            loss_of(both.host, x)
        (note,) = caught.value.__notes__
        assert note.startswith("The model is paged to sim:0, and it has got ")
        assert "lora_A.late.weight' (float32[4, 16] on cpu, 256 B)" in note
        assert note.endswith("Call unpage(), and page the model again with them.")
    with both.page(0.7):
        step(both.host, x)
    gradients = {name: p.grad for name, p in both.host.named_parameters() if p.grad is not None}
    assert gradients
    assert all("late" in name for name in gradients)


def bringing_home(kind):
    class PagedTrainer(kind):
        def compute_loss(self, model, inputs, *args, **kwargs):
            inputs = send_to_device(inputs, "sim")
            found = super().compute_loss(model, inputs, *args, **kwargs)
            return (found[0].cpu(), found[1]) if isinstance(found, tuple) else found.cpu()

    return PagedTrainer


def train_by(kind, model, folder, **options):
    torch.manual_seed(0)
    data = [{"input_ids": t, "labels": t} for t in torch.randint(3, 40, (8, 20))]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no", learning_rate=0.1,
        optim="sgd", **options,
    )  # fmt: skip
    kind(model=model, args=arguments, train_dataset=data).train()


@pytest.mark.sim_allocator("exact")
@pytest.mark.parametrize("kind", [Trainer, AdaptiveTrainer])
def test_a_loss_that_is_brought_home_trains_as_the_plain_model(sim, kind, tmp_path):
    model, plain = llama(), llama()
    # a loss that the Trainer computes itself, of the batch
    options = {"label_smoothing_factor": 0.1}
    train_by(Trainer, plain, tmp_path, **options)
    n_bytes = weight_bytes(model)
    if kind is AdaptiveTrainer:
        sim(budget=4 * n_bytes)
    with page(model, sim.device, budget=int(0.6 * n_bytes), training=True, activations="host"):
        train_by(bringing_home(kind), model, tmp_path, **options)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


# torch tells so of what is refused once more where the forward ends
@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_without_that_it_is_refused_by_name_and_so_is_a_model_that_is_moved(sim, tmp_path):
    model, before = llama(), llama().state_dict()
    with page(model, sim.device, training=True):
        with pytest.raises(ValueError, match="loss must be on the original device"):
            train_by(Trainer, model, tmp_path)
        model.to(sim.device)
        with pytest.raises(PagingError, match=r"was given other memory while it is paged"):
            model(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert all(torch.equal(value.cpu(), before[key]) for key, value in model.state_dict().items())
