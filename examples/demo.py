"""A small Trellis language model, trained for a minute on Python's own standard library.

Shows the loss falling, a sample, and a cache whose size does not depend on what was read.
"""

from __future__ import annotations

import random
import sysconfig
import time
from pathlib import Path

import torch

from trellis import TrellisConfig, TrellisForCausalLM

SECONDS, TOKENS, BATCH = 75, 128, 16


def corpus() -> torch.Tensor:
    """Sources of the running interpreter's standard library, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py"))
    files = [f for f in files if "site-packages" not in f.parts and "test" not in f.parts]
    random.Random(0).shuffle(files)
    text = b"\n".join(f.read_bytes() for f in files[:300])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main() -> None:
    torch.manual_seed(0)
    data = corpus()
    split = int(len(data) * 0.95)
    train, held_out = data[:split], data[split:]
    config = TrellisConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    model = TrellisForCausalLM(config)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters; {len(train):,} bytes to learn from, for {SECONDS} seconds")

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    start, step = time.monotonic(), 0
    while (passed := time.monotonic() - start) < SECONDS:
        progress = passed / SECONDS
        rate = 4e-3 * min(1.0, 10 * progress + 0.05) * (1 - progress) ** 0.5
        for group in optimizer.param_groups:
            group["lr"] = rate
        first = torch.randint(0, len(train) - TOKENS, (BATCH, 1))
        ids = train[first + torch.arange(TOKENS)]
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step:4d}  {passed:3.0f} s  loss {loss.item():.3f}", flush=True)
        step += 1
    model.eval()
    with torch.no_grad():
        ids = held_out[: 16 * 512].view(16, 512)
        loss = model(ids, labels=ids, logits_to_keep=1).loss.item()
    print(f"step {step:4d}  held-out loss {loss:.3f} nats per byte (uniform: 5.545)")

    prompt = torch.tensor([list(b"def read(self, ")])
    out = model.generate(prompt, max_new_tokens=160, do_sample=True, temperature=0.7)
    print("\nA sample:\n" + bytes(out[0].tolist()).decode(errors="replace") + "\n")

    print("Reading on, the cache keeps its size:")
    cache = model.init_cache(1)
    for part in (1_000, 9_000, 20_000):
        begin = time.monotonic()
        model.read(train[None, :part], cache)
        rate = part / (time.monotonic() - begin)
        print(f"  {cache.get_seq_length():6,} tokens read: {cache.nbytes:,} bytes, {rate:,.0f}/s")


if __name__ == "__main__":
    main()
