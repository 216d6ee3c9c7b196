"""The model in other people's training code."""

import pytest
import torch
from tests.support import small_model, tokens
from torch import nn
from transformers import AutoModelForSequenceClassification

from trellis.models import TrellisForSequenceClassification


def test_the_transformers_trainer_trains_it(tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    model = small_model()
    data = [{"input_ids": row, "labels": row} for row in tokens(16, 12)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=8, learning_rate=1e-2,
        report_to=[], logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    assert trainer.evaluate()["eval_loss"] < losses[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_sequences_are_classified_by_their_last_token(tmp_path, side):
    """A model trained on text gets a head of three labels, and learns them."""
    small_model(pad_token_id=0).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(model) is TrellisForSequenceClassification
    texts = [row[row > 0] for row in tokens(6, 12)[:, :12]]
    texts = [text[: 4 + n] for n, text in enumerate(texts)]
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_side=side)
    mask = padded != 0
    alone = torch.cat([model(text[None]).logits for text in texts])
    assert torch.allclose(model(padded, attention_mask=mask).logits, alone, atol=1e-5)
    labels = torch.arange(6) % 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(15):
        loss = model(padded, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(model(padded, attention_mask=mask).logits.argmax(-1), labels)


def test_a_lora_attaches_to_the_projections():
    peft = pytest.importorskip("peft", reason="needs peft")
    model = small_model("hybrid")
    ids = tokens(2, 9)
    before = model(ids).logits
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "alpha_proj"]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    assert torch.equal(wrapped(ids).logits, before)
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    assert any("alpha_proj" in name for name in trained)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    first = last = None
    for _ in range(5):
        last = wrapped(ids, labels=ids).loss
        first = last if first is None else first
        optimizer.zero_grad()
        last.backward()
        optimizer.step()
    assert last < first


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_training_step_equals_the_eager_one(backend):
    ids = tokens(2, 20)
    eager, compiled = small_model().train(), small_model().train()
    step = torch.compile(compiled, backend=backend)
    eager(ids, labels=ids).loss.backward()
    step(ids, labels=ids).loss.backward()
    for one, other in zip(compiled.parameters(), eager.parameters()):
        assert torch.allclose(one.grad, other.grad, atol=1e-6, rtol=1e-4)


def test_ten_steps_of_adam_lower_the_loss():
    model = small_model().train()
    ids = tokens(4, 30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3
