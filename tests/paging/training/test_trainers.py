"""A Trainer of transformers over a paged model: the parameters of a plain one, or a refusal."""

import copy

import pytest
import torch

from tenure.paging import PagingError, page

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from tenure.integrations.transformers import AdaptiveTrainer  # noqa: E402


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )
    )  # fmt: skip


def bringing_home(kind):
    class PagedTrainer(kind):
        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            return (found[0].cpu(), found[1]) if isinstance(found, tuple) else found.cpu()

    return PagedTrainer


def train(kind, model, folder):
    torch.manual_seed(0)
    data = [{"input_ids": t, "labels": t} for t in torch.randint(3, 60, (16, 20))]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no", learning_rate=0.1,
        optim="sgd",
    )  # fmt: skip
    kind(model=model, args=arguments, train_dataset=data).train()


@pytest.mark.exhaustive
@pytest.mark.sim_allocator("exact")
@pytest.mark.parametrize("kind", [Trainer, AdaptiveTrainer])
def test_a_loss_that_is_brought_home_trains_as_the_plain_model(sim, kind, tmp_path):
    model, plain = llama(), llama()
    train(Trainer, plain, tmp_path)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    if kind is AdaptiveTrainer:
        sim(budget=4 * weight_bytes)
    with page(model, sim.device, budget=int(0.6 * weight_bytes), training=True, activations="host"):
        train(bringing_home(kind), model, tmp_path)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


# torch tells so of what is refused once more where the forward ends
@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_without_that_it_is_refused_by_name_and_so_is_a_model_that_is_moved(sim, tmp_path):
    model = llama()
    before = copy.deepcopy(model.state_dict())
    with page(model, sim.device, training=True):
        with pytest.raises(ValueError, match="loss must be on the original device"):
            train(Trainer, model, tmp_path)
        model.to(sim.device)
        with pytest.raises(PagingError, match=r"was given other memory while it is paged"):
            model(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert all(torch.equal(value.cpu(), before[key]) for key, value in model.state_dict().items())
